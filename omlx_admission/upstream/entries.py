"""One entry more in a list: of a class's fields, a call's keywords, a dict, the imports.

As in :mod:`~omlx_admission.upstream.editing`, every function takes a module and returns
the edited one, or raises :class:`AnchorMissing`.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from omlx_admission.upstream import style
from omlx_admission.upstream.anchors import find, replace_definition, squeezed
from omlx_admission.upstream.change import AnchorMissing
from omlx_admission.upstream.editing import add_import
from omlx_admission.upstream.nested import change_functions


def insert_field(module: cst.Module, name: str, code: str) -> cst.Module:
    """Put statements behind the last annotated field of the class ``name``."""
    node = find(module, name)
    body = list(node.body.body) if isinstance(node.body, cst.IndentedBlock) else []
    fields = [
        index
        for index, statement in enumerate(body)
        if isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.AnnAssign)
    ]
    if not fields:
        raise AnchorMissing(f"{name} has no fields")
    at = fields[-1] + 1
    new = node.with_deep_changes(
        node.body, body=[*body[:at], *style.statements(code, 1), *body[at:]]
    )
    return replace_definition(module, name, [cast(cst.ClassDef, new)])


class _Keyword(cst.CSTTransformer):
    def __init__(self, callee: str, name: str, value: str) -> None:
        super().__init__()
        self._callee = callee
        self._name = name
        self._value = value
        self.found = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if squeezed(original_node.func) != self._callee or not updated_node.args:
            return updated_node
        self.found += 1
        *rest, last = updated_node.args
        if last.star == "**":
            return updated_node
        nothing = cst.SimpleWhitespace("")
        new = cst.Arg(
            value=cst.parse_expression(self._value),
            keyword=cst.Name(self._name),
            equal=cst.AssignEqual(nothing, nothing),
            comma=last.comma,
            whitespace_after_arg=last.whitespace_after_arg,
        )
        comma = (
            rest[-1].comma if rest else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        )
        last = last.with_changes(comma=comma, whitespace_after_arg=nothing)
        return updated_node.with_changes(args=[*rest, last, new])


def add_keyword(
    module: cst.Module, name: str, callee: str, keyword: str, value: str
) -> cst.Module:
    """Give the call of ``callee`` in function ``name`` a keyword, laid out as its last.

    A call that ends with ``**`` something passes all that there is already.
    """

    def change(node: cst.FunctionDef, _depth: int) -> cst.FunctionDef:
        visitor = _Keyword(callee, keyword, value)
        changed = cast(cst.FunctionDef, node.visit(visitor))
        if visitor.found != 1:
            raise AnchorMissing(f"{name}: {visitor.found} calls of {callee}, expected one")
        return changed

    return change_functions(module, name, change)


class _Entry(cst.CSTTransformer):
    def __init__(self, key: str, value: str) -> None:
        super().__init__()
        self._key = key
        self._value = value
        self.found = 0

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
        if len(updated_node.elements) < 2:
            return updated_node
        self.found += 1
        *rest, last = updated_node.elements
        new = cst.DictElement(
            cst.SimpleString(f'"{self._key}"'),
            cst.parse_expression(self._value),
            comma=last.comma,
        )
        last = last.with_changes(comma=rest[-1].comma)
        return updated_node.with_changes(elements=[*rest, last, new])


def add_entry(module: cst.Module, name: str, key: str, value: str) -> cst.Module:
    """Give the one dict in function ``name`` one more entry, laid out as its last."""

    def change(node: cst.FunctionDef, _depth: int) -> cst.FunctionDef:
        visitor = _Entry(key, value)
        changed = cast(cst.FunctionDef, node.visit(visitor))
        if visitor.found != 1:
            raise AnchorMissing(f"{name}: {visitor.found} dicts, expected one")
        return changed

    return change_functions(module, name, change)


def insert_before_definition(module: cst.Module, name: str, code: str) -> cst.Module:
    """Put a definition before the top-level one of ``name``."""
    node = find(module, name)
    (new,) = style.statements(code, 0)
    body = list(module.body)
    at = next((i for i, s in enumerate(body) if s is node), None)
    if at is None:
        raise AnchorMissing(f"{name} is not at the top")
    blank = [cst.EmptyLine(indent=False)] * 2
    return module.with_changes(
        body=[*body[:at], new.with_changes(leading_lines=blank), *body[at:]]
    )


def append_definitions(module: cst.Module, code: str) -> cst.Module:
    """Put definitions at the end of the module."""
    first, *rest = style.statements(code, 0)
    above = [cst.EmptyLine(indent=False)] * 2
    first = first.with_changes(leading_lines=above)
    return module.with_changes(body=[*module.body, first, *rest])


def import_name(module: cst.Module, source: str, name: str) -> cst.Module:
    """Import ``name`` from ``source`` (relative, as written), with what is imported from
    there already; else behind the other imports of the module's top."""
    body: list[cst.BaseStatement] = list(module.body)
    last = -1
    for index, statement in enumerate(body):
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        first = statement.body[0]
        if isinstance(first, cst.Import | cst.ImportFrom):
            last = index
        if not isinstance(first, cst.ImportFrom) or isinstance(first.names, cst.ImportStar):
            continue
        dotted = "." * len(first.relative) + (squeezed(first.module) if first.module else "")
        if dotted == source:
            names = {cst.Module([]).code_for_node(a).strip(" ,\n") for a in first.names}
            code = f"from {source} import {', '.join(sorted(names | {name}, key=_by_kind))}"
            (new,) = style.statements(code, 0)
            body[index] = new.with_changes(leading_lines=statement.leading_lines)
            return module.with_changes(body=body)
    code = f"from {source} import {name}"
    try:
        return add_import(module, code)
    except AnchorMissing:
        if last < 0:
            raise
    (new,) = style.statements(code, 0)
    new = new.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return module.with_changes(body=[*body[: last + 1], new, *body[last + 1 :]])


def _by_kind(name: str) -> tuple[int, str]:
    """Import sorting puts constants first, then classes, then the rest."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name
