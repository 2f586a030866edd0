"""The exposure ledger on disk: one JSON object a line, appended, bounded, crash-proof.

`ExposureRecorder` is what hooks feed. It holds the accumulator of `policy.exposure`, adds
the clock, the lock and a daemon thread that appends what was counted about once a minute,
and at once when a fault is reported (the process may be about to end itself). `read` is
for the report.

Rules of the file:

- A line is whole or it is nothing: one ``write`` each; a line cut off by a crash is ended
  by the next append, so that it spoils no other; readers skip what they cannot read and
  say so.
- The file stays under a limit: beyond it, old lines of the same versions are summed into
  one, in a new file that replaces the old one atomically. Sums are never lost, only
  the times of day.
- Several processes may share a file: appending and compacting hold ``flock`` on it. Who
  finds it held keeps what it has and adds it to the next line.
- Lines of a newer schema are carried along untouched.

Nothing here raises into a hook or waits on the network; a disk that refuses is logged
once and tried again at the next flush, with nothing lost meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from omlx_admission.policy.exposure import OTHER, Cell, Exposure, Record
from omlx_admission.policy.gpu_faults import GpuFault

logger = logging.getLogger(__name__)

FILE_NAME = "omlx_admission_exposure.jsonl"
SCHEMA = 1
"""Raised with every change that an older reader would misread, a new fault class too."""
MAX_BYTES = 256 * 1024
"""The file's limit; a minute of two busy engines takes about 400 bytes."""
FLUSH_S = 60.0
IDLE_FLUSH_S = 900.0
"""An idle server writes this seldom: no disk wakes up to note that nothing happened."""

_MAX_LINE = 1 << 20
_SYNC_TRIES, _SYNC_PAUSE_S = 25, 0.02
_SERIALISED = {True: "on", False: "off"}


class LedgerError(Exception):
    """The ledger cannot be read at all; the text says why, for a person."""


class Versions(NamedTuple):
    """What ran while a line was counted. Empty: unknown."""

    omlx: str = ""
    mlx: str = ""
    os: str = ""
    plugin: str = ""


@dataclass
class Line:
    """One line of the ledger: what was counted from ``start`` to ``end``."""

    versions: Versions = field(default_factory=Versions)
    record: Record = field(default_factory=Record)
    start: float = 0.0
    """Seconds since 1970, as is ``end``."""
    end: float = 0.0
    starts: int = 0
    """Processes that began; those that did not ``stop`` were killed, crashed or still run.
    Metal often ends a process itself, and then no fault is reported by anybody."""
    stops: int = 0
    dropped: int = 0
    """Unreadable lines that a compaction left out."""

    def add(self, other: Line) -> None:
        """Add ``other``; versions that differ become ``several``."""
        self.versions = Versions(
            *(
                mine if mine == theirs else "several"
                for mine, theirs in zip(self.versions, other.versions, strict=True)
            )
        )
        self.record.add(other.record)
        self.start = min(self.start, other.start)
        self.end = max(self.end, other.end)
        self.starts += other.starts
        self.stops += other.stops
        self.dropped += other.dropped


def system_version() -> str:
    """The operating system as the ledger names it, for example ``macOS 26.1 arm64``."""
    mac = platform.mac_ver()[0] if sys.platform == "darwin" else ""
    name = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    return f"{name} {platform.machine()}".strip()


# --- one line ---------------------------------------------------------------------------


def _cell_key(cell: Cell) -> str:
    return f"{cell.busy}/{cell.long}/{_SERIALISED[cell.serialised]}"


def encode(line: Line) -> bytes:
    """``line`` as it stands in the file, newline included."""
    record = line.record
    data: dict[str, Any] = {
        "v": SCHEMA,
        "from": round(line.start, 1),
        "to": round(line.end, 1),
        **line.versions._asdict(),
    }
    for key in ("starts", "stops", "dropped"):
        if getattr(line, key):
            data[key] = getattr(line, key)
    data["seconds"] = {_cell_key(c): round(s, 3) for c, s in sorted(record.seconds.items())}
    if record.lockups:
        data["lockups"] = {_cell_key(c): n for c, n in sorted(record.lockups.items())}
    if record.faults:
        data["faults"] = [
            [fault.value, engine, _cell_key(cell), count]
            for (fault, engine, cell), count in record.faults.items()
        ]
    if record.engines:
        data["engines"] = [
            [engine, busy, _SERIALISED[serialised], round(seconds, 3)]
            for (engine, busy, serialised), seconds in record.engines.items()
        ]
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


