"""Edits of one module, anchored on names: what is not touched stays byte for byte.

Every function takes a module and returns the edited one, or raises
:class:`AnchorMissing`. Code that is put in is formatted where it lands
(:mod:`~omlx_admission.upstream.style`); nothing else is formatted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import libcst as cst

from omlx_admission.upstream import style
from omlx_admission.upstream.anchors import (
    docstring_length,
    function,
    replace_definition,
    squeezed,
)
from omlx_admission.upstream.change import AnchorMissing

Block = Sequence[cst.BaseStatement]

_BLANK = cst.EmptyLine(indent=False)


def change_function(
    module: cst.Module,
    name: str,
    change: Callable[[cst.FunctionDef], cst.FunctionDef | Sequence[cst.FunctionDef]],
) -> cst.Module:
    """Put the result of ``change`` in the place of a function or method."""
    result = change(function(module, name))
    new = [result] if isinstance(result, cst.FunctionDef) else list(result)
    return replace_definition(module, name, new)


def _depth(name: str) -> int:
    return len(name.split("."))


def _with_body(node: cst.FunctionDef, body: Block) -> cst.FunctionDef:
    if not isinstance(node.body, cst.IndentedBlock):
        raise AnchorMissing(f"{node.name.value} has its body on the line of its name")
    return node.with_changes(body=node.body.with_changes(body=list(body)))


def _body(node: cst.FunctionDef) -> list[cst.BaseStatement]:
    return [s for s in node.body.body if isinstance(s, cst.BaseStatement)]


def insert_first(module: cst.Module, name: str, code: str) -> cst.Module:
    """Put statements at the start of a function, after its docstring."""
    new = style.statements(code, _depth(name))

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        body = _body(node)
        at = docstring_length(body)
        return _with_body(node, [*body[:at], *new, *body[at:]])

    return change_function(module, name, change)


def insert_last(module: cst.Module, name: str, code: str) -> cst.Module:
    """Put statements at the end of a function, whose last statement must not leave it."""
    new = style.statements(code, _depth(name))

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        body = _body(node)
        last = body[-1]
        if isinstance(last, cst.SimpleStatementLine) and isinstance(
            last.body[-1], cst.Return | cst.Raise
        ):
            raise AnchorMissing(f"{name} ends with a return or raise")
        return _with_body(node, [*body, *new])

    return change_function(module, name, change)


def insert_after_assignment(
    module: cst.Module, name: str, target: str, code: str
) -> cst.Module:
    """Put statements behind the one in the body of ``name`` that assigns ``target``."""
    return _insert_beside(module, name, code, lambda s: _assigns(s, target), target, 1)


def insert_before_statement(
    module: cst.Module, name: str, statement: str, code: str
) -> cst.Module:
    """Put statements before the one in the body of ``name`` whose code is ``statement``."""
    return _insert_beside(module, name, code, _is(statement), statement, 0)


def replace_statement(module: cst.Module, name: str, old: str, new: str) -> cst.Module:
    """Put other statements in the place of the one in the body of ``name`` that is ``old``."""
    is_old = _is(old)
    fresh = style.statements(new, _depth(name))

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        body = _body(node)
        places = [index for index, statement in enumerate(body) if is_old(statement)]
        if len(places) != 1:
            raise AnchorMissing(f"{name}: {len(places)} times {old}, expected once")
        at = places[0]
        fresh[0] = fresh[0].with_changes(leading_lines=getattr(body[at], "leading_lines", []))
        return _with_body(node, [*body[:at], *fresh, *body[at + 1 :]])

    return change_function(module, name, change)


def _is(code: str) -> Callable[[cst.BaseStatement], bool]:
    """Whether a statement says ``code``. Only those of its kind are printed to compare."""
    wanted = re.sub(r"\s+", "", code)
    # As in a body: `return` and `await` stand in a function.
    kind = type(cst.parse_statement(code))
    return lambda statement: isinstance(statement, kind) and _bare(statement) == wanted


def _bare(statement: cst.CSTNode) -> str:
    """The code of a statement without the comments above it."""
    if hasattr(statement, "leading_lines"):
        statement = statement.with_changes(leading_lines=[])
    return squeezed(statement)


def _insert_beside(
    module: cst.Module,
    name: str,
    code: str,
    is_anchor: Callable[[cst.BaseStatement], bool],
    anchor: str,
    offset: int,
) -> cst.Module:
    new = style.statements(code, _depth(name))

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        body = _body(node)
        places = [index for index, statement in enumerate(body) if is_anchor(statement)]
        if len(places) != 1:
            raise AnchorMissing(f"{name}: {len(places)} statements with {anchor}, expected one")
        at = places[0] + offset
        return _with_body(node, [*body[:at], *new, *body[at:]])

    return change_function(module, name, change)


def _assigns(statement: cst.BaseStatement, target: str) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    for small in statement.body:
        if isinstance(small, cst.AnnAssign) and squeezed(small.target) == target:
            return True
        if isinstance(small, cst.Assign) and any(
            squeezed(t.target) == target for t in small.targets
        ):
            return True
    return False


def insert_method(module: cst.Module, code: str, *, after: str) -> cst.Module:
    """Put a method behind the method ``after`` (``Class.method``)."""
    new = style.method(code).with_changes(leading_lines=[_BLANK])
    return change_function(module, after, lambda node: [node, new])


def split_function(
    module: cst.Module, name: str, *, head: str, rest: str, doc: str
) -> cst.Module:
    """Split a function after its docstring: ``head`` is its new body, ``rest`` takes the old.

    ``rest`` has the same parameters and stands right behind, so that not one line of
    the old body moves or changes. ``doc`` is its docstring.
    """
    new = style.statements(head, _depth(name))
    (docstring,) = style.statements(f'"""{doc}"""', _depth(name))

    def change(node: cst.FunctionDef) -> list[cst.FunctionDef]:
        body = _body(node)
        at = docstring_length(body)
        public = _with_body(node, [*body[:at], *new])
        old = _with_body(node, [docstring, *body[at:]])
        private = old.with_changes(
            name=cst.Name(rest.rpartition(".")[2]), leading_lines=[_BLANK], decorators=[]
        )
        return [public, private]

    return change_function(module, name, change)


def decorate(module: cst.Module, name: str, decorator: str) -> cst.Module:
    """Put a decorator outermost round a function or method."""

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        new = cst.Decorator(cst.parse_expression(decorator))
        return node.with_changes(decorators=[new, *node.decorators])

    return change_function(module, name, change)


def replace_expression(
    module: cst.Module, name: str, old: str, new: str, *, count: int = 1
) -> cst.Module:
    """Replace an expression within a function; ``count`` is how often it must be there."""
    wanted = re.sub(r"\s+", "", old)
    node = function(module, name)
    replacer = _Replacer(wanted, cst.parse_expression(new))
    changed = node.visit(replacer)
    if replacer.found != count:
        raise AnchorMissing(f"{name}: {old} is there {replacer.found} times, expected {count}")
    return replace_definition(module, name, [cast(cst.FunctionDef, changed)])


class _Replacer(cst.CSTTransformer):
    def __init__(self, wanted: str, new: cst.BaseExpression) -> None:
        super().__init__()
        self._wanted = wanted
        self._new = new
        self.found = 0

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        """Replace where the code is the wanted one."""
        if isinstance(original_node, cst.BaseExpression) and (
            squeezed(original_node) == self._wanted
        ):
            self.found += 1
            return self._new.deep_clone()
        return super().on_leave(original_node, updated_node)


def add_import(module: cst.Module, code: str, *, within: str = "") -> cst.Module:
    """Add ``from .x import y`` where import sorting wants it; nothing if it is there.

    ``within`` is a function that imports late, to which it is added instead.
    """
    if not within:
        return module.with_changes(body=_with_import(list(module.body), code, 0))
    depth = _depth(within)
    return change_function(
        module, within, lambda node: _with_body(node, _with_import(_body(node), code, depth))
    )


def _with_import(body: list[Any], code: str, depth: int) -> list[Any]:
    (new,) = style.statements(code, depth)
    key = _import_key(new)
    if key is None:
        raise ValueError(f"{code!r} is no relative from-import")
    if any(_import_key(s) == key and _bare(s) == squeezed(new) for s in body):
        return body
    keys: dict[int, tuple[int, str]] = {}
    for index, statement in enumerate(body):
        if (its := _import_key(statement)) is not None:
            keys[index] = its
        elif keys:
            break
    if not keys:
        raise AnchorMissing("no relative import to put another one beside")
    first = min(keys)
    at = next((index for index in keys if keys[index] > key), max(keys) + 1)
    if at == first:
        # The blank line, or the comment, above the block stays above the block.
        new = new.with_changes(leading_lines=getattr(body[at], "leading_lines", []))
        body[at] = body[at].with_changes(leading_lines=[])
    return [*body[:at], new, *body[at:]]


def _import_key(statement: cst.CSTNode) -> tuple[int, str] | None:
    if not isinstance(statement, cst.SimpleStatementLine):
        return None
    first = statement.body[0]
    if not isinstance(first, cst.ImportFrom) or not first.relative:
        return None
    name = "" if first.module is None else squeezed(first.module)
    # Sorting puts `..x` before `.x`, and within one level goes by name.
    return -len(first.relative), name


def insert_after_definition(module: cst.Module, target: str, code: str) -> cst.Module:
    """Put statements behind the one statement of the module that assigns ``target``."""
    body = list(module.body)
    places = [
        i
        for i, s in enumerate(body)
        if isinstance(s, cst.BaseStatement) and _assigns(s, target)
    ]
    if len(places) != 1:
        raise AnchorMissing(f"{len(places)} assignments to {target} at the top, expected one")
    at = places[0] + 1
    return module.with_changes(body=[*body[:at], *style.statements(code, 0), *body[at:]])
