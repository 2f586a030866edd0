"""The release matrix: what it counts, what it takes for named, and where it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.matrix import __main__ as command
from benchmarks.matrix import kept, known, origin, runs, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_engine_pool.TestLease" name="test_kept"/>
<testcase classname="tests.test_engine_pool.TestLease" name="test_lost"><failure/></testcase>
<testcase classname="tests.test_server" name="test_up"><error/></testcase>
<testcase classname="tests.test_server" name="test_gpu"><skipped/></testcase>
</testsuite></testsuites>"""

RELEASES = ("0.5.0", "0.5.3", "0.5.7", "0.6.0", "0.6.2", "0.6.3rc2")

TABLE = """
| test | releases | what | why |
|---|---|---|---|
| `test_engine_pool::TestLease::test_lost` | 0.5.0, 0.6.3rc2 | x | y |
| `test_server::test_up` | all | x | y |
| `test_server::test_of_another_table` | two engines at the same time | y |
"""


def test_a_report_is_counted_and_its_failures_are_named(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    counts = runs.read(path)
    assert str(counts) == "1 passed, 2 failed, 1 skipped"
    assert counts.failures == ["test_engine_pool::TestLease::test_lost", "test_server::test_up"]


def test_what_passes_alone_is_counted_as_passed_and_said() -> None:
    counts = runs.Counts(3, 2, 0, ["a::x", "a::y"])
    counts.forgive(["a::y"])
    assert str(counts) == "4 passed (1 at the second try, alone), 1 failed"
    assert counts.failures == ["a::x"]


def test_a_name_holds_for_its_releases_only(tmp_path: Path) -> None:
    path = tmp_path / "known.md"
    path.write_text(TABLE)
    names = known.read(path)
    assert [k.test for k in names] == [
        "test_engine_pool::TestLease::test_lost",
        "test_server::test_up",
    ]
    lost, up, other = names[0].test, names[1].test, "test_server::test_down[3]"
    assert known.sort_out([], [lost, up], names, "0.5.0") == ([lost, up], [], [])
    assert known.sort_out([], [lost, up], names, "0.6.0") == ([up], [lost], [])
    # What fails on stock as well is nobody's news; a name whose test passes is stale.
    assert known.sort_out([other], [other], names, "0.6.0") == ([], [], [up])


def test_the_projects_own_list_is_read() -> None:
    names = {k.test: k for k in known.read(command.KNOWN)}
    waits = names[
        "test_engine_pool::TestEnginePoolAsync::test_runtime_settings_reload_rejected_while_leased"
    ]
    assert waits.holds_for("0.5.0") and waits.holds_for("0.6.3rc2")
    assert all(any(k.holds_for(release) for release in RELEASES) for k in names.values())


def counts(failures: Sequence[str] = (), alone: Sequence[str] = ()) -> dict[str, Any]:
    found = runs.Counts(9, len(failures), 0, list(failures), list(alone))
    return {"counts": found.as_json()}


def row(
    failures: Sequence[str] = (),
    alone: Sequence[str] = (),
    *,
    version: str = "0.6.0",
    stock_alone: Sequence[str] = (),
) -> kept.Row:
    """A whole row; ``alone`` passed at the second try with the package."""
    states = {"version": version, "states": {"queue": "ready"}, "reasons": {}}
    return {
        "doctor": {"found": states},
        "stock": counts(alone=stock_alone),
        "hooks": counts(),
        "live": counts(),
        "patched": counts(failures, alone),
    }


def test_a_new_failure_that_is_not_named_is_an_error() -> None:
    line, problems = table.render("060", row(), [])
    assert line == "| 0.6.0 | 1 of 1 | 9 passed | 9 passed | 9 passed | 9 passed; none new |"
    assert problems == []
    line, problems = table.render("060", row(["test_server::test_up"]), [])
    assert "1 new, 1 of them **not named**" in line
    assert problems == ["0.6.0: test_server::test_up fails with the package and is not named"]
    names = [known.Known("test_server::test_up", frozenset())]
    line, problems = table.render("060", row(["test_server::test_up"]), names)
    assert line.endswith("9 passed, 1 failed; 1 new, named |")
    assert problems == []


# --- second tries -----------------------------------------------------------------

OFTEN = "test_server::test_order"


def test_a_second_try_that_stock_does_not_need_is_named_by_release_and_by_test() -> None:
    rows = {
        "053": row(alone=[f"{OFTEN}[1]", "test_x::test_busy"], version="0.5.3"),
        "060": row(alone=[f"{OFTEN}[2]", "test_x::y"], stock_alone=["test_x::y"]),
    }
    rows["060"]["live"] = counts(alone=["test_doors::test_one"])
    assert table.second_tries(rows) == [
        f"0.5.3: second try with the package, none on stock: {OFTEN}[1], test_x::test_busy",
        f"0.6.0: second try with the package, none on stock: {OFTEN}[2]",
        "0.6.0: second try in live: test_doors::test_one",
        f"{OFTEN}: second try with the package in 0.5.3, 0.6.0; never on stock",
    ]
    # Two releases may be an accident: the cell says it and nothing is wrong.
    assert table.repeated(rows) == frozenset()
    line, problems = table.render("053", rows["053"], [], table.repeated(rows))
    assert line.endswith("| 9 passed (2 at the second try, alone); none new |")
    assert problems == []


def test_the_same_second_try_in_three_releases_is_a_failure_unless_named() -> None:
    rows = {
        v.replace(".", ""): row(alone=[OFTEN], version=v) for v in ("0.5.0", "0.5.3", "0.6.0")
    }
    often = table.repeated(rows)
    assert often == {OFTEN}
    line, problems = table.render("053", rows["053"], [], often)
    assert "(1 at the second try, alone); 1 new, 1 of them **not named** |" in line
    assert len(problems) == 1
    assert OFTEN in problems[0] and "second try" in problems[0] and "0.5.3" in problems[0]
    # Named: for its release only, and it is not one that passes.
    names = [known.Known(OFTEN, frozenset({"0.5.3"}))]
    line, problems = table.render("053", rows["053"], names, often)
    assert line.endswith("; 1 new, named |") and problems == []
    assert table.render("060", rows["060"], names, often)[1]
    assert table.render("060", row(), [known.Known(OFTEN, frozenset())], often)[1] == [
        f"0.6.0: {OFTEN} is named and passes"
    ]


@pytest.mark.parametrize("kind", ["alone", "failures"])
def test_a_second_try_that_stock_needs_somewhere_is_not_of_the_package(kind: str) -> None:
    rows = {
        v.replace(".", ""): row(alone=[OFTEN], version=v) for v in ("0.5.0", "0.5.3", "0.6.0")
    }
    rows["057"] = row(version="0.5.7")
    rows["057"]["stock"] = counts(**{kind: [OFTEN]})
    assert table.repeated(rows) == frozenset()
    assert table.second_tries(rows)[-1].endswith("; on stock in 0.5.7")


def test_a_second_try_is_no_news_while_stock_was_not_run() -> None:
    rows = {v: row(alone=[OFTEN], version=v) for v in ("0.5.0", "0.5.3", "0.6.0")}
    del rows["0.6.0"]["stock"]
    assert table.repeated(rows) == frozenset()
    assert f"0.6.0: second try with the package, stock not run: {OFTEN}" in (
        table.second_tries(rows)
    )


Tries = list[tuple[str, ...]]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Tries:
    """Calls of pytest: all files have two failures; alone the first of them passes."""
    seen: Tries = []

    def run(python: str, options: Sequence[str], *_: object) -> runs.Counts:
        seen.append(tuple(o for o in options if o.startswith("tests/")))
        if "::" not in options[-1]:
            return runs.Counts(7, 2, 0, ["test_server::test_a", "test_server::test_b"])
        if options[-1].endswith("test_b"):
            raise runs.RunError("pytest ended with 4")
        return runs.Counts(1)

    monkeypatch.setattr(runs, "_pytest", run)
    return seen


@pytest.mark.parametrize("with_package", [False, True])
def test_stock_and_patched_get_the_same_tries(
    tmp_path: Path, tries: Tries, with_package: bool
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_server.py").touch()
    found = runs.omlx_suite(tmp_path, "python", with_package, tmp_path / "log")
    assert str(found) == "8 passed (1 at the second try, alone), 1 failed"
    assert tries == [
        ("tests/test_server.py",),
        ("tests/test_server.py::test_a",),
        ("tests/test_server.py::test_b",),
    ]


def test_a_broken_environment_is_not_tried_test_by_test(tmp_path: Path) -> None:
    many = [f"test_x::test_{i}" for i in range(300)]
    calls: list[Sequence[str]] = []

    def run(which: Sequence[str], log: Path) -> runs.Counts:
        calls.append(which)
        return runs.Counts(1, len(many), 0, [*many])

    found = runs._twice(run, ["tests/hooks"], "tests/hooks", tmp_path / "log")
    assert len(calls) == 1 and found.failed == 300


# --- what a run of pytest counts --------------------------------------------------


def fake_python(tmp_path: Path, script: str) -> str:
    """A program that is run as ``PY -m pytest ...``; ``$report`` is its report."""
    path = tmp_path / "python"
    find = 'for o; do case $o in --junitxml=*) report="${o#--junitxml=}";; esac; done'
    path.write_text(f"#!/bin/sh\n{find}\n{script}\n")
    path.chmod(0o755)
    return str(path)


SKIPPED = (
    '<testsuite><testcase classname="tests.test_x" name="t"><skipped/></testcase></testsuite>'
)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"echo '{REPORT}' > $report; exit 2", "ended with 2"),
        (f"echo '{REPORT}' > $report; exit 5", "ended with 5"),
        (f"echo '{REPORT}' > $report; kill -9 $$", "ended with -9"),
        ("exit 0", "ended with 0"),
        ("echo '<testsuite/>' > $report", "no test ran"),
        (f"echo '{SKIPPED}' > $report", "no test ran, 1 skipped"),
        (f"echo '{REPORT[:90]}' > $report", "no report"),
    ],
)
def test_a_run_that_counted_nothing_is_an_error(tmp_path: Path, script: str, why: str) -> None:
    python = fake_python(tmp_path, script)
    with pytest.raises(runs.RunError, match=why):
        runs._pytest(python, [], tmp_path, {}, tmp_path / "x.log")


