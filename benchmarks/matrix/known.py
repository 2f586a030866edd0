"""The tests of oMLX that are meant to fail with the package active, by release."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: A row: the test in backquotes, then the releases it is in.
_ROW = re.compile(r"^\|\s*`(test_[\w:]+)`\s*\|\s*([^|]+)\|")


@dataclass(frozen=True)
class Known:
    """One named difference and the releases that have the test (empty: all)."""

    test: str
    releases: frozenset[str]

    def holds_for(self, release: str) -> bool:
        """Whether the test may fail there."""
        return not self.releases or release in self.releases


def read(path: Path) -> list[Known]:
    """The rows of the table; a row without releases is one about something else."""
    found = []
    for line in path.read_text("utf-8").splitlines():
        match = _ROW.match(line)
        if match is None:
            continue
        releases = match.group(2).strip()
        if releases == "all":
            found.append(Known(match.group(1), frozenset()))
        elif re.fullmatch(r"[\d.\w]+(,\s*[\d.\w]+)*", releases):
            found.append(Known(match.group(1), frozenset(re.split(r",\s*", releases))))
    return found


def sort_out(
    stock: list[str], patched: list[str], known: list[Known], release: str
) -> tuple[list[str], list[str], list[str]]:
    """New failures that are named, those that are not, and names whose tests pass."""
    # A parametrised test is named without its parameters.
    names = {k.test for k in known if k.holds_for(release)}
    new = [test for test in patched if test not in stock]
    named = [test for test in new if test.partition("[")[0] in names]
    unnamed = [test for test in new if test.partition("[")[0] not in names]
    failing = {test.partition("[")[0] for test in patched}
    return named, unnamed, sorted(names - failing)
