"""The ledger file: crashes, corruption, bounds, several processes, and the recorder."""

import fcntl
import json
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_admission.gpu import exposure_file, exposure_recorder
from omlx_admission.gpu.exposure import OTHER, Cell, Record, merged
from omlx_admission.gpu.exposure_file import (
    ExposureFile,
    LedgerError,
    Line,
    Versions,
    decode,
    encode,
    read,
)
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
from omlx_admission.gpu.faults import GpuFault

IDLE, ONE, TWO = Cell(0, 0, False), Cell(1, 0, False), Cell(2, 1, False)
V = Versions("0.6.3rc2", "0.32.2", "macOS 26.1 arm64", "0.1.0")


def line(seconds: float = 60.0, *, versions: Versions = V, start: float = 0.0) -> Line:
    return Line(
        versions=versions,
        record=Record(
            seconds={TWO: seconds, IDLE: 1.0},
            lockups={TWO: 1},
            faults={(GpuFault.HANG, "glm", TWO): 1},
            engines={("glm", 2, False): seconds},
        ),
        start=start,
        end=start + seconds,
        starts=1,
    )


def total(path: Path) -> Record:
    return merged(each.record for each in read(path).lines)


# --- one line ---------------------------------------------------------------------------


def test_a_line_survives_the_file() -> None:
    whole = line()
    whole.stops, whole.dropped = 2, 3
    whole.record.faults[GpuFault.INTERACTIVITY, 'ä "b"\n', Cell(0, 0, True)] = 4
    raw = encode(whole)
    assert raw.endswith(b"\n") and raw.count(b"\n") == 1
    assert decode(raw) == whole
    assert json.loads(raw)["v"] == 1
    assert json.loads(raw)["omlx"] == "0.6.3rc2"
    # What an older release would lose when it sums lines up, it leaves as it is.
    whole.record.ended[TWO] = 2
    whole.record.across = 12.5
    raw = encode(whole)
    assert json.loads(raw)["v"] == 2
    assert decode(raw) == whole


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": None}, "no schema version"),
        ({"v": True}, "no schema version"),
        ({"v": 3}, "newer omlx-admission"),
        ({"seconds": {"2/1/on": -1}}, "out of range"),
        ({"seconds": {"2/1/on": 1e300}}, "out of range"),
        ({"seconds": {"2/1/on": "1"}}, "wrong shape"),
        ({"seconds": {"3/1/on": 1}}, "circumstances"),
        ({"seconds": {"2/1": 1}}, "circumstances"),
        ({"seconds": {"2/1/maybe": 1}}, "on and off"),
        ({"seconds": [1]}, "wrong shape"),
        ({"lockups": {"2/1/on": 1.5}}, "wrong shape"),
        ({"lockups": {"2/1/on": -1}}, "out of range"),
        ({"faults": [["Hang", "glm", "2/1/on"]]}, "unpack"),
        ({"faults": [["Sneeze", "glm", "2/1/on", 1]]}, "Sneeze"),
        ({"engines": [["glm", 7, "on", 1]]}, "engines"),
        ({"engines": [[1, 2, "on", 1]]}, "wrong shape"),
        ({"omlx": 5}, "wrong shape"),
        ({"starts": True}, "wrong shape"),
    ],
)
def test_a_line_that_is_not_right_says_why(change: dict[str, object], reason: str) -> None:
    data = json.loads(encode(line())) | change
    with pytest.raises(ValueError, match=reason):
        decode(json.dumps(data).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"7",
        b"\0" * 40,
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"v":1,"from":0,"to":0}',
        b'{"v":1,"from":0,"to":0,"seconds":{"2/1/on":NaN}}',
        b'{"v":1,"from":0,"to":0,"seconds":{"2/1/on":Infinity}}',
    ],
)
def test_garbage_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(raw)


# --- reading ----------------------------------------------------------------------------


