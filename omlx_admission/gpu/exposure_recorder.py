"""What hooks feed: counts in memory, on disk about once a minute.

`ExposureRecorder` holds the accumulator of `gpu.exposure`, adds the clock, the lock and
a daemon thread that appends what was counted, at once when a fault is reported (the process
may be about to end itself).

Nothing here raises into a hook or waits on the network; a disk that refuses is logged
once and tried again at the next flush, with nothing lost meanwhile.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from omlx_admission.gpu.exposure import Exposure, Record
from omlx_admission.gpu.exposure_file import MAX_BYTES, ExposureFile, Line, Versions
from omlx_admission.gpu.faults import GpuFault
from omlx_admission.gpu.presence import Presence, forget, line_of, states

logger = logging.getLogger(__name__)

FLUSH_S = 60.0
IDLE_FLUSH_S = 900.0
"""An idle server writes this seldom: no disk wakes up to note that nothing happened."""

_SYNC_TRIES, _SYNC_PAUSE_S = 25, 0.02


class ExposureRecorder:
    """The accumulator of `gpu.exposure` with a clock, a lock and a file.

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
        self._presence = Presence(path, versions._asdict(), wall())
        self._exposure = Exposure(clock(), serialised=serialised, others=self._presence.others)
        self._said = self._exposure.cell
        self._totals = Record()
        self._unwritten = Line(versions, start=wall())
        self._refused = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def busy(self, engine: str, *, longest: int = 0) -> None:
        """``engine`` has work, its longest request ``longest`` tokens; see
        `Exposure.busy`. Say it again as often as is handy."""
        with self._lock:
            now = self._clock()
            self._exposure.busy(engine, now, longest=longest)
            self._say(now)

    def idle(self, engine: str) -> None:
        """``engine`` has no work, or is closed."""
        with self._lock:
            now = self._clock()
            self._exposure.idle(engine, now)
            self._say(now)

    def serialised(self, on: bool) -> None:
        """Engines take turns on the GPU, or no longer do."""
        with self._lock:
            now = self._clock()
            self._exposure.serialised(on, now)
            self._say(now)

    def fault(self, engine: str, fault: GpuFault, *, began: float = -math.inf) -> bool:
        """Count ``fault`` of ``engine``, in work that began then by the recorder's clock,
        and put it on disk. False: a repeat of a report already counted, nothing is written."""
        with self._lock:
            now = self._clock()
            new = self._exposure.fault(engine, fault, now, began=began)
            if new:
                self._say(now, anyway=True)
        if new:
            self.flush(sync=True, compact=False)
        return new

    def _say(self, now: float, *, anyway: bool = False) -> None:
        """Tell the other processes what this one does, where that has changed."""
        cell = self._exposure.cell
        if anyway or cell != self._said:
            self._said = cell
            self._presence.say(cell, now, self._wall(), self._exposure.last_lockup)

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
            with self._lock:
                self._presence.begin(self._clock(), self._wall())
                self._say(self._clock(), anyway=True)
            with self._writing:
                self._unwritten.starts += 1
            self._count_the_ended()
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
        self._count_the_ended()
        with self._lock:
            self._presence.end(self._clock(), self._wall())

    def leave(self) -> None:
        """The process ends itself now, for a reason that has been noted: not in good order,
        and not suddenly either."""
        self.flush(sync=True, compact=False)
        with self._lock:
            self._presence.end(self._clock(), self._wall())

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
        self._count_the_ended()

    def _count_the_ended(self) -> None:
        """Note the processes that ended suddenly, each by what it did at the end, and forget
        all that have ended."""
        for state, lives in states(self._file.path):
            if lives or state.name == self._presence.name:
                continue
            if state.ended:
                forget(self._file.path, state.name)
                continue
            try:
                if self._file.append(line_of(state)):
                    forget(self._file.path, state.name)
            except OSError as error:
                logger.debug("GPU exposure ledger %s: %s", self._file.path, error)

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
            # The caller that asks for `sync` may end the process next, so it waits for another
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
