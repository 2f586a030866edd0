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
        aim: the limit that our own value has to keep, in words; empty where there is none.
        kept: whether it does; None where there is no limit.
    """

    what: str
    values: dict[str, str]
    on: str
    aim: str = ""
    kept: bool | None = None


def render(rows: Sequence[Row]) -> str:
    """The table as text, one line a row."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    head = ["", *columns, "aim", "measured on"]
    lines = [head]
    for row in rows:
        verdict = {None: "", True: " (kept)", False: " (MISSED)"}[row.kept]
        values = [row.values.get(name, "") for name in columns]
        lines.append([row.what, *values, row.aim + verdict, row.on])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "-" * max(map(len, text)))
    return "\n".join(text)
