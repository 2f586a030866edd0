"""The release matrix: ``python -m benchmarks.matrix --omlx-python PY --src 050=DIR ...``.

For each release what doctor says, the tests of the hooks, the live scenarios, and oMLX's
own tests without and with the package. A test of oMLX's that fails only with the package
has to be named in ``tests/live/known_differences.md``.

Results are kept in ``--state``, one file per release, each part with what it was measured
on: oMLX, the Python, this harness and, but for the stock run, the package and its tests.
A part that was measured on something else counts as not run. What is kept and still holds
is not run again without ``--again``, so a run that was ended is continued by its command.
``--only 053`` runs one release and ``--show`` none; processes may share the folder.

``--write README.md`` puts the table between its markers, when no cell is missing. Exit
status 1: a failure that is not named, a part that did not run or no longer holds;
2: nothing was written; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.matrix import kept, known, origin, runs, table
from benchmarks.matrix.kept import Row
from benchmarks.mutations import suite
from omlx_admission.hooks import gate, install
from omlx_admission.hooks.install import State

KNOWN = runs.REPOSITORY / "tests" / "live" / "known_differences.md"


def doctor(source: Path) -> Row:
    """Verdicts of one checkout."""
    report = install.decide(source, suite.SETTINGS)
    states = {v.feature.name: v.state.value for v in report.verdicts}
    reasons = {v.feature.name: v.reasons for v in report.verdicts if v.state is State.REFUSED}
    version = report.found.version if report.found else None
    return {"version": version, "states": states, "reasons": reasons}


def measure(
    name: str, source: Path, python: str, state: Path, parts: Sequence[str], again: bool = False
) -> list[str]:
    """Run what of ``parts`` is not kept; each result is kept as soon as it is there.

    Returns:
        What did not run, and why.
    """
    wrong = []
    for part in parts:
        try:
            with kept.only_here(state, name, part):
                _measure(name, source, python, state, part, again)
        except (kept.Busy, origin.OriginError) as error:
            wrong.append(f"{name}: {part} was not run: {error}")
        except runs.RunError as error:
            wrong.append(f"{name}: {part} is not kept: {error}")
            where = {"source": str(source), "python": python}
            kept.put(state / f"{name}.json", part, None, where)
    return wrong


def _measure(name: str, source: Path, python: str, state: Path, part: str, again: bool) -> None:
    path = state / f"{name}.json"
    log = state / f"{name}-{part}.log"
    steps: Mapping[str, Callable[[], Row]] = {
        "doctor": lambda: {"found": doctor(source)},
        "hooks": lambda: {"counts": runs.hook_tests(source, python, log).as_json()},
        "live": lambda: {"counts": runs.live_tests(source, python, log).as_json()},
        "stock": lambda: {"counts": runs.omlx_suite(source, python, False, log).as_json()},
        "patched": lambda: {"counts": runs.omlx_suite(source, python, True, log).as_json()},
    }
    before = origin.of_parts(source, python)[part]
    old = kept.read(path).get(part)
    if old is not None and not again:
        why = origin.differences(old.get("on"), before)
        if not why:
            _say(f"... {name} {part}: kept, it holds")
            return
        _say(f"{name}: {part} is run again: {'; '.join(why)}")
    _say(f"... {name} {part}")
    result = steps[part]()
    changed = origin.differences(before, origin.of_parts(source, python)[part])
    if changed:
        raise runs.RunError(f"changed while it ran: {'; '.join(changed)}")
    where = {"source": str(source), "python": python}
    kept.put(path, part, {**result, "on": before}, where)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def holding(
    name: str, row: Row, source: Path | None, python: str | None
) -> tuple[Row, list[str]]:
    """The parts of ``row`` that hold for what is there now, and why others do not.

    Without a checkout or a Python it looks at those that the release was run with.
    """
    where = row.get("where", {})
    parts = [p for p in origin.PARTS if p in row]
    if not parts:
        return {}, []
    source = source or (Path(where["source"]) if "source" in where else None)
    if source is None:
        return {}, [f"{name}: {', '.join(parts)} dropped: it does not say what it was run on"]
    try:
        now = origin.of_parts(source, python or where.get("python") or sys.executable)
    except origin.OriginError as error:
        return {}, [f"{name}: {', '.join(parts)} dropped: {error}"]
    good, dropped = {}, []
    for part in parts:
        why = origin.differences(row[part].get("on"), now[part])
        if why:
            dropped.append(f"{name}: {part} dropped: {'; '.join(why)}")
        else:
            good[part] = row[part]
    return good, dropped


def missing(
    rows: Mapping[str, Row], where: Mapping[str, tuple[str, str]], state: Path
) -> list[str]:
    """The cells that no result holds for, and the commands that run them."""
    lines = []
    for name, row in rows.items():
        parts = [p for p in origin.PARTS if p not in row]
        if parts:
            source, python = where[name]
            command = ["python", "-m", "benchmarks.matrix", "--omlx-python", python]
            command += ["--state", str(state), "--src", f"{name}={source}"]
            command += [word for part in parts for word in ("--part", part)]
            lines.append(f"{name}: {', '.join(parts)}; run: {shlex.join(command)}")
    return lines


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Path]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.matrix", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--omlx-python", metavar="PATH")
    parser.add_argument("--src", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--part", action="append", choices=origin.PARTS)
    parser.add_argument("--again", action="store_true", help="run what is kept, too")
    parser.add_argument("--state", type=Path, default=Path("matrix-out"), metavar="DIR")
    parser.add_argument("--show", action="store_true", help="run nothing, show what is kept")
    parser.add_argument("--write", type=Path, metavar="README.md")
    options = parser.parse_args(argv)
    sources = {}
    for entry in options.src:
        name, _, folder = entry.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not (Path(folder) / "omlx").is_dir():
            parser.error(f"--src {entry}: expected NAME=DIR with DIR/omlx")
        if name in sources:
            parser.error(f"--src {entry}: {name} is given twice")
        sources[name] = Path(folder).resolve()
        try:
            gate.find(sources[name])
        except gate.NoOmlx as error:
            parser.error(f"--src {entry}: {error}")
    for name in options.only:
        if name not in sources:
            parser.error(f"--only {name}: no --src {name}=DIR")
    if options.omlx_python is not None:
        # The runs have other working folders; links stay, a venv is where its link is.
        found = shutil.which(options.omlx_python)
        if found is None:
            parser.error(f"--omlx-python {options.omlx_python}: not there, or no program")
        options.omlx_python = os.path.abspath(found)
    if options.write is not None:
        table.releases_in(options.write)  # no markers: said before hours of runs
    return options, sources


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options, sources = _arguments(argv)
    options.state.mkdir(parents=True, exist_ok=True)
    state = options.state.resolve()
    run = [] if options.show else [n for n in sources if n in (options.only or sources)]
    problems: list[str] = []
    try:
        for name in run:
            python = options.omlx_python or sys.executable
            parts = options.part or origin.PARTS
            problems += measure(name, sources[name], python, state, parts, options.again)
    except KeyboardInterrupt:
        _say(f"interrupted; what was run before is kept in {state}")
        return 130
    rows: dict[str, Row] = {}
    where: dict[str, tuple[str, str]] = {}
    for name in sorted({*sources, *(p.stem for p in state.glob("*.json"))}):
        row = kept.read(state / f"{name}.json")
        at = row.get("where", {})
        where[name] = (
            str(sources.get(name) or at.get("source", "DIR")),
            options.omlx_python or at.get("python", sys.executable),
        )
        rows[name], dropped = holding(name, row, sources.get(name), options.omlx_python)
        if not run or name in run:
            problems += dropped
        else:  # another process may be at it
            for line in dropped:
                _say(line)
    names = known.read(KNOWN)
    too_often = table.repeated(rows)
    lines = [table.HEAD]
    for name, row in rows.items():
        line, wrong = table.render(name, row, names, too_often)
        lines.append(line)
        problems += wrong
    text = "\n".join([*lines, table.UNSEEN])
    print(text)
    for line in [*problems, *table.second_tries(rows)]:
        _say(line)
    if options.write is not None:
        gaps = missing(rows, where, state)
        gaps = gaps or _other_releases(rows, options.write)
        if gaps:
            for line in gaps:
                _say(f"missing: {line}")
            _say(f"{options.write} is not written")
            return 2
        table.write(options.write, text)
    return int(bool(problems))


def _other_releases(rows: Mapping[str, Row], readme: Path) -> list[str]:
    here = [table.version_of(name, row) for name, row in rows.items()]
    lines = [
        f"{v}: more than one of {', '.join(rows)} is it" for v in {*here} if here.count(v) > 1
    ]
    return lines + [
        f"{release}: it has a row in {readme} and nothing is kept of it; run it with --src, "
        "or delete the row"
        for release in table.releases_in(readme)
        if release not in here
    ]


def _terminated(*_: object) -> None:
    # As an exception, so that the run that is under way is ended with this process.
    raise SystemExit(143)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    raise SystemExit(main())
