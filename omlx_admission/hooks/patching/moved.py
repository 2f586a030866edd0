"""Where a name is that is not where it was: for the reason that doctor gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
        self._places: dict[str, list[str]] | None = None

    def hint(self, module: str, name: str) -> str:
        """``"; ... is in omlx.other"`` where another module has the name, else nothing.

        A member is looked for by its own name only where its class is in its place:
        a class takes its members along.
        """
        head, _, member = name.partition(".")
        places = self._index()
        if head in places and module not in _modules(places[head]):
            return _said(head, places[head])
        if member and module in _modules(places.get(head, [])):
            return _said(
                member, [p for p in places.get(f".{member}", ()) if p != f"{module}:{head}"]
            )
        return ""

    def _index(self) -> dict[str, list[str]]:
        if self._places is None:
            self._places = {}
            for module, path in self._files():
                for key, place in self._defined_in(module, path):
                    found = self._places.setdefault(key, [])
                    if place not in found:
                        found.append(place)
        return self._places

    @staticmethod
    def _defined_in(module: str, path: Path) -> list[tuple[str, str]]:
        try:
            return list(_definitions(module, path.read_text("utf-8", "replace")))
        except OSError:
            return []

    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self._root.rglob("*.py")):
            parts = list(path.relative_to(self._root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            yield ".".join(["omlx", *parts]), path


def _definitions(module: str, text: str) -> Iterator[tuple[str, str]]:
    """Names of the module's level as they are, names of classes' members after a dot."""
    owner = ""
    for match in _DEFINED.finditer(text):
        indent, name, value = match.groups()
        if value:
            yield value, module
        elif not indent:
            owner = name
            yield name, module
        elif owner:
            yield f".{name}", f"{module}:{owner}"


def _modules(places: list[str]) -> set[str]:
    return {place.partition(":")[0] for place in places}


def _said(name: str, places: list[str]) -> str:
    """Names that many modules have say nothing."""
    if not 1 <= len(places) <= 3:
        return ""
    return f"; {name} is in {' and '.join(places)}"
