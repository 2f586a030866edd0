"""The rules of a recipe, applied to one of our modules or functions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from omlx_admission.upstream import style
from omlx_admission.upstream.anchors import docstring_length, squeezed


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


def name_of(statement: cst.CSTNode) -> str | None:
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


def _closed_up(original: cst.IndentedBlock, updated: Any) -> Any:
    """Without the blank line that stood behind imports which have gone from the block."""
    at = docstring_length(original.body)
    if not (_imports(original.body, at) and not _imports(updated.body, at)):
        return updated
    if at == len(updated.body):
        return updated
    first = updated.body[at]
    lines = list(first.leading_lines)
    while lines and lines[0].comment is None:
        lines.pop(0)
    body = [
        *updated.body[:at],
        first.with_changes(leading_lines=lines),
        *updated.body[at + 1 :],
    ]
    return updated.with_changes(body=body)


def _imports(body: Sequence[Any], at: int) -> bool:
    return at < len(body) and is_import(body[at])


def is_import(statement: cst.CSTNode) -> bool:
    """Whether a statement imports something."""
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], cst.Import | cst.ImportFrom
    )


class Rename(cst.CSTTransformer):
    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self._old = old
        self._new = new

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if original_node.value == self._old:
            return updated_node.with_changes(value=self._new)
        return updated_node


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


class Rewriter(cst.CSTTransformer):
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
        if isinstance(original_node, cst.IndentedBlock):
            return _closed_up(original_node, updated)
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
        name = ".".join([*self._scope, name_of(original) or "?"])
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
