"""What a name stands for when oMLX's module has been imported, by its source alone.

A name can be defined twice, or in one of two branches, or be replaced after its class.
So the answer is a list: every node that may be what the name stands for in the end, and
``None`` where it may stand for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

#: What a name may stand for; None: it may not be there at all.
Meanings = list[ast.AST | None]


def resolve(tree: ast.Module, name: str) -> Meanings:
    """What the dotted ``name`` may stand for at the end of the module."""
    head, *rest = name.split(".")
    meanings = [
        None if isinstance(node, ast.AnnAssign) and node.value is None else node
        for node in fold(tree.body, head, [None])
    ]
    for at, part in enumerate(rest):
        meanings = _members(meanings, part)
        if at == 0:
            meanings = _replaced_later(tree, head, part, meanings)
    return meanings


def owners(tree: ast.Module, name: str) -> list[ast.ClassDef]:
    """The classes that may hold the dotted ``name``."""
    parts = name.split(".")
    found = resolve(tree, ".".join(parts[:-1])) if len(parts) > 1 else []
    return [node for node in found if isinstance(node, ast.ClassDef)]


def fold(body: Iterable[ast.stmt], name: str, meanings: Meanings) -> Meanings:
    """``meanings`` of ``name`` after the statements of ``body``."""
    for statement in body:
        meanings = _after(statement, name, meanings)
    return meanings


def _after(node: ast.stmt, name: str, before: Meanings) -> Meanings:
    if isinstance(node, ast.If):
        known = _known_test(node.test)
        if known is not None:
            return fold(node.body if known else node.orelse, name, before)
        return _union(fold(node.body, name, before), fold(node.orelse, name, before))
    if isinstance(node, ast.Try | ast.TryStar):
        return _after_try(node, name, before)
    if isinstance(node, ast.With | ast.AsyncWith):
        bound = any(name in _targets(i.optional_vars) for i in node.items if i.optional_vars)
        # A manager may swallow the error of a body that broke off half-way.
        return _union(*_prefixes(node.body, name, [node] if bound else before))
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        start: Meanings = before
        if not isinstance(node, ast.While) and name in _targets(node.target):
            start = [node]
        return _union(before, fold([*node.body, *node.orelse], name, start))
    if isinstance(node, ast.Match):
        return _union(before, *(fold(case.body, name, before) for case in node.cases))
    return _bound_by(node, name, before)


def _after_try(node: ast.Try | ast.TryStar, name: str, before: Meanings) -> Meanings:
    interrupted = _union(*_prefixes(node.body, name, before))
    ends = [fold(node.orelse, name, fold(node.body, name, before))]
    for handler in node.handlers:
        if not isinstance(handler.body[-1], ast.Raise):
            ends.append(fold(handler.body, name, interrupted))
    return fold(node.finalbody, name, _union(*ends))


def _prefixes(body: Sequence[ast.stmt], name: str, before: Meanings) -> Iterator[Meanings]:
    yield before if not body else fold(body, name, before)
    for end in range(len(body)):
        yield fold(body[:end], name, before)


def _bound_by(node: ast.stmt, name: str, before: Meanings) -> Meanings:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node] if node.name == name else before
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        if name in names:
            return [node]
        return _union(before, [node]) if names == ["*"] else before
    if isinstance(node, ast.Assign):
        return [node] if any(name in _targets(t) for t in node.targets) else before
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        if name not in _targets(node.target):
            return before
        # A bare annotation binds nothing; it may be a field of a dataclass, though.
        return [node] if getattr(node, "value", None) or before == [None] else before
    if isinstance(node, ast.Delete):
        return [None] if any(name in _targets(t) for t in node.targets) else before
    return before


def _targets(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return [name for item in target.elts for name in _targets(item)]
    return []


def _known_test(test: ast.expr) -> bool | None:
    """What a test is when oMLX runs, where that is plain."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _known_test(test.operand)
        return None if inner is None else not inner
    if last_name(test) == "TYPE_CHECKING":
        return False
    return None


def _union(*groups: Meanings) -> Meanings:
    return list(dict.fromkeys(node for group in groups for node in group))


def _members(holders: Meanings, name: str) -> Meanings:
    found: list[Meanings] = []
    for holder in holders:
        if not isinstance(holder, ast.ClassDef):
            found.append([None])
            continue
        inside = fold(holder.body, name, [None])
        if all(node is None or _bare(node, holder) for node in inside):
            inside = list(_set_in_init(holder, name)) or [None]
        found.append(inside)
    return _union(*found)


def _bare(node: ast.AST, holder: ast.ClassDef) -> bool:
    """Whether ``node`` is an annotation that makes no attribute."""
    return isinstance(node, ast.AnnAssign) and node.value is None and not is_dataclass(holder)


def _set_in_init(holder: ast.ClassDef, name: str) -> Iterator[ast.AST]:
    for init in fold(holder.body, "__init__", [None]):
        if not isinstance(init, ast.FunctionDef) or not init.args.args:
            continue
        me = init.args.args[0].arg
        for node in own_nodes(init):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                if any(_is_attribute(part, me, name) for part in parts):
                    yield node


def own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Nodes of a function's body, functions and classes in it left out."""
    todo: list[ast.AST] = list(reversed(function.body))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


def _replaced_later(tree: ast.Module, head: str, part: str, before: Meanings) -> Meanings:
    """The same after what the module itself does to a class that it has defined."""
    for node in _module_level(tree.body):
        if isinstance(node, ast.Assign) and any(
            _is_attribute(t, head, part) for t in node.targets
        ):
            before = _union(before, [node])
        elif isinstance(node, ast.Delete) and any(
            _is_attribute(t, head, part) for t in node.targets
        ):
            before = _union(before, [None])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if (
                last_name(call.func) in ("setattr", "delattr")
                and len(call.args) >= 2
                and isinstance(call.args[0], ast.Name)
                and call.args[0].id == head
                and isinstance(call.args[1], ast.Constant)
                and call.args[1].value == part
            ):
                before = _union(before, [call])
    return before


def _module_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list) and not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):
                yield from _module_level(inner)


def _is_attribute(node: ast.AST, owner: str, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    )


def last_name(node: ast.AST) -> str | None:
    """``c`` of ``a.b.c``; None for what is no dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether annotations of the class are its fields."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if last_name(called) == "dataclass":
            return True
    return False


def names_read(tree: ast.Module) -> frozenset[str]:
    """Every name and attribute that the module reads somewhere."""
    return frozenset(
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
    )
