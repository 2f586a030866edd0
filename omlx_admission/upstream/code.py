"""The source of one module and what is defined in it; edits are splices of its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

from omlx_admission.upstream.change import AnchorMissing, Refused

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef

#: What has a place in the text.
Node = ast.expr | ast.stmt | ast.keyword

#: Where to cut, up to where, and what to put there. Offsets are those of bytes.
Splice = tuple[int, int, str]


class Code:
    """The text of a module with its syntax tree; never changed, :meth:`spliced` makes another.

    What is not spliced stays byte for byte. Lines are counted from 1, as the tree does.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.lines = content.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, self.lines))]

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; raises :class:`Refused` where there is none."""
        try:
            return ast.parse(self.content)
        except (SyntaxError, ValueError):
            raise Refused("it cannot be parsed") from None

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content.decode()

    def spliced(self, *splices: Splice) -> Code:
        """The module with each of ``splices`` made; none overlaps another."""
        content, at = b"", 0
        for start, end, text in sorted(splices, key=lambda splice: splice[:2]):
            content += self.content[at:start] + text.encode()
            at = end
        return Code(content + self.content[at:])

    def line(self, number: int) -> int:
        """Where a line begins."""
        return self._starts[number - 1]

    def span(self, node: Node) -> tuple[int, int]:
        """Where the text of ``node`` begins and ends, decorators not counted."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.line(node.lineno) + node.col_offset
        return start, self.line(node.end_lineno) + node.end_col_offset

    def part(self, start: int, end: int) -> str:
        """The text between two places."""
        return self.content[start:end].decode()

    def after(self, statement: ast.stmt) -> int:
        """The beginning of the line behind a statement."""
        assert statement.end_lineno is not None
        return self.line(statement.end_lineno + 1)

    def at(self, statement: ast.stmt) -> int:
        """The beginning of a statement's first line, decorators counted."""
        return self.line(_first_line(statement))

    def above(self, statement: ast.stmt) -> int:
        """As :meth:`at`, with the blank lines and the comments that belong to it."""
        number = _first_line(statement)
        while number > 1:
            line = self.lines[number - 2]
            indent = len(line) - len(line.lstrip())
            comment = line.lstrip().startswith(b"#") and indent <= statement.col_offset
            if line.strip() and not comment:
                break
            number -= 1
        return self.line(number)

    def body(self, node: ast.AST) -> list[ast.stmt]:
        """The statements of a block that stands on lines of its own."""
        body: list[ast.stmt] = getattr(node, "body", [])
        if not body:
            raise AnchorMissing("a block is empty")
        first = body[0]
        if self.lines[_first_line(first) - 1][: first.col_offset].strip():
            raise AnchorMissing(f"line {first.lineno} has a block on the line of its head")
        return body


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def has(code: Code, name: str) -> bool:
    """Whether a class, function or method of this dotted name is defined."""
    try:
        find(code, name)
    except AnchorMissing:
        return False
    return True


def find(code: Code, name: str) -> Definition:
    """The last definition of a dotted name, which is the one that Python keeps."""
    body = code.tree.body
    found: Definition | None = None
    for part in name.split("."):
        named = (n for n in reversed(body) if isinstance(n, Definition) and n.name == part)
        found = next(named, None)
        if found is None:
            raise AnchorMissing(f"{name} is missing")
        body = found.body
    assert found is not None
    return found


def first_of(code: Code, *names: str) -> str:
    """The first of these dotted names that is defined."""
    for name in names:
        if has(code, name):
            return name
    raise AnchorMissing(f"neither {' nor '.join(names)} is there")


def function(code: Code, name: str) -> Function:
    """Like :func:`find`, for a function or method."""
    found = find(code, name)
    if not isinstance(found, Function):
        raise AnchorMissing(f"{name} is no function")
    return found


def everywhere(code: Code, name: str) -> list[Definition]:
    """All definitions, at any depth, whose dotted name ends with ``name``."""
    wanted = name.split(".")
    found = [d for d, scope in _definitions(code.tree, []) if scope[-len(wanted) :] == wanted]
    if not found:
        raise AnchorMissing(f"no function {name}")
    return found


def has_anywhere(code: Code, name: str) -> bool:
    """Whether :func:`everywhere` finds any."""
    wanted = name.split(".")
    return any(scope[-len(wanted) :] == wanted for _, scope in _definitions(code.tree, []))


def _definitions(node: ast.AST, scope: list[str]) -> Iterator[tuple[Definition, list[str]]]:
    """Every definition with its dotted name, found through statements only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            inner = [*scope, child.name]
            yield child, inner
            yield from _definitions(child, inner)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child, scope)


def docstring_of(body: list[ast.stmt]) -> ast.Constant | None:
    """The docstring that a body begins with."""
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    found = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first if found else None  # type: ignore[return-value]


def same(node: object, wanted: object) -> bool:
    """Whether two pieces of syntax say the same; ``f(...)`` stands for any arguments."""
    if (
        isinstance(wanted, ast.Call)
        and isinstance(node, ast.Call)
        and [ast.unparse(argument) for argument in wanted.args] == ["..."]
    ):
        return same(node.func, wanted.func)
    if isinstance(wanted, ast.AST):
        return type(node) is type(wanted) and all(
            same(getattr(node, name, None), getattr(wanted, name, None))
            for name in wanted._fields
        )
    if isinstance(wanted, list):
        return (
            isinstance(node, list) and len(node) == len(wanted) and all(map(same, node, wanted))
        )
    return type(node) is type(wanted) and node == wanted
