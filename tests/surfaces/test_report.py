"""``omlx-admission report`` on the figures of oMLX issue 4224, and on bad files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.gpu.exposure import Cell, Record
from omlx_admission.gpu.exposure_file import FILE_NAME, ExposureFile, Line, Versions
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
from omlx_admission.gpu.faults import GpuFault
from omlx_admission.surfaces import cli

HOUR = 3600.0
BOTH_LONG, BOTH, ONE_LONG, ONE = (
    Cell(2, 2, False),
    Cell(2, 0, False),
    Cell(1, 1, False),
    Cell(1, 0, False),
)
V = Versions("0.6.3rc2", "0.32.2", "macOS 26.1 arm64", "0.1.0")


def reported() -> Record:
    """The hours and hangs of oMLX issue 4224: 6.9 h and 9 with two engines busy, of them 5.2 h
    and 6 with long requests in both; 35.9 h and none with one, of them 23.4 h long."""
    return Record(
        seconds={
            BOTH_LONG: 5.2 * HOUR,
            BOTH: 1.7 * HOUR,
            ONE_LONG: 23.4 * HOUR,
            ONE: 12.5 * HOUR,
            Cell(0, 0, False): 100 * HOUR,
        },
        lockups={BOTH_LONG: 6, BOTH: 3},
        faults={
            (GpuFault.HANG, "GLM", BOTH_LONG): 5,
            (GpuFault.HANG, "DeepSeek", BOTH): 2,
            (GpuFault.INNOCENT_VICTIM, "Qwen", BOTH_LONG): 4,
        },
        engines={
            ("GLM", 1, False): 6.9 * HOUR,
            ("GLM", 2, False): 5.5 * HOUR,
            ("DeepSeek", 1, False): 4.5 * HOUR,
        },
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / FILE_NAME
    ExposureFile(path).append(Line(V, reported(), start=1e9, end=1e9 + 1, starts=3, stops=2))
    return path


def page(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(page(capsys, "--json", *arguments))


def test_the_figures_of_the_report(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--file", ledger)["evidence"][0]
    assert found["two"]["hours"] == pytest.approx(6.9)
    assert found["two"]["lockups"] == 9
    assert found["one"]["hours"] + found["two"]["hours"] == pytest.approx(42.8)
    assert found["chance_in_two_engine_share"] == pytest.approx(7.5e-8, rel=0.03)
    needed = found["needed"]
    assert needed["p_0.05"]["still"] == pytest.approx(2.7, abs=0.05)
    assert needed["p_0.01"]["still"] == pytest.approx(4.6, abs=0.05)
    five = needed["five_fold"]
    assert five["low"] == pytest.approx(11.5, abs=0.05)
    assert five["low"] < five["still"] < five["high"]
    assert round(five["still"]) == round(five["high"]) == 14
    assert found["chance_if_turns_changed_nothing"] is None
    # 9 in 6.9 h: 1.30 an hour, exact interval 4.115/6.9 to 17.085/6.9.
    assert found["two"]["per_hour"] == pytest.approx(1.304, abs=1e-3)
    assert found["two"]["low"] == pytest.approx(4.115 / 6.9, abs=1e-3)
    assert found["two"]["high"] == pytest.approx(17.085 / 6.9, abs=1e-3)
    assert found["one"]["high"] == pytest.approx(3.689 / 35.9, abs=1e-4)


def test_a_victim_is_no_lockup_of_its_engine(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = {row["engine"] for row in data(capsys, "--file", ledger)["engines"]}
    assert engines == {"GLM", "DeepSeek"}


def test_a_lockup_without_time_has_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger"
    ExposureFile(path).append(Line(V, Record(lockups={BOTH: 1})))
    rows = [" ".join(line.split()) for line in page(capsys, "--file", path).splitlines()]
    assert "two or more none off 0.0 1 -" in rows
    assert "two or more, turns off: 1 lockups in 0.0 h" in rows


def test_the_page_shows_them(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--base-path", ledger.parent)
    for part in (
        "9 lockups in 6.9 h, 1.3 (0.6 to 2.5) per hour",
        "0 lockups in 35.9 h, 0 (0 to 0.1) per hour",
        "all of 9 lockups would fall into those 6.9 h of 42.8 h with p = 7.4e-8",
        "2.7 h",
        "4.6 h",
        "13.6 h",
        "11.5 to 14.1 h",
        "server runs: 3",
        "1 of them did not end in good order",
        "macOS 26.1 arm64",
        "InnocentVictim",
        "OMLX_SERIALIZE_ENGINE_GPU=1",
    ):
        assert part in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "two or more two or more off 5.2 6 1.15 (0.42 to 2.5)" in rows
    assert "two or more all off 6.9 9 1.3 (0.6 to 2.5)" in rows
    assert "one one engine off 23.4 0 0 (0 to 0.16)" in rows
    assert "none none off 100.0 0" in rows
    assert "GLM off 6.9 0 5.5 5" in rows
    assert "DeepSeek off 4.5 0 0.0 2" in rows
    assert "Hang GLM two or more off 5" in rows


def test_hours_already_served_are_taken_off(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = Record(seconds={Cell(2, 0, True): 3.0 * HOUR})
    ExposureFile(ledger).append(Line(V, turns))
    found = data(capsys, "--file", ledger)["evidence"][0]
    assert found["needed"]["p_0.05"]["still"] == 0.0
    assert found["needed"]["p_0.01"]["still"] == pytest.approx(1.6, abs=0.05)
    assert found["chance_if_turns_changed_nothing"] == pytest.approx((6.9 / 9.9) ** 9)
    text = page(capsys, "--file", ledger)
    assert "OMLX_SERIALIZE_ENGINE_GPU" not in text, "it is on"
    assert "0.0 h, of 2.7 h in all (shown)" in text
    assert "p = 0.039" in text


def test_a_lockup_with_turns_on_asks_for_more_hours(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = Cell(2, 0, True)
    ExposureFile(ledger).append(Line(V, Record(seconds={on: HOUR}, lockups={on: 1})))
    found = data(capsys, "--file", ledger)["evidence"][0]
    assert found["two_serialised"]["lockups"] == 1
    assert found["needed"]["p_0.05"]["hours"] == pytest.approx(4.49, abs=0.01)
    assert found["needed"]["p_0.05"]["still"] == pytest.approx(3.49, abs=0.01)
    assert "low" not in found["needed"]["five_fold"]
    assert "were known exactly" not in page(capsys, "--file", ledger)


def test_lockups_elsewhere_too_are_a_tail(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ExposureFile(ledger).append(Line(V, Record(seconds={ONE: 0.0}, lockups={ONE: 1})))
    chance = data(capsys, "--file", ledger)["evidence"][0]["chance_in_two_engine_share"]
    share = 6.9 / 42.8
    assert chance == pytest.approx(10 * share**9 * (1 - share) + share**10)
    assert "9 or more of 10 lockups" in page(capsys, "--file", ledger)


def test_without_a_lockup_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger"
    ExposureFile(path).append(Line(V, Record(seconds={BOTH: 60.0})))
    assert data(capsys, "--file", path)["evidence"][0]["needed"] is None
    text = page(capsys, "--file", path)
    assert "Nothing can be said about turns" in text
    assert "0 lockups in 0.017 h, 0 (0 to 2.2e+02) per hour" in text
    assert "0 lockups in 0.0 h\n" in text


def test_only_some_versions(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = V._replace(omlx="0.7.0")
    ExposureFile(ledger).append(Line(other, Record(seconds={BOTH: HOUR})))
    both = data(capsys, "--file", ledger)
    assert len(both["versions"]) == len(both["evidence"]) == 2
    assert data(capsys, "--file", ledger, "--only", "0.7")["evidence"][0]["two"] == {
        "hours": 1.0,
        "lockups": 0,
        "per_hour": 0.0,
        "low": 0.0,
        "high": pytest.approx(3.689, abs=1e-3),
    }
    assert (
        data(capsys, "--file", ledger, "--only", "MACOS")["evidence"][0]["two"]["lockups"] == 9
    )
    assert cli.main(["report", "--file", str(ledger), "--only", "windows"]) == 2
    assert "nothing ran with 'windows' in a version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no exposure ledger at"),
        (b"", "the ledger is empty"),
        (b"{nonsense\n\0\0\0\n", "the ledger holds no whole line"),
        (b'{"v":1,"from":', "cut off at the end"),
    ],
)
def test_a_file_without_a_whole_line_is_one_clear_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    message: str,
) -> None:
    path = tmp_path / "ledger"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["report", "--file", str(path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert error.count("\n") == 1
    assert str(path) in error


def test_a_corrupt_and_cut_file_reports_what_is_whole(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ledger.read_bytes()
    ledger.write_bytes(b"\0\0\0\n" + whole + whole[:-30])
    text = page(capsys, "--file", ledger)
    assert "note: line 1 is left out: not a JSON object" in text
    assert "note: line 3 is left out: not a JSON object; cut off at the end" in text
    assert "9 lockups in 6.9 h" in text
    assert len(data(capsys, "--file", ledger)["problems"]) == 2


def test_dropped_lines_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger"
    ExposureFile(path).append(Line(V, Record(seconds={ONE: 1.0}), dropped=4))
    assert "4 unreadable lines were dropped" in page(capsys, "--file", path)


OTHER_VERSIONS = Versions("0.7.1", "0.33.0", "macOS 27.0 arm64", "0.1.0")
TURNS = Cell(2, 0, True)


def test_g5_turns_that_came_with_an_upgrade_prove_nothing(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """6.9 h off under one oMLX, MLX and macOS, 5 h on under the next ones."""
    ExposureFile(ledger).append(Line(OTHER_VERSIONS, Record(seconds={TURNS: 5 * HOUR})))
    before, after = data(capsys, "--file", ledger)["evidence"]
    assert before["chance_if_turns_changed_nothing"] is None
    assert before["needed"]["p_0.05"]["still"] == pytest.approx(2.7, abs=0.05)
    assert after["needed"] is None and after["chance_if_turns_changed_nothing"] is None
    assert (after["omlx"], after["mlx"], after["os"]) == OTHER_VERSIONS[:3]
    text = page(capsys, "--file", ledger)
    assert "compared within equal versions only" in text
    assert "oMLX 0.7.1, MLX 0.33.0, macOS 27.0 arm64:" in text
    assert "(shown)" not in text and "changed nothing" not in text
    # Of the plugin's own version nothing depends.
    ours = V._replace(plugin="0.2.0")
    ExposureFile(ledger).append(Line(ours, Record(seconds={TURNS: 3 * HOUR})))
    assert len(data(capsys, "--file", ledger)["evidence"]) == 2
    assert "p = 0.039" in page(capsys, "--file", ledger)


def test_g5_what_was_summed_over_versions_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger"
    several = V._replace(mlx="several")
    both = Record(seconds={BOTH: HOUR, TURNS: 9 * HOUR}, lockups={BOTH: 9})
    ExposureFile(path).append(Line(several, both))
    text = page(capsys, "--file", path)
    assert "sums of several versions" in text and "(shown)" not in text


@pytest.mark.parametrize("moved", ["variable", "app"])
def test_g5_the_ledger_is_looked_for_where_the_server_writes_it(
    ledger: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    moved: str,
) -> None:
    home = tmp_path / "home"
    note = home / "Library" / "Application Support" / "oMLX" / "base-path"
    note.parent.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("OMLX_BASE_PATH", raising=False)
    if moved == "variable":
        monkeypatch.setenv("OMLX_BASE_PATH", str(ledger.parent))
    else:
        note.write_text(f"{ledger.parent}\n")
    assert "9 lockups in 6.9 h" in page(capsys)
    monkeypatch.delenv("OMLX_BASE_PATH", raising=False)
    note.unlink(missing_ok=True)
    assert cli.main(["report"]) == 2
    error = capsys.readouterr().err
    assert str(home / ".omlx") in error and "give --base-path" in error


def test_g5_it_needs_no_scipy(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("scipy", "numpy"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from omlx_admission.surfaces import cli
sys.exit(cli.main(["report", "--file", {str(ledger)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "9 lockups in 6.9 h, 1.3 (0.6 to 2.5) per hour" in done.stdout


def test_g7_time_of_two_servers_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger"
    ExposureFile(path).append(Line(V, Record(seconds={BOTH: 2 * HOUR}, across=HOUR)))
    assert "1.0 h of those with two or more busy were engines of two servers" in page(
        capsys, "--file", path
    )


def test_g8_sudden_ends_are_told_by_what_was_busy(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Record(ended={BOTH_LONG: 1, BOTH: 1, Cell(0, 0, True): 1})
    ExposureFile(ledger).append(Line(V, ended, starts=4))
    running = ExposureRecorder(ledger, V)
    program = f"""
import os, signal
from pathlib import Path
from omlx_admission.gpu.exposure_file import Versions
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
r = ExposureRecorder(Path({str(ledger)!r}), Versions{tuple(V)!r}, serialised=True)
r.start()
r.busy("a")
os.kill(os.getpid(), signal.SIGKILL)
"""
    running.start()
    subprocess.run([sys.executable, "-c", program], check=False)
    found = data(capsys, "--file", ledger)
    assert found["running"] == 1
    assert found["ended"] == [
        {"busy": 2, "serialised": False, "count": 2},
        {"busy": 1, "serialised": True, "count": 1},
        {"busy": 0, "serialised": True, "count": 1},
    ]
    text = page(capsys, "--file", ledger)
    assert "2 ended suddenly with two or more busy, turns off" in text
    assert "running now: 1" in text
    # Of nine that began, two stopped, four ended suddenly and one runs.
    assert "2 of them did not end in good order" in text
    running.close()