class NewerSchemaError(ValueError):
    """The line was written by a newer omlx-admission: not ours to read, nor to drop."""


def decode(raw: bytes) -> Line:
    """The line that ``raw`` holds. ValueError says what is wrong with it."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    schema = data.get("v")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ValueError("no schema version")
    if schema > SCHEMA:
        raise NewerSchemaError(f"schema {schema}, written by a newer omlx-admission")
    try:
        return Line(
            versions=Versions(*(_text(data.get(key, "")) for key in Versions._fields)),
            record=Record(
                seconds={_cell(k): _seconds(s) for k, s in data["seconds"].items()},
                lockups={_cell(k): _count(n) for k, n in data.get("lockups", {}).items()},
                faults={
                    (GpuFault(fault), _text(engine), _cell(cell)): _count(count)
                    for fault, engine, cell, count in data.get("faults", [])
                },
                engines={
                    (_text(engine), _busy(busy), _on(on)): _seconds(seconds)
                    for engine, busy, on, seconds in data.get("engines", [])
                },
            ),
            start=_seconds(data["from"]),
            end=_seconds(data["to"]),
            starts=_count(data.get("starts", 0)),
            stops=_count(data.get("stops", 0)),
            dropped=_count(data.get("dropped", 0)),
        )
    except KeyError as error:
        raise ValueError(f"no {error}") from None
    except (AttributeError, TypeError):
        raise ValueError("a field has the wrong shape") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    number = float(value) if abs(value) < 1e15 else math.inf
    if not 0.0 <= number < math.inf:
        raise ValueError("a number out of range")
    return number


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    if not 0 <= value < 10**12:
        raise ValueError("a count out of range")
    return value


def _busy(value: object) -> int:
    if _count(value) not in (0, 1, 2):
        raise ValueError("a number of engines other than 0, 1 and 2")
    return _count(value)


def _on(value: object) -> bool:
    if value not in ("on", "off"):
        raise ValueError("a state other than on and off")
    return value == "on"


def _cell(key: str) -> Cell:
    busy, long, on = key.split("/") if key.count("/") == 2 else ("", "", "")
    if busy not in ("0", "1", "2") or long not in ("0", "1", "2"):
        raise ValueError("circumstances other than N/N/on or N/N/off")
    return Cell(int(busy), int(long), _on(on))


# --- reading ----------------------------------------------------------------------------


class Ledger(NamedTuple):
    """What `read` found: the whole lines, and a sentence for each kind of trouble."""

    lines: list[Line]
    problems: list[str]


def read(path: Path) -> Ledger:
    """Every whole line of the ledger at ``path``, oldest first.

    Lines that cannot be read are left out and named in ``problems``, and so is an empty
    file. LedgerError where there is no file, or it may not be read.
    """
    try:
        with open(path, "rb") as file:
            return _read(file)
    except FileNotFoundError:
        raise LedgerError(
            f"no exposure ledger at {path}; it is written once a server runs with "
            "omlx-admission switched on"
        ) from None
    except OSError as error:
        raise LedgerError(
            f"cannot read the exposure ledger {path}: {error.strerror or error}"
        ) from error


def _read(file: BinaryIO) -> Ledger:
    lines: list[Line] = []
    problems: list[str] = []
    bad = 0
    for number, raw, ended in _raw_lines(file):
        if not raw.strip():
            continue
        try:
            if len(raw) > _MAX_LINE:
                raise ValueError(f"longer than {_MAX_LINE} bytes")
            lines.append(decode(raw))
        except ValueError as error:
            bad += 1
            cut = "" if ended else "; cut off at the end, by a crash while it was written"
            if bad <= 5:
                problems.append(f"line {number} is left out: {error}{cut}")
    if bad > 5:
        problems.append(f"{bad - 5} more lines are left out")
    if not lines and not bad:
        problems.append("the ledger is empty: nothing was counted yet")
    elif not lines:
        problems.append("the ledger holds no whole line")
    return Ledger(lines, problems)


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Number, bytes (no more than a little over `_MAX_LINE`), and whether it is ended."""
    number = 0
    while raw := file.readline(_MAX_LINE + 2):
        number += 1
        ended = raw.endswith(b"\n")
        while not ended and len(raw) > _MAX_LINE and (rest := file.readline(_MAX_LINE)):
            ended = rest.endswith(b"\n")
        yield number, raw, ended


