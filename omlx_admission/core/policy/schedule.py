"""Which target is due when: the state of the queue, and what decisions read of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from .estimates import Dials, Estimates
from .linger import Linger
from .model import ModelView, PoolView, Swap, Target, Waiter
from .planner import Plan, plan
from .queues import Queues

#: Seconds after the announced moment in which a refused client is still expected.
_COMES_LATE_S = 2.0

_NEVER = float("inf")


class Schedule:
    """What is known: who waits, what was decided, what was seen. Nothing here decides.

    Attributes:
        swap: the transition that was decided, draining or loading, or None.
        concurrent_load: a load beside a draining swap that does not touch it, or None.
        queues: the waiters, by target.
        loaded_at: when each model in memory was loaded, where that was seen.
        no_drain_before: models whose drain was given up, and until when they are left alone.
        by_hand: models that were loaded or asked for by hand and not used since, and until
            when they are kept for that.
        busy_since: models that were told to drain, and since when, while what ran then may
            still run; a drain that is withdrawn, because no request waits any more, changes
            nothing in that.
    """

    def __init__(self, dials: Dials | None = None, estimates: Estimates | None = None) -> None:
        self.dials = dials or Dials()
        self.estimates = estimates or Estimates()
        self.swap: Swap | None = None
        self.concurrent_load: Swap | None = None
        self.queues = Queues()
        self.loaded_at: dict[str, float] = {}
        self.no_drain_before: dict[str, float] = {}
        self.busy_since: dict[str, float] = {}
        self.by_hand: dict[str, float] = {}
        #: When each model that is away gave its place to another one.
        self._left_at: dict[str, float] = {}
        self.linger = Linger(self._linger_of)
        self._marked: set[str] = set()
        self._sizes: dict[str, int] = {}

    # -- who waits ----------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self.queues.waiting

    @property
    def parked(self) -> int:
        """How many of them are parked answers."""
        return self.queues.parked

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets that requests wait for, the longest wanted first."""
        return self.queues.targets

    @property
    def marked(self) -> frozenset[str]:
        """Models in memory that were told to drain and not told otherwise since."""
        return frozenset(self._marked)

    def head(self, target: Target) -> Waiter | None:
        """The first waiter for ``target``, None if no request waits for it."""
        queue = self.queues.get(target)
        return queue.head if queue else None

    def waiters(self, target: Target) -> tuple[Waiter, ...]:
        """Who waits for ``target``, in order."""
        queue = self.queues.get(target)
        return tuple(queue.waiters.values()) if queue else ()

    def wanted_since(self, target: Target) -> float | None:
        """When the demand for ``target`` began, None if no request waits for it."""
        queue = self.queues.get(target)
        return queue.since if queue else None

    def ahead_of(self, waiter: Waiter) -> int:
        """How many models are served before ``waiter``'s by the order of demand."""
        targets = self.targets
        return targets.index(waiter.target) if waiter.target in targets else 0

    # -- who is due ---------------------------------------------------------

    def next_due(self, view: PoolView, now: float) -> Target | None:
        """The target that may end lingers and close gates now: wanted long enough."""
        share = self.competing_targets(view)
        for target in self.targets:
            queue = self.queues[target]
            if self.is_loading(target) or target in view.ready:
                continue
            if now < queue.stands_back_until or now < queue.disturbs_at:
                continue
            if now >= self.due(target, share):
                return target
        return None

    def due(self, target: Target, competing_targets: int) -> float:
        """When ``target`` may close the gate of a model that has had its turn."""
        queue = self.queues[target]
        due = queue.since + self.dials.share(self.age_of(target), competing_targets)
        return min(due, queue.due_by)

    def competing_targets(self, view: PoolView) -> int:
        """How many targets wait for a swap."""
        return sum(
            1 for t, _ in self.queues.items() if t not in view.ready and not self.is_loading(t)
        )

    def protected_until(
        self, target: Target, view: PoolView, now: float, share: int
    ) -> dict[str, float]:
        """Models that ``target`` must let serve on, and until when: loaded lately, in use.

        ``share`` is how many targets wait for a swap (:meth:`competing_targets`).

        A moment is left even where ``target`` is overdue: who comes back just after the
        load that was forecast for it must not have to wait for the next one.
        """
        age = self.age_of(target)
        hard = self.queues[target].aged_from + age
        turn = self.dials.share(age, share)
        decided = self.swap.victims if self.swap is not None else ()
        kept: dict[str, float] = {}
        for model in view.models.values():
            if model.model in decided:
                continue
            loaded_at = self.loaded_at.get(model.model, -_NEVER)
            least = min(self._linger_of(model.model), age / 4)
            end = max(
                min(loaded_at + turn, hard),
                loaded_at + least,
                self.no_drain_before.get(model.model, now),
            )
            if end > now and (model.busy or self.linger.until(model, now) is not None):
                kept[model.model] = end
        return kept

    def age_of(self, target: Target) -> float:
        """W in seconds for a target that a request waits for."""
        return self.age_for(target, self.queues[target].head.size)

    def age_for(self, target: Target, size: int) -> float:
        """W in seconds for ``target`` of ``size`` bytes."""
        swap = self.estimates.swap(target.model, size)
        queue, left_at = self.queues.get(target), self._left_at.get(target.model)
        rare = queue is not None and (
            left_at is None or self.dials.is_rare(swap, queue.since - left_at)
        )
        return self.dials.age_for(swap, rare)

    # -- what a swap would take ---------------------------------------------

    def plan_for(
        self,
        target: Target,
        view: PoolView,
        now: float | None = None,
        keep: Collection[str] = (),
    ) -> Plan:
        """How to make room for ``target``, leaving ``keep`` and its waiter's own alone.

        Another model that was loaded by hand is left for its first use.
        """
        head = self.queues[target].head
        if head.keep or self.by_hand:
            keep = (*keep, *head.keep, *(m for m in self.by_hand if m != target.model))
        return plan(target, head.size, view, rank=self.rank(now), keep=keep)

    def rank(self, now: float | None) -> Callable[[ModelView], tuple[Any, ...]]:
        """Order of victims: those that drain already, that do not linger, that serve few
        requests, that were used long ago."""

        def rank(model: ModelView) -> tuple[Any, ...]:
            lingers = now is not None and self.linger.until(model, now) is not None
            return (
                model.model not in self._marked,
                lingers,
                model.leases,
                model.last_used,
                model.model,
            )

        return rank

    def in_regular_use(self, planned: Plan, target: Target, view: PoolView, now: float) -> bool:
        """Whether a victim of ``planned`` was used within the age of ``target``."""
        lately = now - self.age_of(target)
        return any(
            view.models[v].busy or self.linger.idle_since(v) > lately for v in planned.victims
        )

    def linger_end(self, planned: Plan, view: PoolView, now: float) -> float | None:
        """When the last victim stops lingering; None if none does."""
        ends = [self.linger.until(view.models[v], now) for v in planned.victims]
        return max((end for end in ends if end is not None), default=None)

    def _linger_of(self, model: str) -> float:
        return self.dials.linger_for(self.estimates.swap(model, self._sizes.get(model, 0)))

    # -- what was decided ---------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether anything may have to be decided: a request waits, or a swap goes on."""
        return self.waiting > 0 or self.swap is not None

    def concerns(self, model: str) -> bool:
        """Whether the end of a request of ``model`` may be what a request waits for now."""
        return model in self._marked or any(
            target.model == model for target, _ in self.queues.items()
        )

    def held_until(self, swap: Swap) -> float:
        """Until when a drain goes on whose last waiter was refused.

        It was told when to come back, and would find the drain begun anew: behind a long
        queue it would never be served.
        """
        demand = self.queues.demand(swap.target, -_NEVER)
        return -_NEVER if demand is None else demand.back_by + _COMES_LATE_S

    @property
    def loads(self) -> list[Swap]:
        """The loads that run: of the swap, and of the one beside it."""
        return [s for s in (self.swap, self.concurrent_load) if s is not None and s.loading]

    def is_loading(self, target: Target) -> bool:
        """Whether a load of the queue's for ``target`` runs."""
        return any(load.target == target for load in self.loads)

    def late_at(self, load: Swap) -> float:
        """From when on ``load`` takes much longer than expected: its end cannot be told."""
        swap = self.estimates.swap(load.target.model, load.size)
        return load.load_started + self.dials.late_after(swap)

    def is_late(self, load: Swap, now: float) -> bool:
        """Whether that is so."""
        return now >= self.late_at(load)
