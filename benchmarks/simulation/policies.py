"""The rules that our policy is compared with, on the same world."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice

from benchmarks.simulation.parts import Policy
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import (
    Action,
    Grant,
    Load,
    Outcome,
    PoolView,
    Swap,
    Target,
    Waiter,
)
from omlx_admission.core.policy.planner import PlanKind, plan

#: A wait budget that never ends, for comparisons without refusals.
_FOREVER_S = 1e12


class StrictFcfs:
    """Everybody in the order of arrival, whatever is loaded. One load at a time.

    A request for the loaded model that arrived after one for another model waits
    behind it. Nothing else decides.
    """

    def __init__(self) -> None:
        self.gated: frozenset[str] = frozenset()
        self.paced: frozenset[str] = frozenset()
        self.swap: Swap | None = None
        self.side: Swap | None = None
        self.wake_at: float | None = None
        self.marked: frozenset[str] = frozenset()
        self._queue: OrderedDict[int, Waiter] = OrderedDict()
        self._wanted: Counter[Target] = Counter()
        self._sequence = 0

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def active(self) -> bool:
        """Whether anybody waits."""
        return bool(self._queue)

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the first in line waits for; nobody else matters yet."""
        return tuple(w.target for w in islice(self._queue.values(), 1))

    def head(self, target: Target) -> Waiter | None:
        """The first waiter for ``target``."""
        if not self._wanted[target]:
            return None
        return next(w for w in self._queue.values() if w.target == target)

    def estimate(self, target: Target, size: int, view: PoolView, now: float) -> float:
        """Not part of this rule."""
        return 1.0

    def enqueue(
        self,
        target: Target,
        size: int,
        now: float,
        deadline: float,
        context: object = None,
        *,
        since: float | None = None,
    ) -> Waiter:
        """Join the one queue at its end."""
        self._sequence += 1
        waiter = Waiter(self._sequence, target, size, now, deadline, context)
        self._queue[waiter.sequence] = waiter
        self._wanted[target] += 1
        return waiter

    def leave(
        self, waiter: Waiter, outcome: Outcome, now: float, back_in: float | None = None
    ) -> bool:
        """Leave the queue."""
        if self._queue.pop(waiter.sequence, None) is None:
            return False
        self._wanted[waiter.target] -= 1
        waiter.outcome = outcome
        return True

    def used(self, model: str, now: float) -> None:
        """Nothing is remembered."""

    def load_succeeded(
        self, target: Target, now: float, places: int | None = None
    ) -> tuple[Waiter, ...]:
        """Whoever is first in line and wants this model is granted, up to the first other."""
        self.swap = None
        return self._front(target)

    def load_refused(self, target: Target, now: float) -> None:
        """Tried again at the next step."""
        self.swap = None

    def load_failed(self, target: Target) -> tuple[Waiter, ...]:
        """The one who asked gets the error."""
        self.swap = None
        return self._front(target, Outcome.FAILED)

    def shut_down(self) -> tuple[Waiter, ...]:
        """Everybody ends."""
        waiters = tuple(self._queue.values())
        self._queue.clear()
        self._wanted.clear()
        for waiter in waiters:
            waiter.outcome = Outcome.SHUT_DOWN
        return waiters

    def step(self, view: PoolView, now: float) -> list[Action]:
        """Serve the head, or make room for it once all others are idle."""
        actions: list[Action] = []
        first = next(iter(self._queue.values()), None)
        if self.swap is None and first is not None:
            if first.target in view.ready:
                actions.append(Grant(first.target, self._front(first.target)))
            else:
                wish = plan(first.target, first.size, view)
                if wish.kind in (PlanKind.FITS, PlanKind.EVICT):
                    self.swap = Swap(
                        first.target, first.size, wish.victims, now, "fcfs", True, now
                    )
                    actions.append(Load(first.target, wish.victims))
        self.gated = frozenset(view.models) if self._queue else frozenset()
        return actions

    def _front(self, target: Target, outcome: Outcome = Outcome.GRANTED) -> tuple[Waiter, ...]:
        taken = []
        while self._queue:
            waiter = next(iter(self._queue.values()))
            if waiter.target != target:
                break
            del self._queue[waiter.sequence]
            self._wanted[target] -= 1
            waiter.outcome = outcome
            taken.append(waiter)
        return tuple(taken)


def _exhaustive() -> Policy:
    return AdmissionPolicy(Dials(max_age=_FOREVER_S, linger=0.0, budget=_FOREVER_S))


def _gated() -> Policy:
    return AdmissionPolicy(Dials(max_age=0.0, linger=0.0, budget=_FOREVER_S))


def _ours() -> Policy:
    return AdmissionPolicy(Dials())


#: By name: how to make one. "exhaustive" is the rule of Ollama, llama-swap and the
#: llama.cpp router: the loaded model serves until nobody uses it.
POLICIES: dict[str, Callable[[], Policy]] = {
    "ours": _ours,
    "exhaustive": _exhaustive,
    "gated": _gated,
    "strict FCFS": StrictFcfs,
}
