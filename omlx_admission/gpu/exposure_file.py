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
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from omlx_admission.gpu.exposure_line import (
    Line,
    NewerSchemaError,
    Versions,
    decode,
    encode,
)
from omlx_admission.gpu.policy.exposure import OTHER, Record

logger = logging.getLogger(__name__)

FILE_NAME = "omlx_admission_exposure.jsonl"
MAX_BYTES = 256 * 1024
"""The file's limit; a minute of two busy engines takes about 400 bytes."""

_MAX_LINE = 1 << 20


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
