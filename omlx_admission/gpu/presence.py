"""What the processes that count into one ledger know of one another.

Each keeps a small file in a folder beside the ledger, under ``flock`` as long as it lives,
and writes into it what it does whenever that changes: how many engines have work, and for
how long any had so far. So each can tell at its own changes how long the others worked
meanwhile, to the moment, and nobody has to ask regularly. The clock, `time.monotonic`, is
the machine's own and the same in all of them.

A file whose lock is free is what a process left that has ended: its last state, from which
the others take how long it worked since they last asked. Without a last word in it, the
process ended suddenly.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from omlx_admission.gpu.exposure import ALONE, Cell, Others, Record
from omlx_admission.gpu.exposure_file import Line, Versions

logger = logging.getLogger(__name__)

_NEW = ".new"
_SIZE = 4096
_MARK = b"oxp1"
#: What changes, in front: mark, at, seen, spent, lockup; busy, long, serialised, ended. Then
#: what does not, as JSON.
_HEAD = struct.Struct("<4s4d4B")
#: A folder changed as lately as this may change again without a later date.
_RACY_NS = 100_000_000


class State(NamedTuple):
    """What one process says of itself."""

    name: str
    began: float
    """Seconds since 1970."""
    seen: float
    """The last change, in the same seconds."""
    at: float
    """The same, of the monotonic clock, as are the others below."""
    cell: Cell
    spent: float
    """Seconds until then in which any engine had work."""
    lockup: float
    ended: bool
    """It ended in good order."""
    versions: dict[str, str]

    def busy_until(self, now: float) -> float:
        """The same seconds until ``now``, nothing having changed."""
        return self.spent + (max(0.0, now - self.at) if self.cell.busy else 0.0)


def folder_of(ledger: Path) -> Path:
    """Where the processes that count into ``ledger`` keep their files."""
    return ledger.with_suffix(".live")


def states(ledger: Path, names: Iterable[str] | None = None) -> Iterator[tuple[State, bool]]:
    """Each process that counts into ``ledger``, or those of ``names``; whether it lives."""
    folder = folder_of(ledger)
    for name in _names(folder) if names is None else names:
        try:
            fd = os.open(folder / name, os.O_RDONLY)
        except OSError:
            continue  # it has just ended
        try:
            state = _read(name, os.read(fd, _SIZE))
            if state is not None:
                yield state, not _free(fd)
        finally:
            os.close(fd)


def line_of(state: State) -> Line:
    """The line of the ledger for a process that ended suddenly."""
    versions = Versions(*(state.versions.get(key, "") for key in Versions._fields))
    return Line(versions, Record(ended={state.cell: 1}), state.seen, state.seen)


def _names(folder: str | Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.endswith(_NEW)]
    except OSError:
        return []


def forget(ledger: Path, name: str) -> None:
    """Take away what a process that has ended left."""
    try:
        (folder_of(ledger) / name).unlink(missing_ok=True)
    except OSError:
        logger.debug("%s cannot be taken away", name, exc_info=True)


def _free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(name: str, raw: bytes) -> State | None:
    try:
        mark, at, seen, spent, lockup, *cell, ended = _HEAD.unpack_from(raw)
        fixed = json.loads(raw[_HEAD.size :])
        busy, long, serialised = cell
        return (
            State(
                name=name,
                began=float(fixed["began"]),
                seen=seen,
                at=at,
                cell=Cell(min(busy, 2), min(long, 2), bool(serialised)),
                spent=spent,
                lockup=lockup,
                ended=bool(ended),
                versions={str(key): str(value) for key, value in fixed["versions"].items()},
            )
            if mark == _MARK
            else None
        )
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        return None  # of another release, or made this very moment


class Presence:
    """This process's file, and its view of the others. One caller at a time.

    A disk that refuses leaves it alone: nothing is said, and nobody is seen.
    """

    def __init__(self, ledger: Path, versions: dict[str, str], began: float) -> None:
        self.ledger = ledger
        self._folder = str(folder_of(ledger))
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._fixed: dict[str, Any] = {"began": began, "versions": versions}
        self._fd = -1
        self._at = 0.0
        self._cell = Cell(0, 0, False)
        self._spent = 0.0
        self._date = 0
        self._there: list[str] = []
        self._known: dict[str, float] = {}  # process -> its busy seconds when last asked

    def begin(self, now: float, wall: float) -> None:
        """Make the file. It is locked before any other process can see it."""
        folder = folder_of(self.ledger)
        made = folder / (self.name + _NEW)
        self._at = now
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.pwrite(self._fd, json.dumps(self._fixed).encode(), _HEAD.size)
            self.say(self._cell, now, wall)
            os.rename(made, folder / self.name)
            self.others(now)  # how long they worked before is no business of this one
        except OSError:
            self._take_away()

    def say(
        self,
        cell: Cell,
        now: float,
        wall: float,
        lockup: float = -math.inf,
        *,
        ended: bool = False,
    ) -> None:
        """What this process does from ``now`` on."""
        if self._cell.busy:
            self._spent += max(0.0, now - self._at)
        self._cell, self._at = cell, now
        if self._fd < 0:
            return
        # Not by a mapping of the file: on a full disk that would end the process.
        head = _HEAD.pack(_MARK, now, wall, self._spent, lockup, *cell, ended)
        try:
            os.pwrite(self._fd, head, 0)
        except OSError:
            self._take_away()

    def others(self, now: float) -> Others:
        """What the others do, and for how long they worked since this was last asked.

        Of more than one other, the seconds of the busiest count: whether those of two
        others lay side by side or one after another is not known.
        """
        if self._fd < 0:
            return ALONE
        found = ALONE
        for state, lives in states(self.ledger, self._others_there()):
            busy_until = state.busy_until(now) if lives else state.spent
            # One that was not there then began since.
            worked = max(0.0, busy_until - self._known.get(state.name, 0.0))
            self._known[state.name] = busy_until
            if not lives and not worked:
                continue
            first = (state.began, state.name) < (self._fixed["began"], self.name)
            found = Others(
                busy_s=max(found.busy_s, worked),
                busy=found.busy or (lives and state.cell.busy > 0),
                long=found.long + state.cell.long,
                counted=found.counted or first,
                lockup=max(found.lockup, state.lockup),
            )
        return found

    def _others_there(self) -> list[str]:
        """The other processes' files; the folder is read only where it has changed."""
        try:
            date = os.stat(self._folder).st_mtime_ns
        except OSError:
            return []
        if date != self._date or time.time_ns() - date < _RACY_NS:
            self._date = date
            self._there = [name for name in _names(self._folder) if name != self.name]
        return self._there

    def end(self, now: float, wall: float) -> None:
        """This process ends in good order; what it did is left for those that go on."""
        if self._fd < 0:
            return
        self.say(Cell(0, 0, self._cell.serialised), now, wall, ended=True)
        if any(lives for _, lives in states(self.ledger, self._others_there())):
            self._close()
        else:
            self._take_away()

    def _take_away(self) -> None:
        for name in (self.name, self.name + _NEW):
            forget(self.ledger, name)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
