"""Bounded memories of the observer: distributions, levels over time, names.

Each takes O(1) per event (a distribution: one bisection of a dozen numbers), and
none grows without a limit, whatever clients send.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

#: Where names beyond the limit are counted.
OTHER = "(other)"

#: Seconds that the time line reaches back, and the width of one of its steps.
WINDOW_S = 600.0
STEP_S = 2.0
_STEPS = int(WINDOW_S / STEP_S) + 1


class Names:
    """At most ``limit`` names are kept apart; the others are one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """``name`` itself, or `OTHER` once there are too many."""
        if name in self._known:
            return name
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(name)
        return name


class Distribution:
    """How often which size: counts by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "longest", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.longest = 0.0

    def add(self, value: float) -> None:
        """Count ``value``; what is below zero (a clock that was set) counts as zero."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.longest = max(self.longest, value)

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bound and how many values lie at or below it, as Prometheus wants it."""
        rows: list[tuple[str, int]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), running))
        return rows


class Level:
    """A number over time: its highest value in each step of the last `WINDOW_S`."""

    __slots__ = ("_now", "_steps")

    def __init__(self) -> None:
        self._now = 0
        # [step, highest in it, last in it]
        self._steps: deque[list[int]] = deque(maxlen=_STEPS)

    @property
    def value(self) -> int:
        """The number now."""
        return self._now

    def set(self, value: int, now: float) -> None:
        """The number is ``value`` from ``now`` on."""
        step = int(now / STEP_S)
        if self._steps and self._steps[-1][0] == step:
            self._steps[-1][1] = max(self._steps[-1][1], value)
            self._steps[-1][2] = value
        else:
            self._steps.append([step, max(value, self._now), value])
        self._now = value

    def since(self, start: float) -> list[tuple[float, int]]:
        """Changes of the number as (time, value), from ``start`` on; oldest first."""
        rows: list[tuple[float, int]] = []
        for step, highest, last in list(self._steps):
            at = step * STEP_S
            if at + STEP_S < start:
                rows[:] = [(start, last)]
                continue
            if not rows or rows[-1][1] != highest:
                rows.append((max(at, start), highest))
            if last != highest:
                rows.append((at + STEP_S, last))
        return rows


class Shares:
    """Which part of each step something took, over the last `WINDOW_S`."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[list[float]] = deque(maxlen=_STEPS)  # [step, seconds in it]

    def add(self, start: float, end: float) -> None:
        """It lasted from ``start`` to ``end``; starts may come out of order by one step."""
        start = max(start, end - WINDOW_S)
        while start < end:
            step = int(start / STEP_S)
            until = min(end, (step + 1) * STEP_S)
            self._book(step, until - start)
            if until <= start:  # a step so short that adding it changes nothing
                break
            start = until

    def _book(self, step: int, seconds: float) -> None:
        for row in (self._steps[-1], self._steps[-2]) if len(self._steps) > 1 else self._steps:
            if row[0] == step:
                row[1] += seconds
                return
        self._steps.append([step, seconds])

    def since(self, start: float) -> list[tuple[float, float]]:
        """(time, share between 0 and 1) of the steps from ``start`` on, oldest first."""
        return [
            (step * STEP_S, min(1.0, seconds / STEP_S))
            for step, seconds in sorted(self._steps)
            if (step + 1) * STEP_S > start
        ]