def test_a_run_whose_tests_fail_is_counted(tmp_path: Path) -> None:
    python = fake_python(tmp_path, f"echo '{REPORT}' > $report; exit 1")
    found = runs._pytest(python, [], tmp_path, {}, tmp_path / "x.log")
    assert str(found) == "1 passed, 2 failed, 1 skipped"


def test_an_interrupted_run_ends_with_its_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the background of a shell without a terminal ctrl-C's signal is ignored.
    python = fake_python(
        tmp_path, "/bin/sleep 600 & echo $! > server.new; /bin/mv server.new server; wait"
    )
    server = tmp_path / "server"

    def interrupt(process: Any) -> int:
        while not server.is_file():
            assert process.poll() is None
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runs._pytest(python, [], tmp_path, {}, tmp_path / "x.log")
    try:
        psutil.Process(int(server.read_text())).wait(60)
    except psutil.NoSuchProcess:
        pass


# --- what a result holds for ------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small copy of this repository's shape, which a test may change."""
    root = tmp_path / "repository"
    texts = {
        "package/__init__.py": "",
        "package/page.html": "",
        "benchmarks/matrix/runs.py": "",
        "benchmarks/matrix/table.py": "",
        "benchmarks/rounds.py": "import benchmarks.worker",
        "benchmarks/worker.py": "",
        "benchmarks/soak.py": "",
        "tests/__init__.py": "",
        "tests/conftest.py": "",
        "tests/hooks/test_rounds.py": "from benchmarks.rounds import Rounds",
        "tests/hooks/test_mutations.py": "",
        "tests/live/test_doors.py": "",
        "tests/live/known_differences.md": "",
        "pyproject.toml": "",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(origin, "REPOSITORY", root)
    monkeypatch.setattr(origin.omlx_admission, "__file__", str(root / "package/__init__.py"))
    pythons = {"PY": "3.11", sys.executable: "3.11", "PY312": "3.12"}
    monkeypatch.setattr(
        origin, "_python", lambda python: {"Python": pythons[python], "libraries": "mlx 0.32"}
    )
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "omlx-063", "0.6.3")


