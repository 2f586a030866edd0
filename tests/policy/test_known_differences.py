"""What the runs of a release are said to have come to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import standin
from benchmarks import active, known_differences
from benchmarks.known_differences import NAMED, Counts, Release, named_for, read

KEPT, LOST, UP = "test_pool::TestLease::test_kept", "test_pool::TestLease::test_lost", "test_up"

TABLE = """
| test | releases | what | why |
|---|---|---|---|
| `test_pool::TestLease::test_lost` | 0.5.0, 0.6.3rc2 | x | y |
| `test_server::test_up` | all | x | y |
| `test_server::test_of_another_table` | two engines at the same time | y |
"""


def write(
    path: Path, failed: Sequence[str], passed: Sequence[str] = (), skipped: int = 0
) -> None:
    """A JUnit report as pytest writes it."""
    cases = []
    for test, inner in [(t, "<failure/>") for t in failed] + [(t, "") for t in passed]:
        *parts, name = test.split("::")
        cases.append(
            f'<testcase classname="{".".join(parts)}" name="{name}">{inner}</testcase>'
        )
    cases += ['<testcase classname="tests.test_x" name="t"><skipped/></testcase>'] * skipped
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def test_a_report_is_counted_and_its_failures_are_named(tmp_path: Path) -> None:
    report = tmp_path / "stock.xml"
    write(report, [f"tests.{LOST}"], [f"tests.{KEPT}"], skipped=1)
    # An error of a fixture counts as a failure; a suite may lie in a folder of its own.
    report.write_text(
        report.read_text().replace(
            "</testsuite>",
            '<testcase classname="tests.live.test_server" name="test_up[3]"><error/></testcase>'
            "</testsuite>",
            1,
        )
    )
    counts = read(report)
    assert counts.failed == [LOST, "test_server::test_up[3]"]
    assert str(counts) == "1 passed, 2 failed, 1 skipped"


def test_what_passes_at_the_second_try_counts_as_passed_and_is_said(tmp_path: Path) -> None:
    write(tmp_path / "live.xml", ["test_a::x", "test_a::y"], ["test_a::z"])
    write(tmp_path / "live.2.xml", ["test_a::y"], ["test_a::x"])
    counts = read(tmp_path / "live.xml")
    assert str(counts) == "2 passed (1 at the second try, alone), 1 failed"
    release = Release.of("0.6.0", tmp_path)
    assert release.second_tries() == ["0.6.0: second try in live: test_a::x"]
    assert release.problems(set()) == ["0.6.0: test_a::y fails"]


def test_a_second_try_that_lacks_a_failure_is_not_taken_for_its_pass(tmp_path: Path) -> None:
    """A run that was ended in the middle has a report of a part of its tests."""
    write(tmp_path / "live.xml", ["test_a::x", "test_a::y"])
    write(tmp_path / "live.2.xml", [], ["test_a::x"])
    assert read(tmp_path / "live.xml").failed == ["test_a::y"]


def test_a_test_is_named_for_its_releases_only() -> None:
    assert named_for("0.5.0", TABLE) == {LOST, "test_server::test_up"}
    assert named_for("0.6.0", TABLE) == {"test_server::test_up"}


def test_the_projects_own_list_is_read() -> None:
    text = NAMED.read_text("utf-8")
    named = named_for("0.6.3rc2", text)
    assert named
    assert all(test in text for test in named)


NINE = [f"test_x::test_{n}" for n in range(9)]


def release(patched: Counts | None, stock: Sequence[str] = ()) -> Release:
    return Release("0.6.0", Counts(NINE), Counts(NINE), Counts(NINE, [*stock]), patched)


def test_what_fails_on_stock_is_no_news() -> None:
    run = release(Counts(NINE, [LOST]), stock=[LOST])
    assert run.problems(set()) == []
    assert run.row("1 of 1", set()) == (
        "| 0.6.0 | 1 of 1 | 9 passed | 9 passed | 9 passed, 1 failed "
        "| 9 passed, 1 failed; none new |"
    )


def test_a_new_failure_has_to_be_named() -> None:
    run = release(Counts(NINE, [f"{LOST}[2]"]))
    assert "; 1 new, 1 of them **not named** |" in run.row("1 of 1", set())
    assert run.problems(set()) == [f"0.6.0: {LOST}[2] fails with the package and is not named"]
    assert run.row("1 of 1", {LOST}).endswith("; 1 new, named |")
    assert run.problems({LOST}) == []


def test_a_named_test_that_passes_is_stale_unless_it_needed_a_second_try() -> None:
    assert release(Counts(NINE)).problems({LOST}) == [f"0.6.0: {LOST} is named and passes"]
    assert release(Counts(NINE, second=[LOST])).problems({LOST}) == []


def test_without_stock_nothing_is_said_to_be_new() -> None:
    run = Release("0.6.0", patched=Counts(NINE, [LOST]))
    assert run.problems(set()) == []
    assert run.row("1 of 1", set()) == (
        "| 0.6.0 | 1 of 1 | not run | not run | not run | 9 passed, 1 failed |"
    )


def test_the_row_of_a_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in decodes without mlx-lm's batches, which parking is about.
    others = [f for f in known_differences.FEATURES if f.name != "park"]
    monkeypatch.setattr(known_differences, "FEATURES", others)
    version = known_differences.gate.find(standin.PATH).version
    folder = tmp_path / version
    folder.mkdir()
    arguments = [f"--reports={tmp_path}", str(standin.PATH)]
    write(folder / "hooks.xml", [], [KEPT])
    assert known_differences.main(arguments) == 0
    seen = capsys.readouterr()
    assert seen.out.startswith(known_differences.HEAD)
    assert " | 1 passed | not run | not run | not run |" in seen.out
    write(folder / "hooks.xml", [LOST], [KEPT])
    assert known_differences.main(arguments) == 1
    assert f"{version}: {LOST} fails" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "status"), [("1", 0), ("0", 4)])
def test_a_run_with_the_package_fails_where_nothing_is_applied(
    tmp_path: Path, switch: str, status: int
) -> None:
    (tmp_path / "test_pool.py").write_text("def test_pool():\n    import omlx.engine_pool\n")
    path = f"{Path(active.__file__).parent}:{NAMED.parents[2]}:{standin.PATH}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "active", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "OMLX_ADMISSION": switch, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert f"omlx-admission applied: {'resident' if status == 0 else 'nothing'}" in done.stdout
