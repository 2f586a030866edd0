"""Who waits for what, in which order, and what is remembered of those who left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView
from dataclasses import dataclass, field

from .model import Outcome, Target, Waiter

#: First and longest pause in seconds before a load that met a passing shortage
#: is tried again; it doubles in between.
_RETRY_FIRST_S = 0.05
_RETRY_LONGEST_S = 1.0

#: So many refused loads in a row, and a target no longer keeps others waiting, until
#: so many seconds have passed without another refusal.
_PATIENCE_REFUSALS = 5
_FORGIVEN_AFTER_S = 30.0

#: How many seconds a model keeps the age of its demand after its last waiter was
#: refused (it was told to come back within 60 s) or left (clients that time out
#: send again within seconds). Else a client whose own limit is below W would
#: never grow old enough to be served.
_COMES_BACK_S = {Outcome.EXPIRED: 65.0, Outcome.CANCELLED: 10.0}

#: A refused client comes back within so many seconds (``Retry-After`` is never
#: longer), and should be served then: the target is due by that time.
_BACK_WITHIN_S = 60.0

#: A client that leaves within so many seconds wanted no swap (a request for each key
#: press). A demand of such clients alone waits as long before it disturbs others, twice
#: as long after each further one, up to the second figure.
_HASTY_S = 1.0
_HASTY_LONGEST_S = 4.0

_NEVER = float("inf")


@dataclass(slots=True)
class Queue:
    """Waiters of one target, first in first out, each removable in O(1).

    Attributes:
        since: when the demand that they are part of began, or when it was last met:
            while the model serves them in turn, their age does not grow.
        due_by: when those who were refused have been told to be back at the latest.
        back_by: when the last of those who were refused has been told to come back.
        retry_at: no load is tried before.
        settling_since: since when the room it waits for is on its way, or None.
        served_at: when its model last served it while it waited.
        unpaced: how many of the waiters take no place.
        parked: how many of them are parked answers.
        hasty: how often in a row all who waited had left within a moment.
        earnest: whether any of those who wait now or have left stayed longer.
        disturbs_at: before, no model in regular use has to leave.
    """

    since: float
    due_by: float = _NEVER
    back_by: float = -_NEVER
    waiters: OrderedDict[int, Waiter] = field(default_factory=OrderedDict)
    retry_at: float = 0.0
    retries: int = 0
    settling_since: float | None = None
    served_at: float = -_NEVER
    unpaced: int = 0
    parked: int = 0
    hasty: int = 0
    earnest: bool = False
    disturbs_at: float = -_NEVER

    @property
    def aged_from(self) -> float:
        """From when on the age of the first waiter counts."""
        return max(self.head.enqueued, self.served_at)

    @property
    def stands_back_until(self) -> float:
        """Until when it keeps no other target waiting: its loads were refused too often."""
        if self.retries < _PATIENCE_REFUSALS:
            return -_NEVER
        return self.retry_at + _FORGIVEN_AFTER_S

    @property
    def head(self) -> Waiter:
        """Who came first."""
        return next(iter(self.waiters.values()))

    def load_refused(self, now: float) -> None:
        """The pool found no room: the next try is later, and later each time."""
        pause = min(_RETRY_FIRST_S * 2**self.retries, _RETRY_LONGEST_S)
        self.retries = min(self.retries + 1, 16)
        self.retry_at = now + pause


@dataclass(frozen=True, slots=True)
class Demand:
    """What is remembered of a queue whose last waiter was refused or left."""

    since: float
    due_by: float
    until: float
    back_by: float = -_NEVER
    hasty: int = 0


class Queues:
    """All queues. A waiter leaves in :meth:`leave` or :meth:`take`, nowhere else.

    Attributes:
        waiting: how many requests wait.
        parked: how many of them are parked answers.
    """

    def __init__(self) -> None:
        self.waiting = self.parked = 0
        self._queues: dict[Target, Queue] = {}
        self._demands: dict[Target, Demand] = {}
        self._sequence = 0
        self._order: tuple[Target, ...] | None = None

    def __contains__(self, target: Target) -> bool:
        return target in self._queues

    def __getitem__(self, target: Target) -> Queue:
        return self._queues[target]

    def get(self, target: Target) -> Queue | None:
        """The queue of ``target``, None if no request waits for it."""
        return self._queues.get(target)

    def items(self) -> ItemsView[Target, Queue]:
        """Targets that requests wait for, and their queues, in no order that matters."""
        return self._queues.items()

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets that requests wait for, the longest wanted first."""
        if self._order is None:
            queues = self._queues
            self._order = tuple(
                sorted(queues, key=lambda t: (queues[t].since, queues[t].head.sequence))
            )
        return self._order

    def served(self, target: Target, now: float) -> None:
        """The model of ``target`` has served those who wait, in turn, until ``now``."""
        queue = self._queues.get(target)
        if queue is not None:
            queue.since = queue.served_at = now
            queue.due_by = _NEVER
            self._order = None

    def demand(self, target: Target, now: float) -> Demand | None:
        """What is remembered of those who waited for ``target`` lately, if anything."""
        demand = self._demands.get(target)
        return demand if demand is not None and now <= demand.until else None

    def enqueue(
        self,
        target: Target,
        size: int,
        now: float,
        deadline: float,
        context: object,
        enqueued: float,
        unpaced: bool = False,
        parked: bool = False,
    ) -> Waiter:
        """Add a waiter, ``enqueued`` at that time; a remembered demand keeps its age."""
        self._sequence += 1
        waiter = Waiter(self._sequence, target, size, enqueued, deadline, context)
        waiter.unpaced, waiter.parked = unpaced or parked, parked
        queue = self._queues.get(target)
        if queue is None:
            queue = self._queues[target] = Queue(enqueued)
            self._order = None
            demand = self._demands.pop(target, None)
            if demand is not None and now <= demand.until:
                queue.since = min(demand.since, enqueued)
                queue.due_by = demand.due_by
                queue.hasty = demand.hasty
            if queue.hasty:
                pause = min(_HASTY_S * 2 ** (queue.hasty - 1), _HASTY_LONGEST_S)
                queue.disturbs_at = now + pause
        queue.waiters[waiter.sequence] = waiter
        queue.unpaced += waiter.unpaced
        self.waiting += 1
        if parked:
            queue.parked += 1
            self.parked += 1
            queue.earnest = True
        return waiter

    def leave(
        self, waiter: Waiter, outcome: Outcome, now: float, back_by: float = -_NEVER
    ) -> bool:
        """End one wait from outside (expired, cancelled). False if it had ended already.

        ``back_by`` is when its client was told to come back.
        """
        if waiter.outcome is not Outcome.WAITING:
            return False
        waiter.outcome = outcome
        queue = self._queues[waiter.target]
        if queue.head is waiter:
            self._order = None
        self._remove(queue, waiter)
        self.waiting -= 1
        if outcome is Outcome.EXPIRED:
            queue.due_by = min(queue.due_by, waiter.deadline + _BACK_WITHIN_S)
            queue.back_by = max(queue.back_by, back_by)
        if outcome is not Outcome.CANCELLED or now >= waiter.enqueued + _HASTY_S:
            queue.earnest = True
        if not queue.waiters:
            self._drop(waiter.target)
            self._remember(waiter.target, queue, outcome, now)
        return True

    def take(
        self, target: Target, outcome: Outcome, places: int | None = None
    ) -> tuple[Waiter, ...]:
        """End the wait of the first ``places`` who wait for ``target``, in order.

        Without a number everybody's; those that take no place in any case.
        """
        queue = self._queues.get(target)
        if queue is None:
            return ()
        if places is None or len(queue.waiters) <= places:
            waiters = tuple(queue.waiters.values())
            self.parked -= queue.parked
            self._drop(target)
        else:
            # Parked answers come back whatever the places, and fill them first.
            waiters = self._first(queue, max(0, places - queue.parked))
            if not waiters:
                return ()
            self._order = None
            for waiter in waiters:
                self._remove(queue, waiter)
            if not queue.waiters:
                self._drop(target)
        for waiter in waiters:
            waiter.outcome = outcome
        self.waiting -= len(waiters)
        return waiters

    @staticmethod
    def _first(queue: Queue, places: int) -> tuple[Waiter, ...]:
        waiters: list[Waiter] = []
        unpaced = queue.unpaced
        for waiter in queue.waiters.values():
            if waiter.unpaced:
                unpaced -= 1
            elif places > 0:
                places -= 1
            elif unpaced > 0:
                continue
            else:
                break
            waiters.append(waiter)
        return tuple(waiters)

    def _remove(self, queue: Queue, waiter: Waiter) -> None:
        del queue.waiters[waiter.sequence]
        queue.unpaced -= waiter.unpaced
        queue.parked -= waiter.parked
        self.parked -= waiter.parked

    def _drop(self, target: Target) -> None:
        del self._queues[target]
        self._order = None

    def _remember(self, target: Target, queue: Queue, outcome: Outcome, now: float) -> None:
        """The demand goes on for a while though no request waits at the moment."""
        for old in [t for t, demand in self._demands.items() if demand.until < now]:
            del self._demands[old]
        until = now + _COMES_BACK_S.get(outcome, 0.0)
        hasty = 0 if queue.earnest else queue.hasty + 1
        self._demands[target] = Demand(queue.since, queue.due_by, until, queue.back_by, hasty)
