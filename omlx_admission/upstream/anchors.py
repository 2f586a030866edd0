"""Finding what an edit holds on to: definitions by their dotted names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from omlx_admission.upstream.change import AnchorMissing


def has(module: cst.Module, name: str) -> bool:
    """Whether a class, function or method of this dotted name is defined."""
    try:
        find(module, name)
    except AnchorMissing:
        return False
    return True


def find(module: cst.Module, name: str) -> cst.FunctionDef | cst.ClassDef:
    """The last definition of a dotted name, which is the one that Python keeps."""
    body: Sequence[cst.CSTNode] = module.body
    found: cst.FunctionDef | cst.ClassDef | None = None
    for part in name.split("."):
        found = next((n for n in reversed(body) if _is_named(n, part)), None)  # type: ignore[assignment]
        if found is None:
            raise AnchorMissing(f"{name} is missing")
        body = found.body.body
    assert found is not None
    return found


def replace_definition(
    module: cst.Module, name: str, new: Sequence[cst.BaseStatement]
) -> cst.Module:
    """Put statements in the place of the definition that :func:`find` finds.

    Only what lies on the way to it is made anew: a module may have ten thousand lines.
    """
    way: list[cst.Module | cst.FunctionDef | cst.ClassDef] = [module]
    parts = name.split(".")
    for index in range(len(parts)):
        way.append(find(module, ".".join(parts[: index + 1])))
    put: list[cst.CSTNode] = list(new)
    while len(way) > 1:
        old = way.pop()
        outer = way[-1]
        block = outer if isinstance(outer, cst.Module) else outer.body
        body: list[cst.CSTNode] = []
        for statement in block.body:
            body += put if statement is old else [statement]
        block = block.with_changes(body=body)
        put = [block if isinstance(outer, cst.Module) else outer.with_changes(body=block)]
    (changed,) = put
    assert isinstance(changed, cst.Module)
    return changed


def first_of(module: cst.Module, *names: str) -> str:
    """The first of these dotted names that is defined."""
    for name in names:
        if has(module, name):
            return name
    raise AnchorMissing(f"neither {' nor '.join(names)} is there")


def function(module: cst.Module, name: str) -> cst.FunctionDef:
    """Like :func:`find`, for a function or method."""
    found = find(module, name)
    if not isinstance(found, cst.FunctionDef):
        raise AnchorMissing(f"{name} is no function")
    return found


def _is_named(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.FunctionDef | cst.ClassDef) and node.name.value == name


def squeezed(node: cst.CSTNode) -> str:
    """The code of ``node`` without any space, to compare with."""
    return re.sub(r"\s+", "", cst.Module([]).code_for_node(node))


def docstring_length(body: Sequence[cst.CSTNode]) -> int:
    """1 where ``body`` begins with a docstring, else 0."""
    if not body or not isinstance(body[0], cst.SimpleStatementLine):
        return 0
    first = body[0].body[0]
    return int(
        isinstance(first, cst.Expr)
        and isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)
    )
