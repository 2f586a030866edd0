"""The README's table from the kept results, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.matrix import known, runs
from benchmarks.matrix.kept import Row

BEGIN = "<!-- matrix: written by `python -m benchmarks.matrix --write README.md` -->"
END = "<!-- /matrix -->"
HEAD = (
    "| oMLX | features that fit | hooks' tests | live scenarios | its own tests, stock "
    "| with the package |\n|---|---|---|---|---|---|"
)
#: What is known of it is its text; there is no checkout to run.
UNSEEN = "| 0.7.x | by what doctor finds | not run | not run | not run | not run |"

#: A test that needs its second try in so many releases, and never on stock, is no accident.
_TOO_OFTEN = 3


def version_of(name: str, row: Row) -> str:
    """The release that a row is about."""
    if "doctor" in row:
        return str(row["doctor"]["found"]["version"] or name)
    # Every part says it; what is named for a release is named without doctor too.
    found = [part["on"]["oMLX"].split()[0] for part in row.values() if "on" in part]
    return str(found[0]) if found else name


def _tests(row: Row, part: str, *kinds: str) -> list[str]:
    counts = row.get(part, {}).get("counts", {})
    return [test for kind in kinds for test in counts.get(kind, ())]


def _bare(test: str) -> str:
    return test.partition("[")[0]


def _only_with_package(row: Row) -> list[str]:
    """Tests at the second try with the package that passed at the first on stock."""
    if "stock" not in row:
        return []
    stock = {_bare(t) for t in _tests(row, "stock", "failures", "alone")}
    return [t for t in _tests(row, "patched", "alone") if _bare(t) not in stock]


def repeated(rows: Mapping[str, Row]) -> frozenset[str]:
    """Tests whose second tries count as failures: the package seems to cause them."""
    releases = _releases(rows)
    return frozenset(
        t
        for t, (with_it, on_stock) in releases.items()
        if len(with_it) >= _TOO_OFTEN and not on_stock
    )


def _releases(rows: Mapping[str, Row]) -> dict[str, tuple[list[str], list[str]]]:
    """By test: releases where only the package needed a second try, and where stock did."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name, row in rows.items():
        for test in dict.fromkeys(_bare(t) for t in _only_with_package(row)):
            found.setdefault(test, ([], []))[0].append(version_of(name, row))
    for name, row in rows.items():
        for test in {_bare(t) for t in _tests(row, "stock", "failures", "alone")} & {*found}:
            found[test][1].append(version_of(name, row))
    return found


def second_tries(rows: Mapping[str, Row]) -> list[str]:
    """Lines on what needed one: by release, then by test where it repeats."""
    lines = []
    for name, row in rows.items():
        version = version_of(name, row)
        only = _only_with_package(row)
        if only:
            lines.append(
                f"{version}: second try with the package, none on stock: {', '.join(only)}"
            )
        elif _tests(row, "patched", "alone") and "stock" not in row:
            tests = ", ".join(_tests(row, "patched", "alone"))
            lines.append(f"{version}: second try with the package, stock not run: {tests}")
        for part in ("hooks", "live"):
            if tests := ", ".join(_tests(row, part, "alone")):
                lines.append(f"{version}: second try in {part}: {tests}")
    for test, (with_it, on_stock) in _releases(rows).items():
        if len(with_it) > 1:
            also = f"; on stock in {', '.join(on_stock)}" if on_stock else "; never on stock"
            lines.append(f"{test}: second try with the package in {', '.join(with_it)}{also}")
    return lines


def _cell(row: Row, part: str) -> str:
    return str(runs.Counts(**row[part]["counts"])) if part in row else "not run"


def render(
    name: str, row: Row, names: list[known.Known], too_often: Collection[str] = ()
) -> tuple[str, list[str]]:
    """One row of the table, and what is wrong with it.

    ``too_often``: tests whose second tries with the package are failures.
    """
    version = version_of(name, row)
    features, problems = _features(version, row)
    for part in ("hooks", "live"):
        problems += [f"{version}: {t} fails" for t in _tests(row, part, "failures")]
    patched = _cell(row, "patched")
    if "patched" in row and "stock" in row:
        again = [t for t in _only_with_package(row) if _bare(t) in too_often]
        named, unnamed, passing = known.sort_out(
            _tests(row, "stock", "failures"),
            [*_tests(row, "patched", "failures"), *again],
            names,
            version,
        )
        new = len(named) + len(unnamed)
        patched += f"; {new} new" if new else "; none new"
        if unnamed:
            patched += f", {len(unnamed)} of them **not named**"
        elif named:
            patched += ", named"
        problems += [
            f"{version}: {t} needs a second try with the package, as in other releases and "
            "never on stock, and is not named"
            if t in again
            else f"{version}: {t} fails with the package and is not named"
            for t in unnamed
        ]
        # Named for its second tries, it passes in the end.
        tried = {_bare(t) for t in _tests(row, "patched", "alone")}
        problems += [f"{version}: {t} is named and passes" for t in passing if t not in tried]
    cells = [_cell(row, part) for part in ("hooks", "live", "stock")]
    return f"| {' | '.join([version, features, *cells, patched])} |", problems


def _features(version: str, row: Row) -> tuple[str, list[str]]:
    if "doctor" not in row:
        return "not run", []
    found = row["doctor"]["found"]
    states: dict[str, str] = found["states"]
    fit = sum(s in ("ready", "native") for s in states.values())
    native = [k for k, s in states.items() if s == "native"]
    text = f"{fit} of {len(states)}" + (f", native: {', '.join(native)}" if native else "")
    return text, [
        f"{version}: {k} refused: {'; '.join(v)}" for k, v in found["reasons"].items()
    ]


def _between(readme: Path) -> re.Match[str]:
    pattern = re.compile(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", re.DOTALL)
    match = pattern.search(readme.read_text("utf-8"))
    if match is None:
        raise SystemExit(f"{readme}: no line {BEGIN}")
    return match


def releases_in(readme: Path) -> list[str]:
    """The releases that the table in ``readme`` has now.

    Raises:
        SystemExit: the file has no markers.
    """
    lines = _between(readme).group(1).splitlines()
    rows = [line for line in lines if line not in (UNSEEN, *HEAD.splitlines())]
    return re.findall(r"^\| (\S+) \|", "\n".join(rows), re.MULTILINE)


def write(readme: Path, table: str) -> None:
    """Put the table between its markers.

    Raises:
        SystemExit: the file has no markers.
    """
    match = _between(readme)
    text = f"{match.string[: match.start()]}{BEGIN}\n{table}\n{END}"
    readme.write_text(text + match.string[match.end() :], "utf-8")