def make_checkout(root: Path, version: str) -> Path:
    for folder in ("omlx", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "omlx" / "__init__.py").touch()
    (root / "omlx" / "_version.py").write_text(f'__version__ = "{version}"\n')
    (root / "tests" / "test_server.py").touch()
    (root / "tests" / "test_of_no_concern.py").touch()
    return root


OURS = {"doctor", "hooks", "live", "patched"}
ALL = {"stock", *OURS}


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("package/__init__.py", OURS),
        ("package/page.html", OURS),
        ("benchmarks/matrix/runs.py", ALL),
        ("benchmarks/matrix/new.py", ALL),
        ("benchmarks/matrix/table.py", set()),
        ("benchmarks/rounds.py", {"hooks"}),
        ("benchmarks/worker.py", {"hooks"}),
        ("benchmarks/soak.py", set()),
        ("tests/conftest.py", {"hooks", "live"}),
        ("tests/hooks/test_rounds.py", {"hooks"}),
        ("tests/hooks/test_mutations.py", set()),
        ("tests/live/test_doors.py", {"live"}),
        ("tests/live/known_differences.md", set()),
        ("pyproject.toml", {"hooks", "live"}),
        ("../omlx-063/omlx/__init__.py", ALL),
        ("../omlx-063/tests/test_server.py", {"stock", "patched"}),
        ("../omlx-063/tests/conftest.py", {"stock", "patched"}),
        ("../omlx-063/tests/test_of_no_concern.py", set()),
    ],
)
def test_a_change_makes_old_what_was_measured_on_it(
    repository: Path, checkout: Path, changed: str, stale: set[str]
) -> None:
    before = origin.of_parts(checkout, "PY")
    assert {*before} == {*origin.PARTS}
    path = repository / changed
    path.write_text((path.read_text() if path.is_file() else "") + "# changed\n")
    now = origin.of_parts(checkout, "PY")
    assert {p for p in now if origin.differences(before[p], now[p])} == stale


