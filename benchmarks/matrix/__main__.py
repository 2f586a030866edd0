"""The release matrix: ``python -m benchmarks.matrix --omlx-python PY --src 050=DIR ...``.

For each release what doctor says, the tests of the hooks, the live scenarios, and oMLX's
own tests without and with the package. A test of oMLX's that fails only with the package
has to be named in ``tests/live/known_differences.md``. Results are kept in ``--state``,
so that ``--only 053`` runs one release and ``--show`` none; ``--write README.md`` puts
the table between its markers. Exit status 1: something failed that is not named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import omlx_admission
from benchmarks.matrix import known, runs
from benchmarks.mutations import suite
from omlx_admission.hooks import gate, install
from omlx_admission.hooks.install import State

KNOWN = runs.REPOSITORY / "tests" / "live" / "known_differences.md"
BEGIN = "<!-- matrix: written by `python -m benchmarks.matrix --write README.md` -->"
END = "<!-- /matrix -->"
HEAD = (
    "| oMLX | features that fit | hooks' tests | live scenarios | its own tests, stock "
    "| with the package |\n|---|---|---|---|---|---|"
)
#: What is known of it is its text; there is no checkout to run.
UNSEEN = "| 0.7.x | by what doctor finds | not run | not run | not run | not run |"

Row = dict[str, Any]


def package_state() -> str:
    """A digest of the package's code: results of another one are old."""
    digest = hashlib.sha256()
    root = Path(omlx_admission.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def doctor(source: Path) -> Row:
    """Verdicts of one checkout."""
    report = install.decide(source, suite.SETTINGS)
    states = {v.feature.name: v.state.value for v in report.verdicts}
    reasons = {v.feature.name: v.reasons for v in report.verdicts if v.state is State.REFUSED}
    version = report.found.version if report.found else None
    return {"version": version, "states": states, "reasons": reasons}


def measure(name: str, source: Path, python: str, state: Path, parts: Sequence[str]) -> None:
    """Run ``parts`` for one release and keep each result as soon as it is there."""
    path = state / f"{name}.json"
    row: Row = json.loads(path.read_text()) if path.is_file() else {}
    row["doctor"] = doctor(source)
    version = str(row["doctor"]["version"])
    expected = {k.test for k in known.read(KNOWN) if k.holds_for(version)}
    steps: dict[str, Callable[[Path], runs.Counts]] = {
        "stock": lambda log: runs.omlx_suite(source, python, False, log),
        "patched": lambda log: runs.omlx_suite(source, python, True, log, expected),
        "hooks": lambda log: runs.hook_tests(source, python, log),
        "live": lambda log: runs.live_tests(source, python, log),
    }
    now = package_state()
    for part in parts:
        if part == "stock" and "counts" in row.get("stock", {}):
            continue  # the package has no part in it
        print(f"... {name} {part}", file=sys.stderr, flush=True)
        try:
            counts = steps[part](state / f"{name}-{part}.log")
            row[part] = {"counts": counts.as_json(), "package": now}
        except runs.RunError as error:
            row[part] = {"error": str(error), "package": now}
        path.write_text(json.dumps(row, indent=1))


def _cell(row: Row, part: str) -> str:
    result = row.get(part)
    if result is None:
        return "not run"
    return str(runs.Counts(**result["counts"])) if "counts" in result else "failed to run"


def render(name: str, row: Row, names: list[known.Known]) -> tuple[str, list[str]]:
    """One row of the table, and what is wrong with it."""
    found = row["doctor"]
    states: dict[str, str] = found["states"]
    version = found["version"] or name
    problems = [f"{version}: {k} refused: {'; '.join(v)}" for k, v in found["reasons"].items()]
    fit = sum(s in ("ready", "native") for s in states.values())
    native = [k for k, s in states.items() if s == "native"]
    features = f"{fit} of {len(states)}" + (f", native: {', '.join(native)}" if native else "")
    for part in ("hooks", "live", "stock", "patched"):
        result = row.get(part, {})
        if "error" in result:
            problems.append(f"{version}: {part}: {result['error']}")
        elif part in ("hooks", "live"):
            problems += [
                f"{version}: {t} fails" for t in result.get("counts", {}).get("failures", ())
            ]
    patched = _cell(row, "patched")
    if "counts" in row.get("patched", {}) and "counts" in row.get("stock", {}):
        named, unnamed, passing = known.sort_out(
            row["stock"]["counts"]["failures"],
            row["patched"]["counts"]["failures"],
            names,
            version,
        )
        new = len(named) + len(unnamed)
        patched += f"; {new} new" if new else "; none new"
        if unnamed:
            patched += f", {len(unnamed)} of them **not named**"
        elif named:
            patched += ", named"
        problems += [f"{version}: {t} fails with the package and is not named" for t in unnamed]
        problems += [f"{version}: {t} is named and passes" for t in passing]
    line = " | ".join(
        [
            version,
            features,
            _cell(row, "hooks"),
            _cell(row, "live"),
            _cell(row, "stock"),
            patched,
        ]
    )
    return f"| {line} |", problems


def write(readme: Path, table: str) -> None:
    """Put the table between its markers.

    Raises:
        SystemExit: the file has no markers.
    """
    text = readme.read_text("utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{readme}: no line {BEGIN}")
    readme.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", text), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.matrix", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--src", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--part", action="append", choices=("stock", "patched", "hooks", "live")
    )
    parser.add_argument("--state", type=Path, default=Path("matrix-out"), metavar="DIR")
    parser.add_argument("--show", action="store_true", help="run nothing, show what is kept")
    parser.add_argument("--write", type=Path, metavar="README.md")
    options = parser.parse_args(argv)
    options.state.mkdir(parents=True, exist_ok=True)
    state = options.state.resolve()
    for entry in options.src:
        name, _, folder = entry.partition("=")
        source = Path(folder)
        if not folder or not (source / "omlx").is_dir():
            parser.error(f"--src {entry}: expected NAME=DIR with DIR/omlx")
        if options.show or (options.only and name not in options.only):
            continue
        try:
            gate.find(source)
        except gate.NoOmlx as error:
            parser.error(f"--src {entry}: {error}")
        parts = options.part or ["stock", "patched", "hooks", "live"]
        measure(name, source.resolve(), options.omlx_python, state, parts)
    lines, problems = [HEAD], []
    names = known.read(KNOWN)
    now = package_state()
    for path in sorted(state.glob("*.json")):
        row = json.loads(path.read_text())
        line, wrong = render(path.stem, row, names)
        lines.append(line)
        problems += wrong
        old = [
            p
            for p in ("patched", "hooks", "live")
            if row.get(p, {}).get("package") not in (None, now)
        ]
        if old:
            print(f"{path.stem}: {', '.join(old)} ran with other code of ours", file=sys.stderr)
    table = "\n".join([*lines, UNSEEN])
    print(table)
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.write is not None:
        write(options.write, table)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
