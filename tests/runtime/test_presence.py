"""Several processes on one ledger: told apart, their common time counted once, their ends."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.gpu import presence
from omlx_admission.gpu.exposure import Cell, Record, merged
from omlx_admission.gpu.exposure_file import Versions, read
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
from omlx_admission.gpu.faults import GpuFault

V = Versions("0.6.3rc2", "0.32.2", "macOS 26.1 arm64", "0.1.0")
HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def recorder(path: Path, clock: Clock, *, turns: bool = False) -> ExposureRecorder:
    made = ExposureRecorder(
        path, V, serialised=turns, clock=clock, wall=lambda: clock.now + 1e9
    )
    made.start()
    clock.now += 1.0  # the next one is younger
    return made


def total(path: Path) -> Record:
    return merged(line.record for line in read(path).lines)


@pytest.mark.parametrize("order", [lambda a, b: (a, b), lambda a, b: (b, a)])
def test_g7_two_servers_busy_for_one_hour_are_two_engines_for_one_hour(
    tmp_path: Path, clock: Clock, order: Any
) -> None:
    path = tmp_path / "ledger.jsonl"
    a, b = recorder(path, clock, turns=True), recorder(path, clock, turns=True)
    a.busy("glm", longest=40_000)
    b.busy("qwen")
    clock.now += HOUR / 2
    a.tick()
    clock.now += HOUR / 2
    for each in order(a, b):
        each.close()
    found = total(path)
    # Turns are taken within a process: between two there are none.
    assert found.hours(busy=2, serialised=False, long=1) == pytest.approx(1.0)
    assert found.hours(busy=2, serialised=True) == 0.0
    assert found.hours(busy=1, serialised=True) == pytest.approx(0.0)
    assert found.across == pytest.approx(HOUR)
    assert found.engines == {
        ("glm", 2, False): pytest.approx(HOUR),
        ("qwen", 2, False): pytest.approx(HOUR),
    }
    assert not list(presence.folder_of(path).iterdir())


@pytest.mark.parametrize("seed", range(20))
def test_g7_each_second_is_counted_once_whoever_works_in_it(
    tmp_path: Path, clock: Clock, seed: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "ledger.jsonl"
    both = {name: recorder(path, clock) for name in "ab"}
    for each in both.values():
        each.totals()
    start = {name: each.totals() for name, each in both.items()}
    expected: dict[int, float] = {0: 0.0, 1: 0.0, 2: 0.0}
    working = {"a": False, "b": False}
    for _ in range(60):
        passed = rng.randrange(1, 400) / 4
        clock.now += passed
        expected[sum(working.values())] += passed
        name = rng.choice("ab")
        if rng.random() < 0.2:
            both[name].totals()
            continue
        working[name] = not working[name]
        (both[name].busy if working[name] else both[name].idle)(name)
    found = merged(each.totals() for each in both.values())
    before = merged(start.values())
    for busy, seconds in expected.items():
        counted = sum(s for cell, s in found.seconds.items() if cell.busy == busy)
        counted -= sum(s for cell, s in before.seconds.items() if cell.busy == busy)
        assert counted == pytest.approx(seconds), (busy, expected)
    assert found.across == pytest.approx(expected[2])
    for each in both.values():
        each.close()


def test_g7_a_lockup_that_two_servers_report_is_one_of_two_engines(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "ledger.jsonl"
    a, b = recorder(path, clock), recorder(path, clock)
    a.busy("glm")
    b.busy("qwen")
    clock.now += 5.0
    assert a.fault("glm", GpuFault.HANG, began=clock.now - 4.0)
    clock.now += 0.5
    assert b.fault("qwen", GpuFault.HANG, began=clock.now - 4.0)
    for each in (a, b):
        each.close()
    assert total(path).lockups == {Cell(2, 0, False): 1}


def test_how_long_another_worked_before_is_not_common_time(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "ledger.jsonl"
    a = recorder(path, clock)
    a.busy("glm")
    clock.now += HOUR
    b = ExposureRecorder(path, V, clock=clock, wall=lambda: clock.now + 1e9)
    clock.now += 7.0  # between its making and its start
    b.start()
    a.idle("glm")
    b.busy("qwen")
    clock.now += 60.0
    for each in (b, a):
        each.close()
    assert total(path).seconds[Cell(1, 0, False)] == pytest.approx(HOUR + 8.0 - 1.0 + 60.0)
    assert total(path).across == pytest.approx(0.0)


KILLED = """
import os, signal
from pathlib import Path
from omlx_admission.gpu.exposure_file import Versions
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
r = ExposureRecorder(Path({path!r}), Versions("0.6.3rc2", "0.32.2", "macOS"), serialised={on})
r.start()
for name in {engines!r}:
    r.busy(name)
{end}
"""


def killed(path: Path, engines: str, *, on: bool = False) -> None:
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    program = KILLED.format(path=str(path), engines=engines, on=on, end=end)
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL


def test_g8_a_process_that_ended_suddenly_is_counted_by_what_was_busy(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "ledger.jsonl"
    killed(path, "ab")
    killed(path, "")  # it counts the one before
    killed(path, "c", on=True)
    in_order = KILLED.format(path=str(path), engines="ab", on=False, end="r.close()")
    assert subprocess.run([sys.executable, "-c", in_order]).returncode == 0
    expected = {Cell(2, 0, False): 1, Cell(0, 0, False): 1, Cell(1, 0, True): 1}
    assert total(path).ended == expected
    a = recorder(path, clock)
    a.tick()
    assert total(path).ended == expected, "each once"
    a.close()
    by_version = [line.versions.mlx for line in read(path).lines if line.record.ended]
    assert by_version == ["0.32.2"] * 3


def test_g8_a_process_that_ends_itself_for_a_reason_has_not_ended_suddenly(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "ledger.jsonl"
    end = "r.leave(); os._exit(70)"
    program = KILLED.format(path=str(path), engines="ab", on=False, end=end)
    assert subprocess.run([sys.executable, "-c", program]).returncode == 70
    recorder(path, clock).close()
    assert total(path).ended == {}
    lines = read(path).lines
    assert (sum(n.starts for n in lines), sum(n.stops for n in lines)) == (2, 1)


def test_a_living_process_is_not_taken_for_one_that_ended(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "ledger.jsonl"
    a = recorder(path, clock)
    b = recorder(path, clock)
    b.tick()
    assert total(path).ended == {}
    assert [lives for _, lives in presence.states(path)] == [True, True]
    for each in (a, b):
        each.close()


@pytest.mark.parametrize("content", [b"", b"{", b"oxp1" + b"\0" * 36 + b"[]", b"\xff" * 99])
def test_a_file_that_is_not_understood_is_nobody(
    tmp_path: Path, clock: Clock, content: bytes
) -> None:
    path = tmp_path / "ledger.jsonl"
    a = recorder(path, clock)
    (presence.folder_of(path) / "1-strange").write_bytes(content)
    a.busy("glm")
    clock.now += 5.0
    a.tick()
    a.close()
    assert total(path).seconds[Cell(1, 0, False)] == pytest.approx(5.0)


def test_a_disk_that_refuses_leaves_it_alone(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "ledger.jsonl"
    presence.folder_of(path).write_text("in the way")
    a = recorder(path, clock)
    a.busy("glm")
    clock.now += 5.0
    a.close()
    assert total(path).seconds[Cell(1, 0, False)] == pytest.approx(5.0)


def test_a_disk_that_fills_up_ends_nothing_but_the_file(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    a = recorder(path, clock)

    def full(*_: object) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(presence.os, "pwrite", full)
    a.busy("glm")
    clock.now += 5.0
    a.idle("glm")
    monkeypatch.undo()
    assert not list(presence.folder_of(path).iterdir()), "nothing that is not true any more"
    a.close()
    assert total(path).seconds[Cell(1, 0, False)] == pytest.approx(5.0)