# --- writing ----------------------------------------------------------------------------


class ExposureFile:
    """Appends lines to one ledger and keeps it under ``max_bytes`` (at least 16 KiB).

    Called by one thread at a time; processes are kept apart by ``flock``.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.max_bytes = max(max_bytes, 16 * 1024)

    def append(self, line: Line, *, sync: bool = False, compact: bool = True) -> bool:
        """Append ``line``; ``sync`` waits until the disk has it. False: another process
        holds the file just now, nothing was written. OSError where the disk refuses; then
        too nothing was written."""
        try:
            with self._locked() as fd:
                size = os.fstat(fd).st_size
                if size > 4 * self.max_bytes:
                    # Compacting fails over and over: stop growing. The caller keeps the line.
                    self._compact(fd)
                    return self.append(line, sync=sync, compact=False)
                data = encode(line)
                # A line that a crash cut off must not swallow this one.
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    data = b"\n" + data
                if os.write(fd, data) != len(data):
                    os.ftruncate(fd, size)  # a full disk took a part: take it back
                    raise OSError(28, "the disk took only a part of the line")
                # The line is in. What fails from here on must not have it written again.
                try:
                    if sync:
                        os.fsync(fd)
                    if compact and size + len(data) > self.max_bytes:
                        self._compact(fd)
                except OSError as error:
                    logger.debug("GPU exposure ledger %s: %s", self.path, error)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[int]:
        for _ in range(8):
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A compaction may have replaced the file between the two calls above.
                try:
                    current = os.stat(self.path).st_ino == os.fstat(fd).st_ino
                except FileNotFoundError:
                    current = False
                if current:
                    yield fd
                    return
            finally:
                os.close(fd)
        raise BlockingIOError

    def _compact(self, fd: int) -> None:
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            lines: list[Line] = []
            newer: list[bytes] = []
            dropped = 0
            for _, raw, _ in _raw_lines(file):
                if not raw.strip():
                    continue
                try:
                    lines.append(decode(raw))
                except NewerSchemaError:
                    newer.append(raw.rstrip(b"\n") + b"\n")
                except ValueError:
                    dropped += 1
        # The newest of the lines that only a newer version can sum, in their own quarter.
        room = self.max_bytes // 4
        kept: list[bytes] = []
        for raw in reversed(newer):
            room -= len(raw)
            if room < 0:
                break
            kept.insert(0, raw)
        dropped += len(newer) - len(kept)
        if lines:
            lines[0].dropped += dropped
        data = b"".join(map(encode, _squeezed(lines, self.max_bytes // 2))) + b"".join(kept)
        temporary = self.path.with_name(self.path.name + ".tmp")
        out = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(out, "wb") as target:
                target.write(data)
                target.flush()
                os.fsync(out)
            os.replace(temporary, self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _squeezed(lines: list[Line], limit: int) -> list[Line]:
    """``lines`` summed up, oldest and least telling detail first, to ``limit`` bytes."""

    def fits(candidate: list[Line]) -> bool:
        return sum(len(encode(line)) for line in candidate) <= limit

    for keep in (64, 8, 0):  # the newest ones stay apart while they can
        candidate = _by_versions(lines, keep)
        if fits(candidate):
            return candidate
    for versions in (8, 1):  # the newest versions stay apart while they can
        older, candidate = candidate[:-versions], candidate[-versions:]
        if older:
            candidate = [_sum(older), *candidate]
        if fits(candidate):
            return candidate
    total = _sum(candidate)
    if not fits([total]):
        small = Record(seconds=total.record.seconds, lockups=total.record.lockups)
        for (fault, _, cell), count in total.record.faults.items():
            where = (fault, OTHER, cell)
            small.faults[where] = small.faults.get(where, 0) + count
        for (_, busy, serialised), seconds in total.record.engines.items():
            key = (OTHER, busy, serialised)
            small.engines[key] = small.engines.get(key, 0.0) + seconds
        total.record = small
    return [total]


def _by_versions(lines: list[Line], keep: int) -> list[Line]:
    old, new = (lines[:-keep], lines[-keep:]) if keep else (lines, [])
    groups: dict[Versions, list[Line]] = {}
    for line in old:
        # Taken out and put back, so that the versions seen last come last.
        group = groups.pop(line.versions, [])
        group.append(line)
        groups[line.versions] = group
    return [_sum(group) for group in groups.values()] + new


def _sum(lines: list[Line]) -> Line:
    first = lines[0]
    total = replace(first, record=Record())
    total.record.add(first.record)
    for line in lines[1:]:
        total.add(line)
    return total


# --- what hooks feed --------------------------------------------------------------------


class ExposureRecorder:
    """The accumulator of `policy.exposure` with a clock, a lock and a file.

    Every method may be called from any thread, costs microseconds but for `fault`,
    `flush` and `close` (one small write), and raises nothing.
    """

    def __init__(
        self,
        path: Path,
        versions: Versions,
        *,
        serialised: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._file = ExposureFile(path, max_bytes=max_bytes)
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()  # the accumulator; held for microseconds
        self._writing = threading.Lock()  # the file and what is not in it yet
        self._exposure = Exposure(clock(), serialised=serialised)
        self._totals = Record()
        self._unwritten = Line(versions, start=wall())
        self._refused = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def busy(self, engine: str, *, longest: int = 0) -> None:
        """``engine`` has work, its longest request ``longest`` tokens; see
        `policy.exposure.Exposure.busy`. Say it again as often as is handy."""
        with self._lock:
            self._exposure.busy(engine, self._clock(), longest=longest)

    def idle(self, engine: str) -> None:
        """``engine`` has no work, or is closed."""
        with self._lock:
            self._exposure.idle(engine, self._clock())

    def serialised(self, on: bool) -> None:
        """Engines take turns on the GPU, or no longer do."""
        with self._lock:
            self._exposure.serialised(on, self._clock())

    def fault(self, engine: str, fault: GpuFault) -> bool:
        """Count ``fault`` of ``engine`` and put it on disk. False: a repeat of a report
        already counted, nothing is written."""
        with self._lock:
            new = self._exposure.fault(engine, fault, self._clock())
        if new:
            self.flush(sync=True, compact=False)
        return new

    def totals(self) -> Record:
        """What was counted since this recorder was made, as a copy."""
        with self._writing:
            self._collect()
            copy = Record()
            copy.add(self._totals)
        return copy

    def start(self) -> None:
        """Note that a process began, and append what is counted from now on."""
        if self._thread is None:
            with self._writing:
                self._unwritten.starts += 1
            self.flush()
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._run, name="omlx-admission-exposure", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Note that the process ends in good order, and write the rest."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join(timeout=5.0)
            with self._writing:
                self._unwritten.stops += 1
        self.flush(sync=True)

    def flush(self, *, sync: bool = False, compact: bool = True) -> bool:
        """Append what is not in the file yet. False: it could not be, and is kept."""
        with self._writing:
            self._collect()
            return self._write(sync=sync, compact=compact)

    def tick(self) -> None:
        """What the thread does every `FLUSH_S`: append, unless nothing but idle time
        passed for less than `IDLE_FLUSH_S`."""
        with self._writing:
            self._collect()
            line = self._unwritten
            idle = not line.record.faults and all(c.busy == 0 for c in line.record.seconds)
            if not idle or math.fsum(line.record.seconds.values()) >= IDLE_FLUSH_S:
                self._write(sync=False, compact=True)

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self.tick()

    def _collect(self) -> None:
        with self._lock:
            record = self._exposure.take(self._clock())
        self._totals.add(record)
        self._unwritten.record.add(record)

    def _write(self, *, sync: bool, compact: bool) -> bool:
        line = self._unwritten
        line.end = max(line.start, self._wall())
        try:
            # Whoever asks for `sync` may end the process next, so it waits for another
            # process to let go of the file, though not for long.
            for _ in range(_SYNC_TRIES if sync else 1):
                if self._file.append(line, sync=sync, compact=compact):
                    break
                if sync:
                    time.sleep(_SYNC_PAUSE_S)
            else:
                return False
        except OSError as error:
            if not self._refused:
                logger.warning(
                    "GPU exposure ledger %s cannot be written (%s); counting goes on in "
                    "memory and the next flush tries again",
                    self._file.path,
                    error.strerror or error,
                )
            self._refused = True
            return False
        self._refused = False
        self._unwritten = Line(line.versions, start=line.end)
        return True