def test_no_file_and_no_right_to_it(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no exposure ledger at .*missing"):
        read(tmp_path / "missing")
    with pytest.raises(LedgerError, match="cannot read the exposure ledger"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(content)
    assert read(path) == ([], ["the ledger is empty: nothing was counted yet"])


def test_a_corrupt_file_loses_no_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(
        encode(line(1.0))
        + b"\0" * 100
        + b"\n"
        + encode(line(2.0))
        + b"x" * (3 << 20)
        + b"\n"
        + encode(line(4.0))
        + b"\xff\xfe{}\n" * 9
        + encode(line(8.0))
    )
    ledger = read(path)
    assert [each.end for each in ledger.lines] == [1.0, 2.0, 4.0, 8.0]
    assert ledger.problems[0] == "line 2 is left out: not a JSON object"
    assert ledger.problems[1] == "line 4 is left out: not a JSON object"
    assert ledger.problems[-1] == "6 more lines are left out"
    assert len(ledger.problems) == 6


def test_nothing_but_garbage_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"not a ledger\n")
    assert read(path).lines == []
    assert read(path).problems[-1] == "the ledger holds no whole line"


@given(st.integers(0, 600))
@settings(max_examples=60)
def test_a_file_cut_anywhere_loses_only_the_cut_line(cut: int) -> None:
    whole = [encode(line(float(n))) for n in (1, 2, 3)]
    data = b"".join(whole)
    cut = min(cut, len(data))
    ends = [sum(map(len, whole[: n + 1])) for n in range(3)]
    expect = sum(end - 1 <= cut for end in ends)  # the newline itself may be missing
    ledger = exposure_file._read(data[:cut])
    assert [each.end for each in ledger.lines] == [1.0, 2.0, 3.0][:expect]
    on_a_boundary = cut in (0, *ends, *(end - 1 for end in ends))
    assert any("cut off at the end" in p for p in ledger.problems) is not on_a_boundary


# --- appending --------------------------------------------------------------------------


def test_append_makes_the_folder_and_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger"
    assert ExposureFile(path).append(line(), sync=True)
    assert ExposureFile(path).append(line())
    assert len(read(path).lines) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_cut_off_by_a_crash_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(encode(line(1.0)) + encode(line(2.0))[:-20])
    ExposureFile(path).append(line(4.0))
    ledger = read(path)
    assert [each.end for each in ledger.lines] == [1.0, 4.0]
    assert ledger.problems == ["line 2 is left out: not a JSON object"]


def test_a_disk_that_takes_a_part_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path)
    file.append(line(1.0))
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:30]))
    with pytest.raises(OSError, match="only a part"):
        file.append(line(2.0))
    assert path.read_bytes() == before


def test_who_finds_the_file_held_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path)
    file.append(line())
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not file.append(line())
    assert len(read(path).lines) == 1
    assert file.append(line())


def test_a_file_replaced_while_being_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path)
    file.append(line(1.0))
    lock = fcntl.flock
    swaps = []

    def swap_first(fd: int, how: int) -> None:
        if not swaps:
            swaps.append(True)
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            os.replace(other, path)  # what another process's compaction does
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", swap_first)
    assert file.append(line(2.0))
    assert [each.end for each in read(path).lines] == [1.0, 2.0]


# --- bounds -----------------------------------------------------------------------------


def test_the_file_is_bounded_and_its_sums_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path, max_bytes=32 * 1024)
    largest = 0
    for n in range(600):
        file.append(line(float(n % 7), start=100.0 * n))
        largest = max(largest, path.stat().st_size)
    assert largest <= 32 * 1024 + 1000
    ledger = read(path)
    assert ledger.problems == []
    assert len(ledger.lines) < 120
    assert total(path).seconds[TWO] == sum(n % 7 for n in range(600))
    assert total(path).seconds[IDLE] == 600.0
    assert total(path).faults == {(GpuFault.HANG, "glm", TWO): 600}
    assert sum(each.starts for each in ledger.lines) == 600
    assert ledger.lines[0].start == 0.0
    assert ledger.lines[-1].end == 100.0 * 599 + 599 % 7
    assert ledger.lines[0].versions == V
    assert not list(tmp_path.glob("*.tmp"))


def test_versions_stay_apart_until_they_cannot(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path, max_bytes=16 * 1024)
    for n in range(300):
        file.append(line(1.0, versions=V._replace(omlx=f"0.6.{n}")))
        assert path.stat().st_size <= 16 * 1024 + 1000
    ledger = read(path)
    assert total(path).seconds[TWO] == 300.0
    assert ledger.lines[-1].versions.omlx == "0.6.299"
    assert ledger.lines[0].versions == V._replace(omlx="several")


