"""Code in the style of the checkout: black, with that project's line length."""

from __future__ import annotations

import contextvars
import textwrap
import tomllib
from functools import cache
from pathlib import Path

import black
import libcst as cst

#: oMLX's line length where its ``pyproject.toml`` says nothing else.
DEFAULT_LINE_LENGTH = 88

_INDENT = 4

#: Of the checkout that is being edited.
line_length: contextvars.ContextVar[int] = contextvars.ContextVar(
    "line_length", default=DEFAULT_LINE_LENGTH
)


def of_checkout(root: Path) -> int:
    """The line length that the project in ``root`` tells black."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return DEFAULT_LINE_LENGTH
    value = project.get("tool", {}).get("black", {}).get("line-length")
    return value if isinstance(value, int) and value > 0 else DEFAULT_LINE_LENGTH


def file(text: str) -> str:
    """A whole new file, formatted."""
    return formatted(text, line_length.get())


@cache
def formatted(text: str, length: int) -> str:
    """``text`` as black has it with lines of that length."""
    return black.format_str(text, mode=black.Mode(line_length=length))


def statements(code: str, depth: int) -> list[cst.BaseStatement]:
    """``code`` as statements for a body that is indented ``depth`` times, formatted there."""
    text = textwrap.dedent(code).strip("\n")
    for _ in range(depth):
        text = "async def f():\n" + textwrap.indent(text, " " * _INDENT)
    body: list[cst.BaseStatement] = list(_parsed(file(text)))
    for _ in range(depth):
        (outer,) = body
        assert isinstance(outer, cst.FunctionDef)
        body = [s for s in outer.body.body if isinstance(s, cst.BaseStatement)]
    return body


def method(code: str) -> cst.FunctionDef:
    """``code`` as a method of a class at the top of a module, formatted there."""
    text = "class C:\n" + textwrap.indent(textwrap.dedent(code).strip("\n"), " " * _INDENT)
    (owner,) = _parsed(file(text))
    assert isinstance(owner, cst.ClassDef)
    (found,) = owner.body.body
    assert isinstance(found, cst.FunctionDef)
    return found


def _parsed(text: str) -> list[cst.BaseStatement]:
    module = cst.parse_module(text)
    body: list[cst.BaseStatement] = list(module.body)
    if body and module.header:
        # Comments above the first statement belong to it where it is put.
        above = [*module.header, *getattr(body[0], "leading_lines", ())]
        body[0] = body[0].with_changes(leading_lines=above)
    return body
