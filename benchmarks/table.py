"""Rows of figures, and one plain table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, side by side for those that it was measured for.

    Attributes:
        what: the figure with its unit.
        values: column name to text; a missing column stays empty.
        on: what it was measured on.
    """

    what: str
    values: dict[str, str]
    on: str


def render(rows: Sequence[Row]) -> str:
    """The table as text, one line a row."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    lines = [["", *columns, "measured on"]]
    for row in rows:
        lines.append([row.what, *(row.values.get(name, "") for name in columns), row.on])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "-" * max(map(len, text)))
    return "\n".join(text)
