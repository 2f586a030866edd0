"""Annotations compared by what they mean, not by how they are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from omlx_admission.hooks.source_names import last_name

#: Names of before Python 3.9.
_OLD = {"Dict": "dict", "List": "list", "Set": "set", "Tuple": "tuple", "Type": "type"}
_ANYTHING = "[...]"


def is_one_of(annotation: ast.expr, wanted: Sequence[str]) -> bool:
    """Whether ``annotation`` means one of ``wanted``, where ``X[...]`` is any kind of X."""
    actual = _meant(annotation)
    parts = list(_alternatives(annotation))
    for name in map(_meant_by, wanted):
        if actual == name:
            return True
        kind = name.removesuffix(_ANYTHING)
        if kind != name and len(parts) == 1 and actual.partition("[")[0] == kind:
            return True
    return False


@cache
def _meant_by(text: str) -> str:
    return _meant(ast.parse(text, mode="eval").body)


def _meant(node: ast.expr) -> str:
    """One text for all ways to write a type: last names, alternatives in order."""
    return " | ".join(sorted({_one(part) for part in _alternatives(node)}))


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            yield from _alternatives(ast.parse(node.value, mode="eval").body)
        except (SyntaxError, ValueError):
            yield node
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    elif isinstance(node, ast.Subscript) and last_name(node.value) in ("Optional", "Union"):
        for part in _inside(node):
            yield from _alternatives(part)
        if last_name(node.value) == "Optional":
            yield ast.Constant(None)
    else:
        yield node


def _one(node: ast.expr) -> str:
    of = node.value if isinstance(node, ast.Subscript) else node
    name = last_name(of)
    if name is None:
        return ast.unparse(node)
    name = _OLD.get(name, name)
    if isinstance(node, ast.Subscript):
        return f"{name}[{', '.join(map(_meant, _inside(node)))}]"
    return name


def _inside(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
