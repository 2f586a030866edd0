"""The admission policy: exhaustive service, an age-triggered gate and a linger.

Pure: events and a view of the pool go in, actions come out, time is an
argument. Two rules keep it right.

* Every decision is made in :meth:`AdmissionPolicy.step`, from the whole state
  and a fresh view. Events only change state; nothing is decided from a delta.
* A waiter leaves the queue in exactly one place (:meth:`_take_all` or
  :meth:`leave`), and its outcome is set there.

Theory of operation. The loaded model serves freely ("exhaustive service":
fewest swaps) until the oldest waiter for another model is W seconds old. Then
its gate closes: new requests for it queue, it drains, and the swap goes to the
model with the oldest head. That bounds every wait by
``W + R + (M-2)(S + ceil(q/C) R) + S`` with R the longest residual of a running
request, S the swap, M models, q waiters and C slots a model. An idle model is
given up at once, unless it has shown that it comes back within h seconds; then
it is kept for h. A decision to swap is withdrawn only when its last waiter
leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from omlx_admission.policy.estimates import Dials, Estimates
from omlx_admission.policy.model import (
    Action,
    Drain,
    Grant,
    Load,
    ModelView,
    Outcome,
    PoolView,
    RefusalReason,
    Refuse,
    Swap,
    Target,
    Undrain,
    Waiter,
)
from omlx_admission.policy.planner import Plan, PlanKind, plan

#: First and longest pause in seconds before a load that met a passing shortage
#: is tried again; it doubles in between.
_RETRY_FIRST_S = 0.05
_RETRY_LONGEST_S = 1.0

#: While room is on its way without an event of ours to announce it (memory that
#: settles, another tool's unload), look again after this many seconds.
_SETTLE_POLL_S = 0.05


@dataclass(slots=True)
class _Queue:
    """Waiters of one target, first in first out, each removable in O(1)."""

    waiters: OrderedDict[int, Waiter] = field(default_factory=OrderedDict)
    retry_at: float = 0.0
    retries: int = 0

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters.values()))


class AdmissionPolicy:
    """All state of the queue. One instance per pool; one thread.

    Attributes:
        gated: models that take no new requests now (read on the hot path).
        swap: the transition that was decided, draining or loading, or None.
        side: a load that fits beside a draining swap, or None.
        wake_at: when :meth:`step` should run again though nothing happened;
            None when only an event can change anything.
    """

    def __init__(self, dials: Dials | None = None, estimates: Estimates | None = None) -> None:
        self.dials = dials or Dials()
        self.estimates = estimates or Estimates()
        self.gated: frozenset[str] = frozenset()
        self.swap: Swap | None = None
        self.side: Swap | None = None
        self.wake_at: float | None = None
        self._queues: dict[Target, _Queue] = {}
        self._sequence = 0
        self._waiting = 0
        self._idle_since: dict[str, float] = {}
        self._given_up: dict[Target, float] = {}
        self._comes_back: set[Target] = set()
        self._sizes: dict[str, int] = {}

    # -- what is known ------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._waiting

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets that somebody waits for, oldest head first."""
        return tuple(sorted(self._queues, key=lambda t: self._queues[t].head.sequence))

    def head(self, target: Target) -> Waiter | None:
        """The first waiter for ``target``, None if nobody waits for it."""
        queue = self._queues.get(target)
        return queue.head if queue else None

    def waiters(self, target: Target) -> tuple[Waiter, ...]:
        """Who waits for ``target``, in order."""
        queue = self._queues.get(target)
        return tuple(queue.waiters.values()) if queue else ()

    def ahead_of(self, waiter: Waiter) -> int:
        """How many models are served before ``waiter``'s by the order of heads."""
        queue = self._queues.get(waiter.target)
        if queue is None:
            return 0
        mine = queue.head.sequence
        return sum(1 for q in self._queues.values() if q.head.sequence < mine)

    def estimate(self, target: Target, size: int, view: PoolView, now: float) -> float:
        """Seconds until ``target`` could be served if it were asked for now.

        The transition in progress, then every model whose head is older with its
        drain and swap, then its own; a guess that is refined by what is observed.
        """
        if target in view.ready and target.model not in self.gated:
            return 0.0
        total = 0.0
        for load in (self.swap, self.side):
            if load is None:
                continue
            swap = self.estimates.swap(load.target.model, load.size)
            if load.loading:
                total += max(0.0, swap - (now - load.load_started))
            else:
                drain = max((self.estimates.drain(v) for v in load.victims), default=0.0)
                total += max(0.0, drain - (now - load.started)) + swap
            if load.target == target:
                return total
        for other in self.targets:
            if other == target or self._is_loading(other) or other in view.ready:
                continue
            if self.swap is not None and self.swap.target == other:
                continue
            other_size = self._queues[other].head.size
            total += self.estimates.swap(other.model, other_size)
            total += self.estimates.drain(other.model)
        busy = [m.model for m in view.models.values() if m.busy and m.model != target.model]
        if busy and plan(target, size, view).kind is not PlanKind.FITS:
            total += max(self.estimates.drain(m) for m in busy)
        return total + self.estimates.swap(target.model, size)

    # -- events -------------------------------------------------------------

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
        """Add a waiter. ``since`` keeps the age of one that has waited before."""
        self._sequence += 1
        enqueued = now if since is None else since
        waiter = Waiter(self._sequence, target, size, enqueued, deadline, context)
        self._sizes[target.model] = size
        given_up = self._given_up.pop(target, None)
        if given_up is not None and now - given_up <= self._linger_of(target.model):
            # It was wanted again sooner than its swap was worth: ping-pong.
            self._comes_back.add(target)
        queue = self._queues.setdefault(target, _Queue())
        queue.waiters[waiter.sequence] = waiter
        self._waiting += 1
        return waiter

    def leave(self, waiter: Waiter, outcome: Outcome) -> bool:
        """End a wait from outside (expired, cancelled). False if it had ended already."""
        if waiter.outcome is not Outcome.WAITING:
            return False
        waiter.outcome = outcome
        queue = self._queues[waiter.target]
        del queue.waiters[waiter.sequence]
        self._waiting -= 1
        if not queue.waiters:
            del self._queues[waiter.target]
        return True

    def used(self, model: str, now: float) -> None:
        """A request of ``model`` ended: if it is idle now, it is idle since now."""
        self._idle_since[model] = now

    def load_succeeded(self, target: Target, now: float) -> tuple[Waiter, ...]:
        """``target`` is resident: all its waiters are granted in this step.

        Newcomers that arrived during the load are among them. Returns them in
        order; the caller takes their leases before it does anything else.
        """
        swap = self._end_load(target)
        self.estimates.saw_swap(target.model, now - swap.load_started)
        self._idle_since[target.model] = now
        return self._take_all(target, Outcome.GRANTED)

    def load_refused(self, target: Target, now: float) -> None:
        """The pool found no room after all: the waiters stay, the next try is later."""
        self._end_load(target)
        queue = self._queues.get(target)
        if queue is not None:
            pause = min(_RETRY_FIRST_S * 2**queue.retries, _RETRY_LONGEST_S)
            queue.retries = min(queue.retries + 1, 16)
            queue.retry_at = now + pause

    def load_failed(self, target: Target) -> tuple[Waiter, ...]:
        """The load failed for good: all its waiters end with the cause, once."""
        self._end_load(target)
        return self._take_all(target, Outcome.FAILED)

    def shut_down(self) -> tuple[Waiter, ...]:
        """Everybody ends. A load in progress still reports its end."""
        if self.swap is not None and not self.swap.loading:
            self.swap = None
        self.gated = frozenset()
        return tuple(
            waiter
            for target in self.targets
            for waiter in self._take_all(target, Outcome.SHUT_DOWN)
        )

    # -- decisions ----------------------------------------------------------

    def step(self, view: PoolView, now: float) -> list[Action]:
        """Decide all that can be decided now. Idempotent for an unchanged view."""
        actions: list[Action] = []
        self._observe(view, now)
        self._refuse_hopeless(view, actions)
        self._withdraw_abandoned_swap(actions)
        overdue = self._overdue(view, now)
        self._grant_ready(view, overdue, now, actions)
        if self.swap is None:
            self._start_swap(view, overdue, now, actions)
        elif not self.swap.loading and self.side is None:
            self._advance_drain(view, now, actions)
        if self.swap is not None and not self.swap.loading and self.side is None:
            self._load_beside_drain(view, now, actions)
        # A swap begun above changes who is overdue and whose gate is closed.
        self.gated = self._closed_models(view, self._overdue(view, now), now)
        self.wake_at = self._next_wake(view, now)
        return actions

    def _observe(self, view: PoolView, now: float) -> None:
        for model in view.models.values():
            if model.busy or model.loading:
                self._idle_since.pop(model.model, None)
            else:
                self._idle_since.setdefault(model.model, now)
        for gone in self._idle_since.keys() - view.models.keys():
            del self._idle_since[gone]

    def _refuse_hopeless(self, view: PoolView, actions: list[Action]) -> None:
        for target in self.targets:
            if self._is_loading(target):
                continue  # its load answers
            if target in view.unknown:
                reason = RefusalReason.NOT_FOUND
            elif target not in view.ready and self._plan(target, view).kind is PlanKind.NEVER:
                reason = RefusalReason.NEVER_FITS
            else:
                continue
            waiters = self._take_all(target, Outcome.REFUSED)
            actions.append(Refuse(target, waiters, reason))

    def _withdraw_abandoned_swap(self, actions: list[Action]) -> None:
        swap = self.swap
        if swap is None or swap.loading or swap.target in self._queues:
            return
        if swap.drained:
            actions.append(Undrain(tuple(sorted(swap.drained))))
        self.swap = None

    def _overdue(self, view: PoolView, now: float) -> Target | None:
        """The target whose head is W old and has waited longest, or None."""
        for target in self.targets:
            if self._is_loading(target) or target in view.ready:
                continue
            if now - self._queues[target].head.enqueued >= self._age_of(target):
                return target
        return None

    def _grant_ready(
        self, view: PoolView, overdue: Target | None, now: float, actions: list[Action]
    ) -> None:
        closed = self._closed_models(view, overdue, now)
        for target in self.targets:
            if target not in view.ready or target.model in closed:
                continue
            if self._is_loading(target):
                continue  # its load answers, and grants in the step that ends it
            swap = self.swap
            if swap is not None and swap.target == target:
                if swap.drained:
                    actions.append(Undrain(tuple(sorted(swap.drained))))
                self.swap = None
            actions.append(Grant(target, self._take_all(target, Outcome.GRANTED)))

    def _start_swap(
        self, view: PoolView, overdue: Target | None, now: float, actions: list[Action]
    ) -> None:
        order = self.targets
        if overdue is not None:
            order = (overdue, *(t for t in order if t != overdue))
        for target in order:
            if now < self._queues[target].retry_at:
                continue
            if target in view.ready:
                continue  # gated: its turn comes after the overdue one
            wish = self._plan(target, view, now)
            if wish.kind in (PlanKind.FITS, PlanKind.ASK):
                self._begin(view, target, wish, wish.kind.value, now, actions)
                return
            if wish.kind is PlanKind.EVICT and (
                target == overdue
                or not any(self._lingering(view.models[v], now) for v in wish.victims)
            ):
                self._begin(view, target, wish, "idle", now, actions)
                return
            if wish.kind is PlanKind.DRAIN and target == overdue:
                self._begin(view, target, wish, "age", now, actions)
                return
            if target == overdue and wish.kind is PlanKind.SETTLE:
                return  # its room is on its way: nobody takes it

    def _begin(
        self,
        view: PoolView,
        target: Target,
        wish: Plan,
        reason: str,
        now: float,
        actions: list[Action],
    ) -> None:
        size = self._queues[target].head.size
        self.swap = Swap(target, size, wish.victims, now, reason)
        if wish.kind is PlanKind.DRAIN:
            self._drain(wish.busy, actions)
        else:
            self._load(view, wish, now, actions)

    def _drain(self, busy: Iterable[str], actions: list[Action]) -> None:
        assert self.swap is not None
        fresh = tuple(m for m in busy if m not in self.swap.drained)
        if fresh:
            self.swap.drained.update(fresh)
            actions.append(Drain(fresh, self.swap.target))

    def _load(self, view: PoolView, wish: Plan, now: float, actions: list[Action]) -> None:
        swap = self.swap
        assert swap is not None
        spared = swap.drained - set(wish.victims)
        if spared:
            actions.append(Undrain(tuple(sorted(spared))))
        for model in swap.drained & set(wish.victims):
            self.estimates.saw_drain(model, now - swap.started)
        swap.victims = wish.victims
        swap.loading = True
        swap.load_started = now
        for victim in wish.victims:
            self._give_up(view.models[victim].target, now)
        actions.append(Load(swap.target, wish.victims))

    def _give_up(self, victim: Target, now: float) -> None:
        idle_since = self._idle_since.get(victim.model, now)
        self._given_up[victim] = idle_since
        if now - idle_since >= self._linger_of(victim.model):
            # It had its chance to come back and did not take it.
            self._comes_back.discard(victim)

    def _advance_drain(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """The decision stands; only the way to it may become shorter or longer."""
        swap = self.swap
        assert swap is not None
        wish = self._plan(swap.target, view, now)
        if now < self._queues[swap.target].retry_at:
            return
        if wish.kind in (PlanKind.FITS, PlanKind.EVICT, PlanKind.ASK):
            self._load(view, wish, now, actions)
        elif wish.kind is PlanKind.DRAIN:
            swap.victims = wish.victims
            self._drain(wish.busy, actions)

    def _load_beside_drain(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """While a drain goes on, load what fits now and still fits after the swap."""
        swap = self.swap
        assert swap is not None
        after = self._after(swap, view)
        for target in self.targets:
            queue = self._queues[target]
            if target == swap.target or target in view.ready or now < queue.retry_at:
                continue
            size = queue.head.size
            if (
                plan(target, size, view).kind is PlanKind.FITS
                and plan(target, size, after).kind is PlanKind.FITS
            ):
                self.side = Swap(target, size, (), now, "fits", True, now)
                actions.append(Load(target, ()))
                return

    # -- gates, linger and time ---------------------------------------------

    def _closed_models(
        self, view: PoolView, overdue: Target | None, now: float
    ) -> frozenset[str]:
        """Models whose gate is closed: victims of the swap, and of the next if it is due."""
        closed: set[str] = set()
        if self.swap is not None:
            closed.update(self.swap.victims)
        if overdue is not None and (self.swap is None or self.swap.target != overdue):
            after = view
            for load in (self.swap, self.side):
                if load is not None:
                    after = self._after(load, after)
            closed.update(self._plan(overdue, after, now).victims)
        return frozenset(closed)

    @staticmethod
    def _after(swap: Swap, view: PoolView) -> PoolView:
        """The view as it will be when ``swap`` has happened and its target is in use."""
        models = {k: m for k, m in view.models.items() if k not in swap.victims}
        gone = sum(m.size for k, m in view.models.items() if k in swap.victims)
        come = 0 if swap.target.model in models else swap.size
        models[swap.target.model] = ModelView(swap.target.model, swap.size, busy=True)
        return replace(
            view,
            models=models,
            ready=frozenset(),
            used=max(0, (view.committed if gone else view.used) - gone) + come,
            committed=max(0, view.committed - gone) + come,
        )

    def _plan(self, target: Target, view: PoolView, now: float | None = None) -> Plan:
        drained = self.swap.drained if self.swap is not None else frozenset()

        def rank(model: ModelView) -> tuple[Any, ...]:
            lingering = now is not None and self._lingering(model, now)
            return (
                model.model not in drained,
                lingering,
                model.leases,
                model.last_used,
                model.model,
            )

        return plan(target, self._queues[target].head.size, view, rank=rank)

    def _lingering(self, model: ModelView, now: float) -> bool:
        """Whether an idle model is kept a while because it keeps coming back."""
        return (
            model.target in self._comes_back
            and model.model in self._idle_since
            and now - self._idle_since[model.model] < self._linger_of(model.model)
        )

    def _linger_of(self, model: str) -> float:
        return self.dials.linger_for(self.estimates.swap(model, self._sizes.get(model, 0)))

    def _age_of(self, target: Target) -> float:
        size = self._queues[target].head.size
        return self.dials.age_for(self.estimates.swap(target.model, size))

    def _next_wake(self, view: PoolView, now: float) -> float | None:
        times: list[float] = []
        loading = self.side is not None or (self.swap is not None and self.swap.loading)
        for target, queue in self._queues.items():
            if self._is_loading(target):
                continue
            age_at = queue.head.enqueued + self._age_of(target)
            if age_at > now:
                times.append(age_at)
            if loading or target in view.ready:
                continue
            if queue.retry_at > now:
                times.append(queue.retry_at)
            wish = self._plan(target, view, now)
            if wish.kind in (PlanKind.SETTLE, PlanKind.BLOCKED):
                times.append(now + _SETTLE_POLL_S)
            for victim in wish.victims:
                if self._lingering(view.models[victim], now):
                    times.append(self._idle_since[victim] + self._linger_of(victim))
        return min(times, default=None)

    # -- small helpers ------------------------------------------------------

    def _is_loading(self, target: Target) -> bool:
        return any(
            load is not None and load.loading and load.target == target
            for load in (self.swap, self.side)
        )

    def _end_load(self, target: Target) -> Swap:
        for name in ("swap", "side"):
            load: Swap | None = getattr(self, name)
            if load is not None and load.loading and load.target == target:
                setattr(self, name, None)
                return load
        raise AssertionError(f"a load of {target} ended that nobody had started")

    def _take_all(self, target: Target, outcome: Outcome) -> tuple[Waiter, ...]:
        queue = self._queues.pop(target, None)
        if queue is None:
            return ()
        waiters = tuple(queue.waiters.values())
        for waiter in waiters:
            waiter.outcome = outcome
        self._waiting -= len(waiters)
        return waiters
