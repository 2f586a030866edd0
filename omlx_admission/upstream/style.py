"""Code in the style of the checkout: black, with that project's line length."""

from __future__ import annotations

import contextvars
import textwrap
import tomllib
from functools import cache
from pathlib import Path

import black

#: oMLX's line length where its ``pyproject.toml`` says nothing else.
DEFAULT_LINE_LENGTH = 88

INDENT = 4

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


@cache
def formatted(text: str, length: int) -> str:
    """``text`` as black has it with lines of that length."""
    return black.format_str(text, mode=black.Mode(line_length=length))


def statements(code: str, depth: int, outer: str = "async def") -> str:
    """``code`` for a body that is indented ``depth`` times, formatted there.

    ``outer`` is ``class`` where it is a method.
    """
    text = textwrap.dedent(code).strip("\n")
    head = "class C:\n" if outer == "class" else "async def f():\n"
    for _ in range(depth):
        text = head + textwrap.indent(text, " " * INDENT)
    lines = formatted(text, line_length.get()).splitlines(keepends=True)
    return "".join(lines[depth:])
