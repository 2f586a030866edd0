"""The release matrix: what it counts, what it takes for named, and where it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.matrix import __main__ as command
from benchmarks.matrix import known, runs

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_engine_pool.TestLease" name="test_kept"/>
<testcase classname="tests.test_engine_pool.TestLease" name="test_lost"><failure/></testcase>
<testcase classname="tests.test_server" name="test_up"><error/></testcase>
<testcase classname="tests.test_server" name="test_gpu"><skipped/></testcase>
</testsuite></testsuites>"""

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
    names = known.read(command.KNOWN)
    assert len(names) == 3
    assert all(k.holds_for("0.6.3rc2") for k in names)


def row(failures: list[str]) -> command.Row:
    counts = {"passed": 9, "failed": len(failures), "skipped": 0, "failures": failures}
    good = {"counts": {"passed": 9, "failed": 0, "skipped": 0, "failures": []}, "package": "x"}
    return {
        "doctor": {"version": "0.6.0", "states": {"queue": "ready"}, "reasons": {}},
        "stock": good,
        "hooks": good,
        "live": good,
        "patched": {"counts": counts, "package": "x"},
    }


def test_a_new_failure_that_is_not_named_is_an_error() -> None:
    line, problems = command.render("060", row([]), [])
    assert line == "| 0.6.0 | 1 of 1 | 9 passed | 9 passed | 9 passed | 9 passed; none new |"
    assert problems == []
    line, problems = command.render("060", row(["test_server::test_up"]), [])
    assert "1 new, 1 of them **not named**" in line
    assert problems == ["0.6.0: test_server::test_up fails with the package and is not named"]
    names = [known.Known("test_server::test_up", frozenset())]
    line, problems = command.render("060", row(["test_server::test_up"]), names)
    assert line.endswith("9 passed, 1 failed; 1 new, named |")
    assert problems == []


def test_a_run_that_counted_nothing_is_no_result() -> None:
    broken = row([])
    broken["live"] = {"error": "pytest ended with 4", "package": "x"}
    line, problems = command.render("060", broken, [])
    assert "failed to run" in line
    assert problems == ["0.6.0: live: pytest ended with 4"]


def test_the_table_is_written_between_its_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "060.json").write_text(json.dumps(row([])))
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{command.BEGIN}\nold\n{command.END}\nbelow\n")
    # The project's own list names tests that did not fail here.
    assert command.main(["--state", str(state), "--show", "--write", str(readme)]) == 1
    shown = capsys.readouterr()
    assert "is named and passes" in shown.err
    lines = readme.read_text().splitlines()
    assert lines[0] == "above" and lines[-1] == "below"
    assert lines[1] == command.BEGIN and lines[-2] == command.END
    assert "| 0.6.0 | 1 of 1 |" in lines[4]
    assert lines[-3] == command.UNSEEN
    readme.write_text("no markers")
    with pytest.raises(SystemExit, match="no line"):
        command.write(readme, "table")


def test_the_readme_has_the_table_and_every_line_of_a_run() -> None:
    text = (runs.REPOSITORY / "README.md").read_text("utf-8")
    table = text.partition(command.BEGIN)[2].partition(command.END)[0].strip().splitlines()
    assert "\n".join(table[:2]) == command.HEAD
    assert table[-1] == command.UNSEEN
    assert "not named" not in "".join(table)