def test_versions_seen_last_are_given_up_last() -> None:
    other = V._replace(mlx="0.33")
    summed = exposure_file._by_versions([line(1.0), line(2.0, versions=other), line(4.0)], 0)
    assert [(each.versions, each.record.seconds[TWO]) for each in summed] == [
        (other, 2.0),
        (V, 5.0),
    ]


def test_engine_names_give_way_last_and_sums_stay(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path, max_bytes=16 * 1024)
    for n in range(200):
        crowd = Record(
            seconds={ONE: 32.0},
            engines={(f"{n} {k} " + "x" * 90, 1, False): 1.0 for k in range(32)},
            faults={(f, f"{n} {k} " + "x" * 90, ONE): 1 for k in range(16) for f in GpuFault},
        )
        file.append(Line(V, crowd))
    assert path.stat().st_size <= 16 * 1024 + 30_000  # the last line itself is large
    file.append(Line(V, Record()))
    assert path.stat().st_size <= 16 * 1024
    assert math.isclose(sum(total(path).engines.values()), 200 * 32.0)
    assert sum(total(path).faults.values()) == 200 * 16 * len(GpuFault)
    assert OTHER in total(path).names()


def test_compaction_keeps_newer_lines_and_counts_what_it_drops(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    newer = b'{"v":3,"strange":[1,2]}\n'
    path.write_bytes(newer + b"garbage\n" * 3 + b"\0" * 500)
    file = ExposureFile(path, max_bytes=16 * 1024)
    for _ in range(200):
        file.append(line())
    data = path.read_bytes()
    assert newer in data and b"garbage" not in data
    ledger = read(path)
    assert sum(each.dropped for each in ledger.lines) == 4
    (problem,) = ledger.problems
    assert problem.endswith("is left out: schema 3, written by a newer omlx-admission")


@pytest.mark.slow
def test_a_failing_compaction_writes_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    file = ExposureFile(path, max_bytes=16 * 1024)

    def refuse(*_: object) -> None:
        raise OSError(30, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        count = 0
        while path.exists() is False or path.stat().st_size <= 4 * file.max_bytes:
            assert file.append(line(1.0))
            count += 1
        # Growing ends there: the line stays with the caller.
        with pytest.raises(OSError, match="read-only"):
            file.append(line(1.0))
        assert not list(tmp_path.glob("*.tmp"))
    assert len(read(path).lines) == count
    assert file.append(line(1.0))
    assert total(path).seconds[TWO] == count + 1.0
    assert path.stat().st_size <= file.max_bytes


def test_a_failing_sync_writes_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    assert ExposureFile(tmp_path / "ledger").append(line(), sync=True)
    assert len(read(tmp_path / "ledger").lines) == 1


def test_processes_share_a_file_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = f"""
import sys
from pathlib import Path
from omlx_admission.gpu.exposure import Cell, Record
from omlx_admission.gpu.exposure_file import ExposureFile, Line
file = ExposureFile(Path({str(path)!r}), max_bytes=16 * 1024)
pending = Line(record=Record())
for n in range(400):
    pending.add(Line(record=Record(seconds={{Cell(1, 0, False): 1.0}})))
    if file.append(pending):
        pending = Line(record=Record())
while not file.append(pending):
    pass
"""
    workers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert read(path).problems == []
    assert total(path).seconds == {ONE: 1200.0}


# --- the recorder -----------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def recorder(path: Path, clock: Clock) -> ExposureRecorder:
    return ExposureRecorder(path, V, clock=clock, wall=lambda: clock.now + 1e9)


def test_what_is_fed_stands_in_the_file(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "ledger"
    r = recorder(path, clock)
    r.busy("glm", longest=40_000)
    clock.now += 10
    r.busy("qwen")
    clock.now += 5
    r.serialised(True)
    clock.now += 2
    r.idle("qwen")
    assert r.flush()
    assert total(path).seconds == {
        Cell(1, 1, False): 10.0,
        Cell(2, 1, False): 5.0,
        Cell(2, 1, True): 2.0,
    }
    (only,) = read(path).lines
    assert only.versions == V
    assert (only.start, only.end) == (1e9 + 1000, 1e9 + 1017)
    clock.now += 1
    assert r.flush()
    assert read(path).lines[1].start == 1e9 + 1017
    assert r.totals().seconds[Cell(1, 1, True)] == 1.0
    assert r.totals().seconds[Cell(1, 1, False)] == 10.0


def test_a_fault_is_on_disk_before_the_call_returns(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "ledger"
    r = recorder(path, clock)
    r.busy("glm")
    clock.now += 3
    assert r.fault("glm", GpuFault.HANG)
    assert total(path).lockups == {ONE: 1}
    assert total(path).seconds == {ONE: 3.0}
    size = path.stat().st_size
    assert not r.fault("glm", GpuFault.HANG)
    assert path.stat().st_size == size


def test_idle_time_alone_is_written_seldom(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "ledger"
    r = recorder(path, clock)
    clock.now += exposure_recorder.IDLE_FLUSH_S - 1
    r.tick()
    assert not path.exists()
    clock.now += 1
    r.tick()
    assert total(path).seconds == {IDLE: 900.0}
    r.busy("a")
    clock.now += 1
    r.tick()
    assert total(path).seconds == {IDLE: 900.0, ONE: 1.0}


def test_what_cannot_be_written_is_kept(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger"
    path.mkdir()
    r = recorder(path, clock)
    r.busy("a")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 1
            assert not r.flush()
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    path.rmdir()
    clock.now += 1
    assert r.flush()
    assert total(path).seconds == {ONE: 4.0}


def test_a_file_held_for_a_moment_does_not_lose_a_fault(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    r = recorder(path, clock)
    r.flush()
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def let_go(_: float) -> None:
            fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(exposure_recorder.time, "sleep", let_go)
        assert r.fault("a", GpuFault.TIMEOUT)
    assert total(path).lockups == {ONE: 1}


def test_begin_and_end_are_noted_and_the_thread_ends(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "ledger"
    for _ in range(2):
        r = recorder(path, clock)
        r.start()
        r.start()
        names = [t.name for t in threading.enumerate()]
        assert names.count("omlx-admission-exposure") == 1
        r.close()
        r.close()
    r.start()  # and once more
    assert r._thread is not None and not r._stop.is_set()
    r.close()
    lines = read(path).lines
    assert (sum(each.starts for each in lines), sum(each.stops for each in lines)) == (3, 3)
    assert "omlx-admission-exposure" not in [t.name for t in threading.enumerate()]


def test_the_thread_writes_by_itself(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposure_recorder, "FLUSH_S", 0.001)
    ticked = threading.Event()
    tick = ExposureRecorder.tick

    def watched(self: ExposureRecorder) -> None:
        tick(self)
        ticked.set()

    monkeypatch.setattr(ExposureRecorder, "tick", watched)
    r = recorder(tmp_path / "ledger", clock)
    r.busy("a")
    r.start()
    clock.now += 7
    ticked.clear()
    assert ticked.wait(30)
    assert ticked.clear() is None and ticked.wait(30)
    assert total(tmp_path / "ledger").seconds == {ONE: 7.0}
    r.close()


def test_a_killed_process_leaves_whole_lines_and_no_stop(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = f"""
import os, signal
from pathlib import Path
from omlx_admission.gpu.faults import GpuFault
from omlx_admission.gpu.exposure_file import Versions
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
r = ExposureRecorder(Path({str(path)!r}), Versions("0.6.3rc2"))
r.start()
r.busy("glm")
r.fault("glm", GpuFault.SUBMISSIONS_IGNORED)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    lines = read(path).lines
    assert read(path).problems == []
    assert sum(each.starts for each in lines) == 1
    assert sum(each.stops for each in lines) == 0
    assert total(path).faults == {(GpuFault.SUBMISSIONS_IGNORED, "glm", ONE): 1}


def test_many_threads_feed_one_recorder(tmp_path: Path) -> None:
    r = ExposureRecorder(tmp_path / "ledger", V)

    def work(name: str) -> None:
        for _ in range(300):
            r.busy(name)
            r.idle(name)
            r.flush()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    r.close()
    written, counted = total(tmp_path / "ledger"), r.totals()
    assert sum(written.seconds.values()) == pytest.approx(
        sum(counted.seconds.values()), abs=1.0
    )
    assert written.names() == set("abcd")
