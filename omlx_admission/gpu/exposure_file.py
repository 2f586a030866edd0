"""The exposure ledger on disk: one JSON object a line, appended, bounded, crash-proof.

`ExposureFile` writes what `gpu.exposure_recorder` has counted; `read` is for the report.

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
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from omlx_admission.gpu.exposure import Cell, Record
from omlx_admission.gpu.faults import GpuFault

logger = logging.getLogger(__name__)

FILE_NAME = "omlx_admission_exposure.jsonl"
MAX_BYTES = 256 * 1024
"""The file's limit; a minute of two busy engines takes about 400 bytes."""

SCHEMA = 2
"""Raised with every change that an older reader would misread, a new fault class too. A line
says the oldest one that holds all of it: only those that need 2 are left to newer readers."""

_SERIALISED = {True: "on", False: "off"}


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
    """Processes that began; those that did not ``stop`` ended without a word or still run."""
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


def _cell_key(cell: Cell) -> str:
    return f"{cell.busy}/{cell.long}/{_SERIALISED[cell.serialised]}"


def encode(line: Line) -> bytes:
    """``line`` as it stands in the file, newline included."""
    record = line.record
    data: dict[str, Any] = {
        "v": 2 if record.ended or record.across else 1,
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
    if record.ended:
        data["ended"] = {_cell_key(c): n for c, n in sorted(record.ended.items())}
    if record.across:
        data["across"] = round(record.across, 3)
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
                ended={_cell(k): _count(n) for k, n in data.get("ended", {}).items()},
                across=_seconds(data.get("across", 0)),
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


class LedgerError(Exception):
    """The ledger cannot be read at all; the text says why, for a person."""


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
        return _read(path.read_bytes())
    except FileNotFoundError:
        raise LedgerError(
            f"no exposure ledger at {path}: a server with omlx-admission writes one under "
            "its base path once it runs; if that is another folder, give --base-path"
        ) from None
    except OSError as error:
        raise LedgerError(
            f"cannot read the exposure ledger {path}: {error.strerror or error}"
        ) from error


def _read(data: bytes) -> Ledger:
    lines: list[Line] = []
    bad: list[str] = []
    rows = data.split(b"\n")
    for number, raw in enumerate(rows, 1):
        if not raw.strip():
            continue
        try:
            lines.append(decode(raw))
        except ValueError as error:
            cut = "; cut off at the end, by a crash while it was written"
            whole = number < len(rows)  # a newline follows
            bad.append(f"line {number} is left out: {error}{'' if whole else cut}")
    problems = bad[:5]
    if len(bad) > 5:
        problems.append(f"{len(bad) - 5} more lines are left out")
    if not lines:
        problems.append(
            "the ledger holds no whole line"
            if bad
            else "the ledger is empty: nothing was counted yet"
        )
    return Ledger(lines, problems)


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
        lines: list[Line] = []
        newer: list[bytes] = []
        dropped = 0
        for raw in os.pread(fd, os.fstat(fd).st_size, 0).split(b"\n"):
            try:
                if raw.strip():
                    lines.append(decode(raw))
            except NewerSchemaError:
                newer.append(raw + b"\n")
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
    while len(candidate) > 1 and not fits(candidate):  # then the newest versions
        half = (len(candidate) + 1) // 2
        candidate = [_sum(candidate[:half]), *candidate[half:]]
    if not fits(candidate):
        candidate[0].record = candidate[0].record.without_names()
    return candidate


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
