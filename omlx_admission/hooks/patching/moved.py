"""Where a name is that is not where it was: for the reason that doctor gives."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

#: Definitions at the line's begin, and indented ones: those of classes.
_DEFINED = re.compile(
    r"^([ \t]*)(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]+)?=[^=]",
    re.MULTILINE,
)


class Search:
    """The names that the modules below one folder define; read when first asked."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def hint(self, module: str, name: str) -> str:
        """``"; ... is in omlx.other"`` where another module has the name, else nothing.

        A member is looked for by its own name only where its class is in its place:
        a class takes its members along.
        """
        head, _, member = name.partition(".")
        places = self._places.get(head, [])
        if module in {place.partition(":")[0] for place in places}:
            there = self._places.get(f".{member}", []) if member else []
            places = [place for place in there if place != f"{module}:{head}"]
            head = member
        # A name that many modules have says nothing.
        return f"; {head} is in {' and '.join(places)}" if 1 <= len(places) <= 3 else ""

    @cached_property
    def _places(self) -> dict[str, list[str]]:
        """By name, a class's members after a dot: the modules or classes that have it."""
        found: dict[str, dict[str, None]] = {}
        for path in sorted(self._root.rglob("*.py")):
            parts = path.relative_to(self._root).with_suffix("").parts
            module = ".".join(["omlx", *parts]).removesuffix(".__init__")
            try:
                text = path.read_text("utf-8", "replace")
            except OSError:
                continue
            owner = ""
            for indent, name, value in _DEFINED.findall(text):
                if value or not indent:
                    owner = owner if value else name
                    found.setdefault(value or name, {})[module] = None
                elif owner:
                    found.setdefault(f".{name}", {})[f"{module}:{owner}"] = None
        return {name: list(places) for name, places in found.items()}
