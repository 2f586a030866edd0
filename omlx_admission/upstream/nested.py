"""Edits at any depth of a module: local functions, loops, handlers, calls.

As in :mod:`~omlx_admission.upstream.editing`, every function takes a module and returns
the edited one, or raises :class:`AnchorMissing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import libcst as cst

from omlx_admission.upstream import style
from omlx_admission.upstream.anchors import squeezed
from omlx_admission.upstream.change import AnchorMissing

#: A function, and how many blocks are open round it, to what it becomes.
Inside = Callable[[cst.FunctionDef, int], cst.FunctionDef]


class _InBlocks(cst.CSTTransformer):
    """Knows how many blocks are open round the node it leaves; ``depth``: round the first."""

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.depth = depth
        self.found = 0

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self.depth += 1

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        self.depth -= 1
        return updated_node


class _Functions:
    """Finds functions by walking through statements, never into expressions."""

    def __init__(self, name: str, change: Inside) -> None:
        self._name = name.split(".")
        self._change = change
        self.found = 0

    def body(self, body: Sequence[Any], scope: list[str], depth: int) -> list[Any] | None:
        """The statements changed; None where none of them is."""
        new = [self._statement(statement, scope, depth) for statement in body]
        if all(changed is old for changed, old in zip(new, body, strict=True)):
            return None
        return new

    def _statement(self, node: Any, scope: list[str], depth: int) -> Any:
        if not isinstance(node, cst.BaseCompoundStatement):
            return node
        inner = scope
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            inner = [*scope, node.name.value]
        node = self._within(node, inner, depth)
        if isinstance(node, cst.FunctionDef) and inner[-len(self._name) :] == self._name:
            self.found += 1
            return self._change(node, depth)
        return node

    def _within(self, node: Any, scope: list[str], depth: int) -> Any:
        """``node`` with the blocks in it changed."""
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            part = getattr(node, field, None)
            if isinstance(part, cst.IndentedBlock):
                body = self.body(part.body, scope, depth + 1)
                if body is not None:
                    node = node.with_changes(**{field: part.with_changes(body=body)})
            elif isinstance(part, Sequence):
                parts = [self._within(one, scope, depth) for one in part]
                if any(new is not old for new, old in zip(parts, part, strict=True)):
                    node = node.with_changes(**{field: parts})
            elif part is not None:
                changed = self._within(part, scope, depth)
                if changed is not part:
                    node = node.with_changes(**{field: changed})
        return node


def change_functions(module: cst.Module, name: str, change: Inside) -> cst.Module:
    """Change every function, at any depth, whose dotted name ends with ``name``."""
    walk = _Functions(name, change)
    body = walk.body(module.body, [], 0)
    if not walk.found:
        raise AnchorMissing(f"no function {name}")
    return module if body is None else module.with_changes(body=body)


def has_function(module: cst.Module, name: str) -> bool:
    """Whether there is a function, at any depth, whose dotted name ends with ``name``."""
    walk = _Functions(name, lambda node, _: node)
    walk.body(module.body, [], 0)
    return walk.found > 0


def decorate_functions(module: cst.Module, name: str, decorator: str) -> cst.Module:
    """Put a decorator innermost round these functions."""

    def change(node: cst.FunctionDef, _depth: int) -> cst.FunctionDef:
        new = cst.Decorator(cst.parse_expression(decorator))
        return node.with_changes(decorators=[*node.decorators, new])

    return change_functions(module, name, change)


class _Beside(_InBlocks):
    def __init__(self, depth: int, statement: str, code: str, before: bool) -> None:
        super().__init__(depth)
        self._wanted = squeezed(cst.parse_statement(statement))
        self._code = code
        self._before = before

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        super().leave_IndentedBlock(original_node, updated_node)
        body: list[cst.BaseStatement] = []
        for one in updated_node.body:
            if not self._is_wanted(one):
                body.append(one)
                continue
            self.found += 1
            new = style.statements(self._code, self.depth + 1)
            body += [*new, one] if self._before else [one, *new]
        return updated_node.with_changes(body=body)

    def _is_wanted(self, statement: cst.BaseStatement) -> bool:
        """Whether it is the wanted one; ``name(...)`` there stands for any arguments."""
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        code = squeezed(statement.with_changes(leading_lines=[])).partition("#")[0]
        head, dots, tail = self._wanted.partition("(...)")
        if not dots:
            return code == self._wanted
        return code.startswith(head + "(") and code.endswith(")" + tail)


def insert_beside(
    module: cst.Module, name: str, statement: str, code: str, *, before: bool = False
) -> cst.Module:
    """Put statements behind (or before) each ``statement`` in the functions ``name``.

    ``(...)`` in ``statement`` stands for any arguments of a call.
    """

    def change(node: cst.FunctionDef, depth: int) -> cst.FunctionDef:
        visitor = _Beside(depth, statement, code, before)
        changed = cast(cst.FunctionDef, node.visit(visitor))
        if not visitor.found:
            raise AnchorMissing(f"{name}: no statement {statement}")
        return changed

    return change_functions(module, name, change)


class _Handlers(_InBlocks):
    def __init__(self, depth: int, exception: str, code: str) -> None:
        super().__init__(depth)
        self._exception = exception
        self._code = code

    def leave_ExceptHandler(
        self, original_node: cst.ExceptHandler, updated_node: cst.ExceptHandler
    ) -> cst.ExceptHandler:
        kind, body = updated_node.type, updated_node.body
        if kind is None or squeezed(kind) != self._exception:
            return updated_node
        if not isinstance(body, cst.IndentedBlock):
            return updated_node
        self.found += 1
        name = updated_node.name
        if name is None:
            name = cst.AsName(cst.Name("e"))
            updated_node = updated_node.with_changes(name=name)
        code = self._code.format(squeezed(name.name))
        new = style.statements(code, self.depth + 1)
        kept = [s for s in body.body if squeezed(s).partition("#")[0] != "pass"]
        return updated_node.with_changes(body=body.with_changes(body=[*new, *kept]))


def insert_in_handlers(
    module: cst.Module, name: str, exception: str, code: str, *, needed: bool = True
) -> cst.Module:
    """Put statements first in each ``except exception`` within the functions ``name``.

    ``{}`` in ``code`` is the exception's name; a handler without one gets it. Where not
    ``needed``, functions without such a handler stay as they are.
    """

    def change(node: cst.FunctionDef, depth: int) -> cst.FunctionDef:
        visitor = _Handlers(depth, exception, code)
        changed = cast(cst.FunctionDef, node.visit(visitor))
        if needed and not visitor.found:
            raise AnchorMissing(f"{name}: no handler of {exception}")
        return changed

    return change_functions(module, name, change)


class _Callee(cst.CSTTransformer):
    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self._old = old
        self._new = new
        self.found = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if squeezed(original_node.func) != self._old:
            return updated_node
        self.found += 1
        return updated_node.with_changes(func=cst.parse_expression(self._new))


def replace_callee(module: cst.Module, name: str, old: str, new: str) -> cst.Module:
    """Call ``new`` where the functions ``name`` call ``old``."""

    def change(node: cst.FunctionDef, _depth: int) -> cst.FunctionDef:
        visitor = _Callee(old, new)
        changed = cast(cst.FunctionDef, node.visit(visitor))
        if not visitor.found:
            raise AnchorMissing(f"{name}: no call of {old}")
        return changed

    return change_functions(module, name, change)
