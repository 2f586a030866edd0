"""How long how many engines were busy, and what the GPU did meanwhile.

`Exposure` turns events into a `Record`: seconds by how many engines were
busy, by how many of them held a request of 32K tokens or more, and by whether engines
took turns on the GPU; faults by class, engine and the same circumstances. Records add
up, so a file of them is a ledger.

Nothing here reads a clock: every ``now`` is a number of seconds on one clock that does
not go backwards, such as `time.monotonic`. Nothing here locks: one caller at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from omlx_admission.gpu.faults import GpuFault

LONG_TOKENS = 32_768
"""A request of this many tokens, prompt and answer together, counts as long, as in oMLX
issue 4224, which "the report" is below."""

EVENT_WINDOW_S = 10.0
"""One lockup is reported by several engines and again while they clean up. Reports less
than this many seconds after the last one belong to the same lockup. A GPU that locks up
again needs longer: the driver gives a buffer about 5 s before it resets the GPU."""

MAX_ENGINES = 32
"""Engine names kept apart in one record; further ones are summed under `OTHER`."""

OTHER = "(other)"
_NAME_CHARS = 100

Number = TypeVar("Number", int, float)


class Cell(NamedTuple):
    """The circumstances under which seconds and faults are counted."""

    busy: int
    """Engines with work, whether on the GPU or waiting for it: 0, 1, or 2 for more."""
    long: int
    """How many of those hold a request of `LONG_TOKENS` or more: 0, 1, or 2 for more."""
    serialised: bool
    """Whether engines took turns on the GPU."""


@dataclass
class Record:
    """What was counted over some stretch of time. Records are added with `add`."""

    seconds: dict[Cell, float] = field(default_factory=dict)
    lockups: dict[Cell, int] = field(default_factory=dict)
    """Lockups, each counted once however many engines reported it."""
    faults: dict[tuple[GpuFault, str, Cell], int] = field(default_factory=dict)
    """Reports by class and engine: one lockup may show as a hang and several victims."""
    engines: dict[tuple[str, int, bool], float] = field(default_factory=dict)
    """Busy seconds by engine, by how many engines were busy (1 or 2), by serialised."""

    def add(self, other: Record) -> None:
        """Add ``other`` to this record, keeping at most `MAX_ENGINES` engine names."""
        for cell, seconds in other.seconds.items():
            self.seconds[cell] = self.seconds.get(cell, 0.0) + seconds
        for cell, count in other.lockups.items():
            self.lockups[cell] = self.lockups.get(cell, 0) + count
        names = self.names()
        for (engine, busy, serialised), seconds in other.engines.items():
            key = (_bounded(engine, names), busy, serialised)
            self.engines[key] = self.engines.get(key, 0.0) + seconds
        for (fault, engine, cell), count in other.faults.items():
            where = (fault, _bounded(engine, names), cell)
            self.faults[where] = self.faults.get(where, 0) + count

    def without_names(self) -> Record:
        """The same counts, of engines that are all called `OTHER`."""
        total = Record(dict(self.seconds), dict(self.lockups))
        for (_, busy, serialised), seconds in self.engines.items():
            key = (OTHER, busy, serialised)
            total.engines[key] = total.engines.get(key, 0.0) + seconds
        for (fault, _, cell), count in self.faults.items():
            where = (fault, OTHER, cell)
            total.faults[where] = total.faults.get(where, 0) + count
        return total

    def names(self) -> set[str]:
        """The engine names in this record."""
        return {key[0] for key in self.engines} | {key[1] for key in self.faults}

    def hours(self, *, busy: int, serialised: bool, long: int | None = None) -> float:
        """Hours with ``busy`` engines (2: two or more); ``long`` narrows, None sums up."""
        return math.fsum(_where(self.seconds, busy, serialised, long)) / 3600.0

    def count(self, *, busy: int, serialised: bool, long: int | None = None) -> int:
        """Lockups under the same circumstances as `hours`."""
        return sum(_where(self.lockups, busy, serialised, long))


def _where(
    counts: Mapping[Cell, Number], busy: int, serialised: bool, long: int | None
) -> Iterator[Number]:
    for cell, count in counts.items():
        if cell.busy == busy and cell.serialised == serialised and long in (None, cell.long):
            yield count


def merged(records: Iterable[Record]) -> Record:
    """The sum of ``records``, as a new record."""
    total = Record()
    for record in records:
        total.add(record)
    return total


def _bounded(engine: str, names: set[str]) -> str:
    """``engine``, shortened, or `OTHER` once ``names`` is full; enters it in ``names``."""
    engine = engine[:_NAME_CHARS]
    if engine not in names and len(names - {OTHER}) >= MAX_ENGINES:
        engine = OTHER
    names.add(engine)
    return engine


class Exposure:
    """Events in, a `Record` out. Every setter states what *is*, so calling it again with
    the same news costs a comparison, and a missed call is put right by the next one."""

    def __init__(self, now: float, *, serialised: bool = False) -> None:
        self._last = now
        self._serialised = serialised
        self._busy: dict[str, bool] = {}  # engine -> holds a long request
        self._cell = Cell(0, 0, serialised)
        self._record = Record()
        self._names: set[str] = set()
        # (engine, class) -> when last reported, and whether the engine held a long request
        self._reported: dict[tuple[str, GpuFault], tuple[float, bool]] = {}
        self._last_lockup = -math.inf

    def busy(self, engine: str, now: float, *, longest: int = 0) -> None:
        """``engine`` has work from ``now`` on; its longest request has ``longest`` tokens.

        Busy means from the first request's start to the last one's end, waiting for the
        GPU included: an engine must not turn idle between two bursts of one request, or
        the hours would not compare with the report's.
        """
        long = longest >= LONG_TOKENS
        if self._busy.get(engine) is not long:
            self._advance(now)
            self._busy[engine] = long
            self._update()

    def idle(self, engine: str, now: float) -> None:
        """``engine`` has no work from ``now`` on, or is gone."""
        if engine in self._busy:
            self._advance(now)
            del self._busy[engine]
            self._update()

    def serialised(self, on: bool, now: float) -> None:
        """Engines take turns on the GPU from ``now`` on, or no longer do."""
        if on is not self._serialised:
            self._advance(now)
            self._serialised = on
            self._update()

    def fault(self, engine: str, fault: GpuFault, now: float) -> bool:
        """``engine`` met ``fault``. False: a repeat of a report already counted.

        The engine counts as busy even if it was not said to be, and so does every engine
        that reported within `EVENT_WINDOW_S`: of two that fail together, the first may
        have turned idle by the time the second one speaks.
        """
        self._advance(now)
        for known, (at, _) in list(self._reported.items()):
            if now - at >= EVENT_WINDOW_S:
                del self._reported[known]
        _, was_long = self._reported.get((engine, fault), (now, False))
        repeat = (engine, fault) in self._reported
        self._reported[engine, fault] = (now, self._busy.get(engine, was_long))
        involved = dict.fromkeys((name for name, _ in self._reported), False)
        for (name, _), (_, long) in self._reported.items():
            involved[name] |= long
        involved.update(self._busy)
        cell = Cell(min(len(involved), 2), min(sum(involved.values()), 2), self._serialised)
        if not repeat:
            where = (fault, _bounded(engine, self._names), cell)
            self._record.faults[where] = self._record.faults.get(where, 0) + 1
        if fault.is_lockup:
            if now - self._last_lockup >= EVENT_WINDOW_S:
                self._record.lockups[cell] = self._record.lockups.get(cell, 0) + 1
            self._last_lockup = now
        return not repeat

    def take(self, now: float) -> Record:
        """What was counted since the last `take`; counting goes on from zero."""
        self._advance(now)
        record, self._record, self._names = self._record, Record(), set()
        return record

    @property
    def cell(self) -> Cell:
        """The present circumstances."""
        return self._cell

    def _update(self) -> None:
        self._cell = Cell(
            min(len(self._busy), 2), min(sum(self._busy.values()), 2), self._serialised
        )

    def _advance(self, now: float) -> None:
        passed = now - self._last
        if passed <= 0.0:
            return
        self._last = now
        record, cell = self._record, self._cell
        record.seconds[cell] = record.seconds.get(cell, 0.0) + passed
        for engine in self._busy:
            key = (_bounded(engine, self._names), cell.busy, cell.serialised)
            record.engines[key] = record.engines.get(key, 0.0) + passed
