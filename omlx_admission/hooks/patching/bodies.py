"""Bodies of oMLX's functions that were run, by fingerprint.

A signature does not say in which order a function takes a lock, counts a lease and calls
another one. Where a hook relies on that, ``bodies.txt`` has a fingerprint of the function
for each release that this package was run on. Doctor names the functions of an oMLX whose
body is none of these; a row with ``run`` is not met by one.

The fingerprint is of the syntax tree: comments, docstrings, layout and positions do not
count. It is the same on every Python, whose own dumps of a tree differ.
``python -m benchmarks.bodies DIR...`` writes the table from checkouts.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("bodies.txt")

#: Fields of a node that say nothing about what it does.
_SILENT = frozenset({"ctx", "type_comment", "kind", "type_ignores"})


@cache
def known() -> dict[str, dict[str, tuple[str, ...]]]:
    """By function, ``module:name``: the releases that have it, by fingerprint."""
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in TABLE.read_text("utf-8").splitlines():
        name, body, *releases = [*line.split(), "", ""]
        if name and body and name != "#":
            table.setdefault(name, {})[body] = tuple(filter(None, releases))
    return table


def fingerprint(node: ast.AST) -> str:
    """A hash of a definition, without its name and docstrings."""
    return hashlib.sha256("".join(_words(node)).encode()).hexdigest()[:12]


def _words(value: object) -> Iterator[str]:
    if isinstance(value, ast.JoinedStr):
        yield from _text(value)
    elif isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for field, inner in ast.iter_fields(value):
            if field == "name":
                continue
            if field == "body" and _has_docstring(value):
                inner = inner[1:]
            # What is empty is left out: a newer Python has fields that an older one lacks.
            if field not in _SILENT and inner not in (None, []):
                yield f" {field}="
                yield from _words(inner)
        yield ")"
    elif isinstance(value, list):
        for item in value:
            yield from _words(item)
            yield ","
    else:
        yield repr(value)


def _text(node: ast.JoinedStr) -> Iterator[str]:
    """An f-string: Pythons cut its plain pieces in different places."""
    yield "(f"
    plain = ""
    for piece in node.values:
        if isinstance(piece, ast.Constant):
            plain += str(piece.value)
            continue
        yield repr(plain)
        plain = ""
        yield from _words(piece)
    yield f"{plain!r})"


def _has_docstring(node: ast.AST) -> bool:
    """Whether the body of a definition begins with a docstring."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    first = node.body[0]
    return (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
