"""What the test runs of a release came to: ``python -m benchmarks.known_differences DIR``.

Reads the JUnit reports that ``nox -s hooks live stock patched`` left of the oMLX in each
``DIR`` and prints its row of docs/compatibility.md. What is wrong is said line by line,
and ends with status 1:

* a test of ours that failed twice;
* a test of oMLX's own that failed twice with the package, not on stock, and is not named
  in ``tests/live/known_differences.md`` (what fails on stock is no news);
* a test that is named there for this release, and passes.

A test that failed among the others and passed at its second try without them counts as
passed, and is said: on a busy machine that is a matter of time.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from xml.etree import ElementTree

from omlx_admission.hooks import install
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.install import State
from omlx_admission.hooks.patching import gate
from omlx_admission.settings import Settings

HEAD = (
    "| oMLX | features that fit | hooks' tests | live scenarios | its own tests, stock "
    "| with the package |\n|---|---|---|---|---|---|"
)
NAMED = Path(__file__).resolve().parents[1] / "tests" / "live" / "known_differences.md"

#: A row: the test in backquotes, then the releases it is in.
_ROW = re.compile(r"^\| *`(test_[\w:]+)` *\| *([^|]+?) *\|", re.MULTILINE)
_RELEASES = re.compile(r"[\d.\w]+(,\s*[\d.\w]+)*")


@dataclass
class Counts:
    """One run, and by ``file::Class::test`` what did not pass at once."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    #: Failed among the others, and passed at the second try.
    second: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{len(self.passed)} passed"]
        if self.second:
            parts[0] += f" ({len(self.second)} at the second try, alone)"
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        return ", ".join(parts)


def read(report: Path) -> Counts:
    """Count a run, and with it the second try of what failed (``NAME.2.xml``)."""
    counts = _count(report)
    second = report.with_suffix(".2.xml")
    if counts.failed and second.is_file():
        passed = _count(second).passed
        counts.second = [test for test in counts.failed if test in passed]
        counts.failed = [test for test in counts.failed if test not in passed]
        counts.passed += counts.second
    return counts


def _count(report: Path) -> Counts:
    counts = Counts()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            counts.failed.append(_name(case))
        elif "skipped" in outcomes:
            counts.skipped += 1
        else:
            counts.passed.append(_name(case))
    return counts


def _name(case: ElementTree.Element) -> str:
    """``test_engine_pool::TestLease::test_x`` of pytest's ``classname`` and ``name``."""
    _, mark, path = f".{case.get('classname', '')}".partition(".test_")
    return "::".join([*f"{mark}{path}".lstrip(".").split("."), case.get("name", "")])


def named_for(release: str, text: str) -> set[str]:
    """The tests that the table in ``text`` names for ``release``.

    A row of another table has words in the place of the releases.
    """
    return {
        test
        for test, releases in _ROW.findall(text)
        if releases == "all"
        or (_RELEASES.fullmatch(releases) and release in re.split(r",\s*", releases))
    }


def _bare(test: str) -> str:
    """A parametrised test is named without its parameters."""
    return test.partition("[")[0]


@dataclass
class Release:
    """What was run on one release; None: it was not."""

    version: str
    hooks: Counts | None = None
    live: Counts | None = None
    stock: Counts | None = None
    patched: Counts | None = None

    @classmethod
    def of(cls, version: str, reports: Path) -> Release:
        """From the reports in a folder."""
        runs = [f.name for f in fields(cls) if (reports / f"{f.name}.xml").is_file()]
        return cls(version, **{name: read(reports / f"{name}.xml") for name in runs})

    def row(self, features: str, named: set[str]) -> str:
        """One row of the table in docs/compatibility.md."""
        cells = [
            "not run" if run is None else str(run)
            for run in (self.hooks, self.live, self.stock, self.patched)
        ]
        if self.patched is not None and self.stock is not None:
            new = self._new()
            unnamed = [test for test in new if _bare(test) not in named]
            cells[-1] += f"; {len(new) or 'none'} new"
            if unnamed:
                cells[-1] += f", {len(unnamed)} of them **not named**"
            elif new:
                cells[-1] += ", named"
        return f"| {' | '.join([self.version, features, *cells])} |"

    def _new(self) -> list[str]:
        assert self.stock is not None
        assert self.patched is not None
        return [test for test in self.patched.failed if test not in self.stock.failed]

    def problems(self, named: set[str]) -> list[str]:
        """What is wrong with the runs."""
        ours = [run for run in (self.hooks, self.live) if run is not None]
        found = [f"{test} fails" for run in ours for test in run.failed]
        if self.patched is not None and self.stock is not None:
            found += [
                f"{test} fails with the package and is not named"
                for test in self._new()
                if _bare(test) not in named
            ]
            # Named for what it does among the others, it may pass without them.
            seen = {_bare(test) for test in (*self.patched.failed, *self.patched.second)}
            found += [f"{test} is named and passes" for test in sorted(named - seen)]
        return [f"{self.version}: {problem}" for problem in found]

    def second_tries(self) -> list[str]:
        """Lines on the tests that needed one."""
        return [
            f"{self.version}: second try in {run}: {', '.join(counts.second)}"
            for run in ("hooks", "live", "stock", "patched")
            if (counts := getattr(self, run)) is not None and counts.second
        ]


def features_that_fit(source: Path) -> tuple[str, list[str]]:
    """How many of the features fit the oMLX in ``source``, and why others do not."""
    off = [f.field for f in FEATURES if not getattr(Settings(), f.field)]
    wanted = Settings(**dict.fromkeys(off, True))
    verdicts = install.decide(source, wanted).verdicts
    fit = [v for v in verdicts if v.state in (State.READY, State.NATIVE)]
    native = [v.feature.name for v in fit if v.state is State.NATIVE]
    text = f"{len(fit)} of {len(verdicts)}" + (f", native: {', '.join(native)}" * bool(native))
    refused = [v for v in verdicts if v.state is State.REFUSED]
    return text, [f"{v.feature.name} refused: {'; '.join(v.reasons)}" for v in refused]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_differences")
    parser.add_argument("sources", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--reports", type=Path, default=Path("reports"))
    options = parser.parse_args(argv)
    wrong, second = [], []
    print(HEAD)
    for source in options.sources:
        try:
            version = gate.find(source).version
        except gate.NoOmlx as error:
            parser.error(f"{source}: {error}")
        release = Release.of(version, options.reports / version)
        named = named_for(version, NAMED.read_text("utf-8"))
        features, refused = features_that_fit(source)
        print(release.row(features, named), flush=True)
        wrong += [*(f"{version}: {reason}" for reason in refused), *release.problems(named)]
        second += release.second_tries()
    for line in (*second, *wrong):
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
