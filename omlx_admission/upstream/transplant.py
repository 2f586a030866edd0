"""Our own modules as modules of oMLX's, rewritten by rule: they follow ours and cannot drift.

A recipe says what is left out and what is called otherwise there. A rule that
matches nothing any more is an error: ours has changed, and the recipe must too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

import omlx_admission
from omlx_admission.upstream import style
from omlx_admission.upstream.editing import docstring_length, find, squeezed

#: First line of every file of oMLX.
LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"

_ROOT = Path(omlx_admission.__file__).parent


class StaleRecipe(Exception):
    """A rule of a recipe matches nothing in our module: the recipe has to follow it."""


@dataclass(frozen=True)
class Recipe:
    """How one of our modules becomes one of oMLX's.

    Attributes:
        source: our module, dotted, below ``omlx_admission``.
        keep: top-level definitions and assignments to keep; empty keeps all.
        drop: definitions to leave out: ``name``, ``Class.method`` or an assigned name.
        rewrite: code to look for (a statement or an expression, spaces do not count)
            and what stands there instead; None leaves a statement out. With a scope
            before it (``Class.method | code``) it is looked for only there.
        drop_calls: calls that are statements of their own, whose function matches this
            pattern, are left out.
        parameters: ``Class.method`` to names of parameters to leave out.
        text: words in names, comments and texts, and what to say instead.
        drop_elements: elements of a tuple or list that match this pattern are left out.
        replace: definitions or assigned names, and the code that stands there instead.
        imports: imports to add.
        append: a module of ours and a definition in it to put at the end.
        prepend: code to put behind the imports; names that it defines are not imported.
    """

    source: str
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rewrite: Mapping[str, str | None] = field(default_factory=dict)
    drop_calls: str = ""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    drop_elements: str = ""
    replace: Mapping[str, str] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    imports: str = ""
    append: tuple[str, str] | None = None
    prepend: str = ""


def source(name: str) -> cst.Module:
    """One of our modules (``policy.planner``), parsed, not imported."""
    return cst.parse_module(
        _ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")
    )


def transplant(recipe: Recipe, modules: Mapping[str, str]) -> str:
    """The text of the new module.

    Args:
        modules: our modules to their names in the new package, for imports. An import
            of ours that is not among them must be unused after the rewriting.

    Raises:
        StaleRecipe: a rule matches nothing.
    """
    module = source(recipe.source)
    if recipe.append is not None:
        extra = find(source(recipe.append[0]), recipe.append[1])
        module = module.with_changes(body=[*module.body, extra])
    if recipe.keep:
        module = _keep(module, recipe.keep)
    rewriter = _Rewriter(recipe)
    module = module.visit(rewriter)
    rewriter.check()
    own = {_name_of(s) for s in cst.parse_module(recipe.prepend).body}
    module = module.with_changes(body=_tidy_imports(module, modules, recipe.imports, own))
    text = module.code
    for old, new in recipe.text.items():
        if old not in text:
            raise StaleRecipe(f"{recipe.source}: no {old!r} in it")
        text = text.replace(old, new)
    for ours, theirs in sorted(modules.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"omlx_admission.{ours}", f"omlx.admission.{theirs}")
    if recipe.prepend:
        text = _behind_imports(text, recipe.prepend)
    return style.file(LICENSE + text)


def as_method(
    name: str,
    definition: str,
    *,
    signature: str,
    rewrite: Mapping[str, str | None],
    doc: str | None = None,
) -> str:
    """One of our functions on a pool as the code of a method of the pool.

    Args:
        signature: the method's ``def`` without its colon; ``pool`` becomes ``self``.
        rewrite: as in :class:`Recipe`.
        doc: the docstring, where it has to say something else.

    Raises:
        StaleRecipe: a rule matches nothing.
    """
    node = find(source(name), definition)
    rewriter = _Rewriter(Recipe(name, rewrite=rewrite))
    module = cst.Module([node]).visit(rewriter)
    rewriter.check()
    (node,) = module.visit(_Rename("pool", "self")).body  # type: ignore[assignment]
    shell = cst.parse_statement(f"{signature}: pass")
    assert isinstance(node, cst.FunctionDef)
    assert isinstance(shell, cst.FunctionDef)
    body = list(node.body.body)
    if doc is not None:
        body[: docstring_length(body)] = style.statements(f'"""{doc}"""', 1)
    return cst.Module([shell.with_changes(body=node.body.with_changes(body=body))]).code


def as_decorator(name: str, definition: str, *, called: str, doc: str) -> str:
    """One of our wrappers as a decorator of a coroutine method of the pool."""
    node = find(source(name), definition)
    rules = {"wrapped(*args, **kwargs)": "method(pool, *args, **kwargs)"}
    rewriter = _Rewriter(Recipe(name, rewrite=rules))
    (node,) = cst.Module([node]).visit(rewriter).body  # type: ignore[assignment]
    rewriter.check()
    shell = cst.parse_module(
        f"def {called}(method):\n"
        f'    """{doc}"""\n\n'
        "    @functools.wraps(method)\n"
        "    async def wrapper(pool, *args, **kwargs):\n"
        "        pass\n\n"
        "    return wrapper\n"
    )
    body = list(node.body.body)
    inner = find(shell, f"{called}.wrapper")
    filled = inner.body.with_changes(body=body[docstring_length(body) :])
    whole = shell.deep_replace(inner.body, filled)
    assert isinstance(whole, cst.Module)
    return whole.code


class _Rename(cst.CSTTransformer):
    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self._old = old
        self._new = new

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if original_node.value == self._old:
            return updated_node.with_changes(value=self._new)
        return updated_node


def _name_of(statement: cst.CSTNode) -> str | None:
    """The name that a top-level statement defines or assigns."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return statement.name.value
    if isinstance(statement, cst.SimpleStatementLine):
        first = statement.body[0]
        if isinstance(first, cst.AnnAssign):
            return squeezed(first.target)
        if isinstance(first, cst.Assign):
            return squeezed(first.targets[0].target)
    return None


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], cst.Import | cst.ImportFrom
    )


