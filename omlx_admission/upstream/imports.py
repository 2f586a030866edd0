"""Imports of a transplanted module: of what is used, relative, in oMLX's order."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import libcst as cst

from omlx_admission.upstream.anchors import squeezed
from omlx_admission.upstream.rewriting import StaleRecipe, is_import


class _Names(cst.CSTVisitor):
    """Names that the code reads, annotations included."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.read.add(node.value)


def tidy_imports(
    module: cst.Module,
    modules: Mapping[str, str],
    imports: str,
    own: Collection[str | None],
) -> list[Any]:
    """Imports of what is still used, ours as relative ones, in oMLX's order."""
    names = _Names()
    module.visit(names)
    names.read.difference_update(name for name in own if name is not None)
    future: list[Any] = []
    standard: list[Any] = []
    installed: list[Any] = []
    relative: list[Any] = []
    rest: list[Any] = []
    place = 0
    for statement in [*module.body, *cst.parse_module(imports).body]:
        if not is_import(statement):
            rest.append(statement)
            continue
        place = place or len(rest)
        assert isinstance(statement, cst.SimpleStatementLine)
        node = statement.body[0]
        assert isinstance(node, cst.Import | cst.ImportFrom)
        dotted = _dotted(node)
        if dotted == "__future__":
            future.append(node)
        elif (used := _used_only(node, names.read)) is None:
            continue
        elif dotted.partition(".")[0] == "omlx_admission":
            relative.append(_moved(used, dotted, modules))
        elif isinstance(used, cst.ImportFrom) and used.relative:
            relative.append(used)
        elif dotted.partition(".")[0] in sys.stdlib_module_names:
            standard.append(used)
        else:
            installed.append(used)
    for absolute in (standard, installed):
        absolute.sort(key=lambda node: (isinstance(node, cst.ImportFrom), _dotted(node)))
    relative.sort(key=lambda node: (-len(node.relative), _dotted(node)))
    lines: list[Any] = []
    for group in (future, standard, installed, relative):
        for index, node in enumerate(group):
            blank = [cst.EmptyLine(indent=False)] if index == 0 else []
            lines.append(cst.SimpleStatementLine([node], leading_lines=blank))
    return [*rest[:place], *lines, *rest[place:]]


def _dotted(node: cst.Import | cst.ImportFrom) -> str:
    if isinstance(node, cst.ImportFrom):
        return "" if node.module is None else squeezed(node.module)
    return squeezed(node.names[0].name)


def _used_only(node: Any, read: set[str]) -> Any:
    if isinstance(node.names, cst.ImportStar):
        return node
    kept = [a for a in node.names if _bound(a) in read]
    if not kept:
        return None
    if len(kept) < len(node.names) and isinstance(node, cst.ImportFrom):
        # In one line; black breaks it again where it has to be.
        bare = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in kept]
        return node.with_changes(names=bare, lpar=None, rpar=None)
    kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return node.with_changes(names=kept)


def _bound(alias: cst.ImportAlias) -> str:
    if alias.asname is not None:
        return squeezed(alias.asname.name)
    return squeezed(alias.name).partition(".")[0]


def _moved(node: cst.ImportFrom, dotted: str, modules: Mapping[str, str]) -> cst.ImportFrom:
    below = dotted.removeprefix("omlx_admission").lstrip(".")
    relative = [cst.Dot()]
    if below in modules:
        return node.with_changes(module=cst.Name(modules[below]), relative=relative)
    assert not isinstance(node.names, cst.ImportStar)
    aliases = []
    for alias in node.names:
        full = f"{below}.{squeezed(alias.name)}"
        if full not in modules:
            raise StaleRecipe(f"{full} is used, but is no part of the new package")
        new = alias.with_changes(name=cst.Name(modules[full]))
        if alias.asname is None and modules[full] != squeezed(alias.name):
            new = new.with_changes(asname=cst.AsName(name=cst.Name(squeezed(alias.name))))
        aliases.append(new)
    return node.with_changes(module=None, relative=relative, names=aliases)