def test_a_result_holds_for_its_release_and_its_python(
    repository: Path, checkout: Path, tmp_path: Path
) -> None:
    here = origin.of_parts(checkout, "PY")
    elsewhere = origin.of_parts(checkout, "PY312")
    assert origin.differences(here["stock"], elsewhere["stock"]) == ["Python was 3.11, is 3.12"]
    assert not origin.differences(here["doctor"], elsewhere["doctor"])
    other = origin.of_parts(make_checkout(tmp_path / "omlx-050", "0.5.0"), "PY")
    (why,) = origin.differences(here["stock"], other["stock"])
    assert why.startswith("oMLX was 0.6.3 ") and ", is 0.5.0 " in why
    assert origin.differences(None, here["stock"])
    with pytest.raises(origin.OriginError):
        origin.of_parts(tmp_path / "nowhere", "PY")


def test_the_projects_own_harness_and_tests_are_found() -> None:
    names = {p.name for p in origin._harness()}
    assert {"runs.py", "active.py", "__main__.py", "origin.py"} <= names
    ours = {
        p.relative_to(runs.REPOSITORY).as_posix()
        for p in origin._ours(runs.REPOSITORY / "tests" / "live")
    }
    assert {"tests/live/conftest.py", "benchmarks/load_cycles.py"} <= ours
    assert {"benchmarks/doors/routes.py", "pyproject.toml"} <= ours
    assert "benchmarks/simulation/__init__.py" not in ours


def test_a_python_is_asked_and_one_that_is_none_is_an_error() -> None:
    found = origin._python(sys.executable)
    assert sys.version.split()[0] in found["Python"] and "pytest " in found["libraries"]
    with pytest.raises(origin.OriginError):
        origin._python("/nowhere/python")


# --- the command, with the runs stubbed -------------------------------------------


