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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from omlx_admission.gpu.faults import GpuFault

LONG_TOKENS = 32_768
"""A request of this many tokens, prompt and answer together, counts as long, as in oMLX
issue 4224, which "the report" is below."""

EVENT_WINDOW_S = 10.0
"""One lockup is reported by several engines and again while they clean up: for this many
seconds after its first report, by work that had begun before. Work that began later and
locks the GPU up has done so anew, however soon."""

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
    ended: dict[Cell, int] = field(default_factory=dict)
    """Processes that ended without a word. Metal may do that, and then no fault is reported."""
    across: float = 0.0
    """Of the seconds with two or more engines, those in which they were of two processes."""

    def add(self, other: Record) -> None:
        """Add ``other`` to this record, keeping at most `MAX_ENGINES` engine names."""
        for cell, seconds in other.seconds.items():
            self.seconds[cell] = self.seconds.get(cell, 0.0) + seconds
        self.across += other.across
        for mine, theirs in ((self.lockups, other.lockups), (self.ended, other.ended)):
            for cell, count in theirs.items():
                mine[cell] = mine.get(cell, 0) + count
        names = self.names()
        for (engine, busy, serialised), seconds in other.engines.items():
            key = (_bounded(engine, names), busy, serialised)
            self.engines[key] = self.engines.get(key, 0.0) + seconds
        for (fault, engine, cell), count in other.faults.items():
            where = (fault, _bounded(engine, names), cell)
            self.faults[where] = self.faults.get(where, 0) + count

    def without_names(self) -> Record:
        """The same counts, of engines that are all called `OTHER`."""
        total = replace(self, faults={}, engines={})
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

    def sudden_ends(self, *, busy: int, serialised: bool) -> int:
        """Processes that ended suddenly under these circumstances."""
        return sum(_where(self.ended, busy, serialised, None))


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


class Others(NamedTuple):
    """What other processes that count into the same ledger do."""

    busy_s: float = 0.0
    """For how long since the last question one of them had work."""
    busy: bool = False
    """Whether one has work now."""
    long: int = 0
    """How many of their engines hold a long request now."""
    counted: bool = False
    """Whether one of them counts the time that is common to all, so that this one must not."""
    lockup: float = -math.inf
    """When one of them counted its last lockup."""


ALONE = Others()


class Event:
    """Reports that belong together: of one lockup, or of another fault."""

    def __init__(self, now: float = -math.inf) -> None:
        self._first = now
        self.lockup = False
        # (engine, class) -> whether the engine held a long request
        self.reported: dict[tuple[str, GpuFault], bool] = {}

    def at(self, now: float, fault: GpuFault, began: float) -> Event:
        """The event of a report at ``now`` by work that began then: this one, or a new one."""
        anew = fault.is_lockup and began > self._first
        return self if now - self._first < EVENT_WINDOW_S and not anew else Event(now)


class Exposure:
    """Events in, a `Record` out. Every setter states what *is*, so calling it again with
    the same news costs a comparison, and a missed call is put right by the next one.

    Engines of two processes may work at once. Each process then counts the time in which
    it works alone, and one of them, the same one all along, what is common to all.
    """

    def __init__(
        self,
        now: float,
        *,
        serialised: bool = False,
        others: Callable[[float], Others] = lambda _now: ALONE,
    ) -> None:
        self._last = now
        self._serialised = serialised
        self._others = others
        self._busy: dict[str, bool] = {}  # engine -> holds a long request
        self._cell = Cell(0, 0, serialised)
        self._record = Record()
        self._names: set[str] = set()
        self._event = Event()

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

    def fault(
        self, engine: str, fault: GpuFault, now: float, *, began: float = -math.inf
    ) -> bool:
        """``engine`` met ``fault`` in work that began at ``began`` (clean-up after other
        work: not given). False: a repeat of a report already counted.

        The engine counts as busy even if it was not said to be, and so does every engine
        that reported in the same event: of two that fail together, the first may have
        turned idle by the time the second one speaks.
        """
        others = self._advance(now)
        event = self._event = self._event.at(now, fault, began)
        repeat = (engine, fault) in event.reported
        was_long = event.reported.get((engine, fault), False)
        event.reported[engine, fault] = self._busy.get(engine, was_long)
        involved = {name: False for name, _ in event.reported}
        for (name, _), long in event.reported.items():
            involved[name] |= long
        involved.update(self._busy)
        cell = _cell(len(involved), sum(involved.values()), self._serialised)
        if others.busy:
            cell = _across(cell, others)
        if not repeat:
            where = (fault, _bounded(engine, self._names), cell)
            self._record.faults[where] = self._record.faults.get(where, 0) + 1
        if fault.is_lockup and not event.lockup:
            event.lockup = True
            if now - others.lockup >= EVENT_WINDOW_S or began > others.lockup:
                self._record.lockups[cell] = self._record.lockups.get(cell, 0) + 1
                self.last_lockup = now
        return not repeat

    def take(self, now: float) -> Record:
        """What was counted since the last `take`; counting goes on from zero."""
        self._advance(now)
        record, self._record, self._names = self._record, Record(), set()
        return record

    #: When a lockup was last counted here.
    last_lockup = -math.inf

    @property
    def cell(self) -> Cell:
        """The present circumstances, in this process."""
        return self._cell

    def _update(self) -> None:
        self._cell = _cell(len(self._busy), sum(self._busy.values()), self._serialised)

    def _advance(self, now: float) -> Others:
        passed = now - self._last
        if passed < 0.0:
            return ALONE
        self._last = now
        record, cell, others = self._record, self._cell, self._others(now)
        beside = min(passed, others.busy_s)
        self._add(cell, passed - beside, common=not cell.busy, others=others)
        if cell.busy:
            self._add(_across(cell, others), beside, common=True, others=others)
            if not others.counted:
                record.across += beside
        return others

    def _add(self, cell: Cell, seconds: float, *, common: bool, others: Others) -> None:
        record = self._record
        if seconds <= 0.0:
            return
        if not (common and others.counted):
            record.seconds[cell] = record.seconds.get(cell, 0.0) + seconds
        for engine in self._busy:
            key = (_bounded(engine, self._names), cell.busy, cell.serialised)
            record.engines[key] = record.engines.get(key, 0.0) + seconds


def _cell(busy: int, long: int, serialised: bool) -> Cell:
    return Cell(min(busy, 2), min(long, 2), serialised)


def _across(cell: Cell, others: Others) -> Cell:
    """``cell`` beside busy engines of another process: no turn reaches there."""
    return _cell(2, cell.long + others.long, False)