def _keep(module: cst.Module, names: Sequence[str]) -> cst.Module:
    body = [
        s
        for index, s in enumerate(module.body)
        if _is_import(s) or _name_of(s) in names or (index == 0 and _name_of(s) is None)
    ]
    missing = set(names) - {_name_of(s) for s in body}
    if missing:
        raise StaleRecipe(f"nothing named {', '.join(sorted(missing))} to keep")
    return module.with_changes(body=body)


def _plain(code: str) -> str:
    """Code without comments and space, to compare with."""
    return re.sub(r"\s+", "", re.sub(r"#[^\n]*", "", code))


def _kinds(rule: str) -> list[type[cst.CSTNode]]:
    """The node types that ``rule`` can match: to print every node would take long."""
    code = textwrap.dedent(rule.partition("|")[2] if _SCOPED.match(rule) else rule).strip()
    try:
        return [type(cst.parse_expression(code))]
    except cst.ParserSyntaxError:
        pass
    try:
        return [type(cst.parse_statement(code))]
    except cst.ParserSyntaxError:
        # A compound statement written in one line.
        return [cst.If, cst.For, cst.While, cst.With, cst.Try]


#: A rule for one scope: ``Class.method | code``.
_SCOPED = re.compile(r"[\w.]+ \| ")


class _Rewriter(cst.CSTTransformer):
    """Applies the rules of one recipe, and knows which of them were of use."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self._rewrite = {_plain(old): new for old, new in recipe.rewrite.items()}
        self._asked = {_plain(old): old for old in recipe.rewrite}
        self._kinds = {kind for rule in recipe.rewrite for kind in _kinds(rule)}
        self._drop = set(recipe.drop)
        self._calls = re.compile(recipe.drop_calls) if recipe.drop_calls else None
        self._elements = re.compile(recipe.drop_elements) if recipe.drop_elements else None
        self._parameters = dict(recipe.parameters)
        self._used: set[str] = set()
        self._calls_found = self._elements_found = False
        self._scope: list[str] = []

    def check(self) -> None:
        """Raise where a rule was of no use."""
        unused = [self._asked[rule] for rule in self._rewrite if rule not in self._used]
        unused += sorted((self._drop | self._recipe.replace.keys()) - self._used)
        unused += sorted(self._parameters.keys() - self._used)
        if self._calls is not None and not self._calls_found:
            unused.append(self._calls.pattern)
        if self._elements is not None and not self._elements_found:
            unused.append(self._elements.pattern)
        if unused:
            raise StaleRecipe(f"{self._recipe.source}: no match for {'; '.join(unused)}")

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._scope.append(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._scope.append(node.name.value)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Children first: rules for whole statements are looked for in the original."""
        updated = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            name = ".".join(self._scope)
            self._scope.pop()
            if name in self._drop or name in self._recipe.replace:
                return self._replaced(name, original_node)
            if name in self._parameters and isinstance(updated, cst.FunctionDef):
                self._used.add(name)
                gone = self._parameters[name]
                kept = [p for p in updated.params.params if p.name.value not in gone]
                return updated.with_changes(params=updated.params.with_changes(params=kept))
            return updated
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            return self._statement(original_node, updated)
        if (
            self._elements is not None
            and isinstance(original_node, cst.Element)
            and self._elements.match(squeezed(original_node))
        ):
            self._elements_found = True
            return cst.RemoveFromParent()
        if isinstance(original_node, cst.BaseExpression):
            return self._expression(original_node, updated)
        return updated

    def _replaced(self, name: str, original: Any) -> Any:
        self._used.add(name)
        code = self._recipe.replace.get(name)
        if code is None:
            return cst.RemoveFromParent()
        new = style.statements(code, 0)
        new[0] = new[0].with_changes(leading_lines=getattr(original, "leading_lines", []))
        return cst.FlattenSentinel(new)

    def _statement(self, original: Any, updated: Any) -> Any:
        name = ".".join([*self._scope, _name_of(original) or "?"])
        if name in self._drop or name in self._recipe.replace:
            return self._replaced(name, original)
        if self._calls is not None and isinstance(original, cst.SimpleStatementLine):
            first = original.body[0]
            if (
                isinstance(first, cst.Expr)
                and isinstance(first.value, cst.Call)
                and self._calls.match(squeezed(first.value.func))
            ):
                self._calls_found = True
                return cst.RemoveFromParent()
        if type(original) not in self._kinds:
            return updated
        bare = original.with_changes(leading_lines=[])
        code = self._rule(_plain(cst.Module([bare]).code))
        if code in self._rewrite and isinstance(original, cst.BaseStatement):
            self._used.add(code)
            new = self._rewrite[code]
            if new is None:
                return cst.RemoveFromParent()
            statements = style.statements(new, 0)
            leading = getattr(original, "leading_lines", [])
            statements[0] = statements[0].with_changes(leading_lines=leading)
            return cst.FlattenSentinel(statements)
        return updated

    def _rule(self, code: str) -> str:
        """The rule for ``code`` here: the one for this scope, if there is one."""
        scoped = f"{'.'.join(self._scope)}|{code}"
        return scoped if scoped in self._rewrite else code

    def _expression(self, original: Any, updated: Any) -> Any:
        if type(original) not in self._kinds:
            return updated
        code = self._rule(squeezed(original))
        new = self._rewrite.get(code)
        if new is None:
            return updated
        self._used.add(code)
        return cst.parse_expression(new)


# -- imports ------------------------------------------------------------------


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


def _tidy_imports(
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
    absolute: list[Any] = []
    relative: list[Any] = []
    rest: list[Any] = []
    place = 0
    for statement in [*module.body, *cst.parse_module(imports).body]:
        if not _is_import(statement):
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
        else:
            absolute.append(used)
    absolute.sort(key=lambda node: (isinstance(node, cst.ImportFrom), _dotted(node)))
    relative.sort(key=lambda node: (-len(node.relative), _dotted(node)))
    lines: list[Any] = []
    for group in (future, absolute, relative):
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


def _behind_imports(text: str, code: str) -> str:
    module = cst.parse_module(text)
    body = list(module.body)
    at = max((i for i, s in enumerate(body) if _is_import(s)), default=-1) + 1
    new = style.statements(code, 0)
    new[0] = new[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return module.with_changes(body=[*body[:at], *new, *body[at:]]).code