class Bench:
    """The command on one state folder; ``ran`` are the parts, ``during`` is called in each."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = tmp_path / "state"
        self.readme = tmp_path / "README.md"
        self.ran: list[str] = []
        self.during: Callable[[str], None] = lambda part: None
        self.out = self.err = ""
        self._capsys = capsys
        self.table("| 0.6.3 | old |")

    def table(self, rows: str) -> None:
        head, unseen = table.HEAD, table.UNSEEN
        self.readme.write_text(
            f"above\n{table.BEGIN}\n{head}\n{rows}\n{unseen}\n{table.END}\nbelow\n"
        )

    def step(self, part: str) -> runs.Counts:
        self.ran.append(part)
        self.during(part)
        return runs.Counts(9)

    def __call__(self, *arguments: object) -> int:
        self.ran.clear()
        argv = ["--state", str(self.state), *map(str, arguments)]
        try:
            return command.main(argv)
        finally:
            self.out, self.err = self._capsys.readouterr()

    def kept(self, name: str = "063") -> set[str]:
        return {*kept.read(self.state / f"{name}.json")} - {"where"}


@pytest.fixture
def bench(
    tmp_path: Path,
    repository: Path,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    made = Bench(tmp_path, capsys)

    def doctor(source: Path) -> kept.Row:
        made.step("doctor")
        version = origin.of_parts(source, "PY")["doctor"]["oMLX"].split()[0]
        return {"version": version, "states": {"queue": "ready"}, "reasons": {}}

    def suite(source: Path, python: str, with_package: bool, log: Path) -> runs.Counts:
        return made.step("patched" if with_package else "stock")

    monkeypatch.setattr(command, "doctor", doctor)
    monkeypatch.setattr(runs, "hook_tests", lambda *_: made.step("hooks"))
    monkeypatch.setattr(runs, "live_tests", lambda *_: made.step("live"))
    monkeypatch.setattr(runs, "omlx_suite", suite)
    monkeypatch.setattr(command, "KNOWN", tmp_path / "known.md")
    (tmp_path / "known.md").touch()
    return made


def test_what_is_kept_and_holds_is_not_run_again(bench: Bench, checkout: Path) -> None:
    assert bench("--src", f"063={checkout}", "--part", "live") == 0
    assert bench.ran == ["live"]
    assert bench("--src", f"063={checkout}") == 0
    assert bench.ran == ["doctor", "hooks", "stock", "patched"]
    assert (
        "| 0.6.3 | 1 of 1 | 9 passed | 9 passed | 9 passed | 9 passed; none new |" in bench.out
    )
    assert bench("--src", f"063={checkout}", "--part", "live", "--again") == 0
    assert bench.ran == ["live"]


def test_what_changed_is_run_again_and_stock_is_not_for_our_code(
    bench: Bench, checkout: Path, repository: Path
) -> None:
    bench("--src", f"063={checkout}")
    (repository / "package" / "__init__.py").write_text("new = 1\n")
    # Shown, it is dropped and that is no success; nothing is lost for it.
    assert bench("--show") == 1
    assert "| 0.6.3 | not run | not run | not run | 9 passed | not run |" in bench.out
    assert "063: live dropped: package was " in bench.err
    assert "stock dropped" not in bench.err
    assert bench.kept() == ALL
    assert bench("--src", f"063={checkout}") == 0
    assert {*bench.ran} == OURS


def test_another_checkout_under_a_name_has_none_of_its_numbers(
    bench: Bench, checkout: Path, tmp_path: Path
) -> None:
    bench("--src", f"063={checkout}")
    other = make_checkout(tmp_path / "omlx-050", "0.5.0")
    assert bench("--show", "--src", f"063={other}", "--write", bench.readme) == 2
    assert "stock dropped: oMLX was 0.6.3 " in bench.err
    assert "9 passed" not in bench.out
    assert bench("--src", f"063={other}", "--part", "stock") == 1
    assert bench.ran == ["stock"]


def test_a_checkout_that_is_gone_holds_nothing(bench: Bench, checkout: Path) -> None:
    bench("--src", f"063={checkout}")
    checkout.rename(checkout.with_name("moved"))
    assert bench("--show") == 1
    assert (
        "9 passed" not in bench.out and "063: doctor, hooks, live, stock, patched" in bench.err
    )
    assert bench("--show", "--src", f"063={checkout.with_name('moved')}") == 0
    assert "9 passed" in bench.out


def test_results_that_do_not_say_what_they_are_of_are_dropped(
    bench: Bench, checkout: Path
) -> None:
    bench.state.mkdir()
    old = {"stock": {**counts(), "package": "x"}, "doctor": {"version": "0.5.0"}}
    (bench.state / "063.json").write_text(json.dumps(old))
    assert bench("--show") == 1
    assert bench("--show", "--src", f"063={checkout}") == 1
    assert "stock dropped: it does not say what it was measured on" in bench.err
    (bench.state / "063.json").write_text('{"stock": {"cou')
    assert bench("--src", f"063={checkout}") == 0
    assert bench.kept() == ALL


def test_the_table_is_written_between_its_markers(bench: Bench, checkout: Path) -> None:
    assert bench("--src", f"063={checkout}", "--write", bench.readme) == 0
    lines = bench.readme.read_text().splitlines()
    assert lines[0] == "above" and lines[-1] == "below"
    assert lines[1] == table.BEGIN and lines[-2] == table.END
    assert "| 0.6.3 | 1 of 1 |" in lines[4]
    assert lines[-3] == table.UNSEEN
    bench.readme.write_text("no markers")
    with pytest.raises(SystemExit, match="no line"):
        bench("--src", f"063={checkout}", "--again", "--write", bench.readme)
    assert bench.ran == []  # before hours of runs


def test_nothing_is_written_while_a_cell_is_missing(
    bench: Bench, checkout: Path, repository: Path, tmp_path: Path
) -> None:
    before = bench.readme.read_text()
    arguments = ["--src", f"063={checkout}", "--write", bench.readme]
    assert bench(*arguments, "--part", "doctor", "--part", "stock") == 2
    assert "missing: 063: hooks, live, patched; run: python -m benchmarks.matrix" in bench.err
    assert f"--src 063={checkout} --part hooks --part live --part patched" in bench.err
    assert bench(*arguments) == 0
    bench.table("| 0.6.3 | old |")
    (repository / "tests" / "live" / "test_doors.py").write_text("new = 1\n")
    assert bench("--show", "--write", bench.readme) == 2
    assert "missing: 063: live; run:" in bench.err
    assert bench.readme.read_text() == before
    assert bench(*arguments) == 0
    # A release that was never run, and one that only the table has.
    other = make_checkout(tmp_path / "omlx-050", "0.5.0")
    assert bench("--show", *arguments, "--src", f"050={other}") == 2
    assert "missing: 050: doctor, hooks, live, stock, patched" in bench.err
    bench.table("| 0.5.0 | old |\n| 0.6.3 | old |")
    assert bench("--show", "--write", bench.readme) == 2
    assert "missing: 0.5.0: it has a row in" in bench.err


def test_a_problem_of_the_second_tries_reaches_the_commands_end(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suite(source: Path, python: str, with_package: bool, log: Path) -> runs.Counts:
        return runs.Counts(9, alone=[OFTEN] if with_package else [])

    monkeypatch.setattr(runs, "omlx_suite", suite)
    sources: list[object] = []
    for version in ("0.5.0", "0.5.3", "0.6.0"):
        folder = make_checkout(tmp_path / f"omlx-{version}", version)
        sources += ["--src", f"{version}={folder}"]
    assert bench(*sources) == 1
    assert bench.err.splitlines()[-1] == (
        f"{OFTEN}: second try with the package in 0.5.0, 0.5.3, 0.6.0; never on stock"
    )
    assert f"0.6.0: {OFTEN} needs a second try" in bench.err
    (tmp_path / "known.md").write_text(f"| `{OFTEN}` | all | x | y |\n")
    assert bench("--show") == 0


def fail(part: str, error: BaseException) -> Callable[[str], None]:
    def during(running: str) -> None:
        if running == part:
            raise error

    return during


def test_a_run_that_counted_nothing_is_not_kept(bench: Bench, checkout: Path) -> None:
    bench.during = fail("live", runs.RunError("pytest ended with 4"))
    assert bench("--src", f"063={checkout}") == 1
    assert "063: live is not kept: pytest ended with 4" in bench.err
    assert bench.kept() == ALL - {"live"}
    bench.during = lambda part: None
    bench("--src", f"063={checkout}")
    assert bench.ran == ["live"] and bench.kept() == ALL
    # Nor does its predecessor's number stand for it.
    bench.during = fail("live", runs.RunError("pytest ended with 4"))
    assert bench("--src", f"063={checkout}", "--part", "live", "--again") == 1
    assert bench.kept() == ALL - {"live"}


def test_what_changes_while_a_part_runs_is_measured_on_neither(
    bench: Bench, checkout: Path, repository: Path
) -> None:
    def during(part: str) -> None:
        if part == "hooks":
            (repository / "package" / "__init__.py").write_text("new = 1\n")

    bench.during = during
    assert bench("--src", f"063={checkout}", "--part", "hooks") == 1
    assert "hooks is not kept: changed while it ran: package was" in bench.err
    assert bench.kept() == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_command_keeps_what_was_run(
    bench: Bench, checkout: Path, error: BaseException
) -> None:
    bench.during = fail("live", error)
    if isinstance(error, KeyboardInterrupt):
        assert bench("--src", f"063={checkout}", "--write", bench.readme) == 130
    else:
        with pytest.raises(SystemExit):
            bench("--src", f"063={checkout}", "--write", bench.readme)
    assert bench.kept() == {"doctor", "hooks"}
    assert "| 0.6.3 | old |" in bench.readme.read_text()
    bench.during = lambda part: None
    assert bench("--src", f"063={checkout}") == 0
    assert bench.ran == ["live", "stock", "patched"]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "063.json"
    kept.put(path, "live", counts(), {})
    before = path.read_text()

    def killed(*_: object) -> None:
        assert path.read_text() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(kept.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        kept.put(path, "stock", counts(), {})
    assert path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["063.json", "063.lock"]


def test_processes_share_a_release_part_by_part(bench: Bench, checkout: Path) -> None:
    inner: list[int] = []

    def during(part: str) -> None:
        bench.during = lambda part: None
        arguments = ["--src", f"063={checkout}", "--state", str(bench.state)]
        # What runs here is not run there; another part is, and both are kept.
        inner.append(command.main([*arguments, "--part", part]))
        inner.append(command.main([*arguments, "--part", "stock"]))

    bench.during = during
    assert bench("--src", f"063={checkout}", "--part", "live") == 0
    assert inner == [1, 0]
    assert "063: live was not run: another process runs it" in bench.err
    assert bench.kept() == {"live", "stock"}


def test_another_process_at_another_release_is_no_failure_of_this_one(
    bench: Bench, checkout: Path, tmp_path: Path, repository: Path
) -> None:
    other = make_checkout(tmp_path / "omlx-050", "0.5.0")
    bench("--src", f"050={other}")
    (repository / "package" / "__init__.py").write_text("new = 1\n")
    both = ["--src", f"050={other}", "--src", f"063={checkout}"]
    assert bench(*both, "--only", "063") == 0
    assert "050: live dropped" in bench.err
    assert bench("--show", *both) == 1


def test_arguments_that_name_nothing_are_refused(
    bench: Bench, checkout: Path, tmp_path: Path
) -> None:
    source = ("--src", f"063={checkout}")
    for arguments in (
        (*source, "--only", "06"),
        (*source, *source),
        ("--src", f"06/3={checkout}"),
        (*source, "--omlx-python", str(tmp_path / "python")),
    ):
        with pytest.raises(SystemExit) as refused:
            bench(*arguments)
        assert refused.value.code == 2
    assert bench.ran == []


def test_the_readme_has_the_table_and_every_line_of_a_run() -> None:
    text = (runs.REPOSITORY / "README.md").read_text("utf-8")
    lines = text.partition(table.BEGIN)[2].partition(table.END)[0].strip().splitlines()
    assert "\n".join(lines[:2]) == table.HEAD
    assert lines[-1] == table.UNSEEN
    assert "not named" not in "".join(lines)
    assert table.releases_in(runs.REPOSITORY / "README.md")
