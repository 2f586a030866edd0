"""The admission policy: exhaustive service, an age-triggered gate and a linger.

Pure: events and a view of the pool go in, actions come out, time is an
argument. Two rules keep it right.

* Every decision is made in :meth:`AdmissionPolicy.step`, from the whole state
  and a fresh view. Events only change state; nothing is decided from a delta.
* A waiter leaves the queue in exactly one place (:meth:`_take_all` or
  :meth:`leave`), and its outcome is set there.

Theory of operation. The loaded model serves freely ("exhaustive service":
fewest swaps) until another model has been waited for W seconds. Then
its gate closes: new requests for it queue, it drains, and the swap goes to the
model that was waited for longest. That bounds every wait by
``W + R + (M-2)(S + ceil(q/C) R) + S`` with R the longest residual of a running
request, S the swap, M models, q waiters and C slots a model.

Where n models wait they share W: a gate closes when the oldest demand is W/n old
and the loaded model has had a turn of W/n since its load. Else the second in
line becomes due while the first still loads, and the swap to the first buys a
single request. But for a moment (h, W/4 at most) nobody's turn outlasts the W of
another, so the bound stands wherever R + S is below three quarters of W.

An idle model is given up at once, unless models have shown lately that they come
back within h seconds; then it is kept for h. A decision to swap stands: it is
withdrawn only when its last waiter leaves, or when the drain has run into its
limit, because an engine that never becomes idle must not hold everybody for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from omlx_admission.policy.estimates import Dials, Estimates
from omlx_admission.policy.forecast import Occupant, Turn, served_at
from omlx_admission.policy.linger import Linger
from omlx_admission.policy.model import (
    Action,
    CancelLoad,
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
from omlx_admission.policy.planner import Plan, PlanKind, after, fits, plan

#: First and longest pause in seconds before a load that met a passing shortage
#: is tried again; it doubles in between.
_RETRY_FIRST_S = 0.05
_RETRY_LONGEST_S = 1.0

#: So many refused loads in a row, and a target no longer keeps others waiting, until
#: so many seconds have passed without another refusal.
_PATIENCE_REFUSALS = 5
_FORGIVEN_AFTER_S = 30.0

#: So many seconds of an unload that does not end, and the target that waits for
#: its room no longer keeps others waiting. oMLX's settle barrier gives up after 8 s.
_PATIENCE_SETTLE_S = 10.0

#: While room is on its way without an event of ours to announce it (memory that
#: settles, another tool's unload), look again after this many seconds.
_SETTLE_POLL_S = 0.05

#: How many seconds a model keeps the age of its demand after its last waiter was
#: refused (it was told to come back within 60 s) or left (clients that time out
#: send again within seconds). Else a client whose own limit is below W would
#: never grow old enough to be served.
_COMES_BACK_S = {Outcome.EXPIRED: 65.0, Outcome.CANCELLED: 10.0}


#: Whoever is refused comes back within so many seconds (``Retry-After`` is never
#: longer), and should be served then: the target is due by that time.
_BACK_WITHIN_S = 60.0

_NEVER = float("inf")


@dataclass(slots=True)
class _Queue:
    """Waiters of one target, first in first out, each removable in O(1).

    ``since`` is when the demand that they are part of began, ``due_by`` when those who
    were refused have been told to be back at the latest.
    """

    since: float
    due_by: float = _NEVER
    waiters: OrderedDict[int, Waiter] = field(default_factory=OrderedDict)
    retry_at: float = 0.0
    retries: int = 0
    settling_since: float | None = None

    @property
    def stands_back_until(self) -> float:
        if self.retries < _PATIENCE_REFUSALS:
            return -_NEVER
        return self.retry_at + _FORGIVEN_AFTER_S

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters.values()))


@dataclass(frozen=True, slots=True)
class _Demand:
    """What is remembered of a queue whose last waiter was refused or left."""

    since: float
    due_by: float
    until: float


class AdmissionPolicy:
    """All state of the queue. One instance per pool; one thread.

    Attributes:
        gated: models that take no new requests now (read on the hot path).
        swap: the transition that was decided, draining or loading, or None.
        side: a load beside a draining swap that does not touch it, or None.
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
        self._latest = 0.0
        self._marked: set[str] = set()
        self._demands: dict[Target, _Demand] = {}
        self._spared_until: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._loaded_at: dict[str, float] = {}
        self._linger = Linger(self._linger_of)

    # -- what is known ------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._waiting

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets that somebody waits for, the longest wanted first."""
        return tuple(
            sorted(
                self._queues,
                key=lambda t: (self._queues[t].since, self._queues[t].head.sequence),
            )
        )

    @property
    def marked(self) -> frozenset[str]:
        """Models in memory that were told to drain and not told otherwise since."""
        return frozenset(self._marked)

    def head(self, target: Target) -> Waiter | None:
        """The first waiter for ``target``, None if nobody waits for it."""
        queue = self._queues.get(target)
        return queue.head if queue else None

    def waiters(self, target: Target) -> tuple[Waiter, ...]:
        """Who waits for ``target``, in order."""
        queue = self._queues.get(target)
        return tuple(queue.waiters.values()) if queue else ()

    def wanted_since(self, target: Target) -> float | None:
        """When the demand for ``target`` began, None if nobody waits for it."""
        queue = self._queues.get(target)
        return queue.since if queue else None

    def ahead_of(self, waiter: Waiter) -> int:
        """How many models are served before ``waiter``'s by the order of demand."""
        targets = self.targets
        return targets.index(waiter.target) if waiter.target in targets else 0

    def estimate(self, target: Target, size: int, view: PoolView, now: float) -> float:
        """Seconds until ``target`` could be served, whether or not somebody waits for it.

        The transition in progress, then the turns of those that are wanted longer, then
        its own; refined by what was observed of loads, drains and stays.
        """
        if target in view.ready and target.model not in self.gated:
            return 0.0
        free_at, occupant, later = now, None, view
        for load in (self.swap, self.side):
            if load is None:
                continue
            swap = self.estimates.swap(load.target.model, load.size)
            if load.loading:
                # One that takes longer than expected is taken to be half done.
                took = now - load.load_started
                free_at = max(free_at, now + max(swap - took, took / 2 if took > swap else 0))
            else:
                drain = max((self.estimates.drain(v) for v in load.victims), default=0.0)
                took = now - load.started
                drain = max(drain - took, took / 2 if took > drain else 0)
                free_at = max(free_at, now + drain + swap)
            if load.target == target:
                return free_at - now
            later = after(later, load.target, load.size, load.victims)
            occupant = Occupant(load.target.model, free_at, busy=True)
        wish = plan(target, size, later, rank=self._rank(now))
        if wish.kind is PlanKind.FITS:
            occupant = None
        elif occupant is None or occupant.model not in wish.victims:
            occupant = self._last_to_leave(wish, later, now)
        waiting = self._sharing(view) + (target not in self._queues)
        turns = []
        for other in (*self.targets, target) if wish.kind is not PlanKind.FITS else (target,):
            if self._is_loading(other) or other in view.ready:
                continue
            if self.swap is not None and self.swap.target == other:
                continue
            turns.append(self._turn(other, size, waiting, now))
            if other == target:
                break
        turn_s = self.dials.share(self._age_for(target, size), waiting)
        return served_at(turns, occupant, free_at, turn_s, self.estimates) - now

    def retry_in(
        self, target: Target, size: int, view: PoolView, now: float, patience: float
    ) -> float:
        """After how many seconds a client that is refused now does best to come back.

        Before its model serves, by as much as it can wait then: who is in the queue when
        the model is loaded is served for certain, who comes later finds it while its turn
        lasts. With no patience, when it serves.
        """
        served = self.estimate(target, size, view, now)
        return served - min(served * 2 / 3, patience / 4)

    def _turn(self, target: Target, size: int, waiting: int, now: float) -> Turn:
        queue, demand = self._queues.get(target), self._demands.get(target)
        if queue is not None:
            size = queue.head.size
            overdue = queue.head.enqueued + self._age_for(target, size)
            return Turn(target.model, size, self._due(target, waiting), overdue)
        age = self._age_for(target, size)
        due = now + self.dials.share(age, waiting)
        if demand is not None and now <= demand.until:
            due = min(demand.since + self.dials.share(age, waiting), demand.due_by)
        return Turn(target.model, size, due, now + age)

    def _last_to_leave(self, wish: Plan, view: PoolView, now: float) -> Occupant | None:
        leaving = [view.models[v] for v in wish.victims]
        if not leaving:
            return None
        last = max(leaving, key=lambda m: (m.busy, self._loaded_at.get(m.model, 0.0)))
        return Occupant(last.model, self._loaded_at.get(last.model, now), last.busy)

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
        self._latest = max(self._latest, now)
        self._sequence += 1
        enqueued = now if since is None else since
        waiter = Waiter(self._sequence, target, size, enqueued, deadline, context)
        self._sizes[target.model] = size
        queue = self._queues.get(target)
        if queue is None:
            self._linger.wanted(target, now)
            demand = self._demands.pop(target, None)
            queue = self._queues[target] = _Queue(enqueued)
            if demand is not None and now <= demand.until:
                queue.since = min(demand.since, enqueued)
                queue.due_by = demand.due_by
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
        if outcome is Outcome.EXPIRED:
            queue.due_by = min(queue.due_by, waiter.deadline + _BACK_WITHIN_S)
        if not queue.waiters:
            del self._queues[waiter.target]
            self._remember(waiter.target, queue, outcome)
        return True

    def used(self, model: str, now: float) -> None:
        """A request of ``model`` ended: if it is idle now, it is idle since now."""
        self._latest = max(self._latest, now)
        self._linger.idle(model, now)

    def load_succeeded(self, target: Target, now: float) -> tuple[Waiter, ...]:
        """``target`` is resident: all its waiters are granted in this step.

        Newcomers that arrived during the load are among them. Returns them in
        order; the caller takes their leases before it does anything else.
        """
        swap = self._end_load(target)
        self.estimates.saw_swap(target.model, now - swap.load_started)
        self._loaded_at[target.model] = now
        waiters = self._take_all(target, Outcome.GRANTED)
        # Loaded for clients that have all left, it is not worth keeping a moment.
        self._linger.idle(target.model, now if waiters else -_NEVER)
        return waiters

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
        self._latest = max(self._latest, now)
        actions: list[Action] = []
        self._linger.observe(view, now)
        self._marked &= view.models.keys()  # whoever left memory took its mark along
        for known in (self._loaded_at, self._spared_until):
            for gone in known.keys() - view.models.keys():
                del known[gone]
        self._refuse_hopeless(view, actions)
        self._review_swap(view, now, actions)
        if self.swap is None:
            self.swap, self.side = self.side, None
        overdue = self._overdue(view, now)
        self._grant_ready(view, overdue, now, actions)
        view = _as_granted(view, actions)
        if self.swap is None:
            self._start_swap(view, overdue, now, actions)
        elif not self.swap.loading and self.side is None:
            self._advance_drain(view, now, actions)
        if self.swap is not None and not self.swap.loading and self.side is None:
            self._load_beside_drain(view, now, actions)
        self._cancel_hung(now, actions)
        self._unmark_spared(actions)
        # A swap begun above changes who is overdue and whose gate is closed.
        self.gated = self._closed_models(view, self._overdue(view, now), now)
        self.wake_at = self._next_wake(view, now)
        return actions

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

    def _review_swap(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """End a drain for nobody, for a target that serves by now, or past its limit."""
        swap = self.swap
        if swap is None or swap.loading:
            return
        if swap.target not in self._queues:
            self.swap = None
        elif swap.target in view.ready:
            # Somebody else has loaded it; it was first in line, so it is served.
            self.swap = None
            actions.append(Grant(swap.target, self._take_all(swap.target, Outcome.GRANTED)))
        elif now >= swap.started + self.dials.drain_limit:
            # Who did not become idle serves again, and is left alone for a while.
            pause = max(self._age_of(swap.target), self.dials.drain_limit / 4)
            for name in swap.victims:
                model = view.models.get(name)
                if model is not None and model.busy:
                    self._spared_until[name] = now + pause
            self.swap = None

    def _overdue(self, view: PoolView, now: float) -> Target | None:
        """The target that may end lingers and close gates now: wanted long enough."""
        share = self._sharing(view)
        for target in self.targets:
            queue = self._queues[target]
            if self._is_loading(target) or target in view.ready:
                continue
            if now < queue.stands_back_until:
                continue
            if now >= self._due(target, share):
                return target
        return None

    def _due(self, target: Target, sharing: int) -> float:
        """When ``target`` may close the gate of a model that has had its turn."""
        queue = self._queues[target]
        due = queue.since + self.dials.share(self._age_of(target), sharing)
        return min(due, queue.due_by)

    def _sharing(self, view: PoolView) -> int:
        """How many targets wait for a swap."""
        return sum(1 for t in self._queues if t not in view.ready and not self._is_loading(t))

    def _in_turn(self, target: Target, view: PoolView, now: float) -> dict[str, float]:
        """Models that ``target`` must let serve on, and until when: loaded lately, in use.

        A moment is left even where ``target`` is overdue: who comes back just after the
        load that was forecast for it must not have to wait for the next one.
        """
        age = self._age_of(target)
        hard = self._queues[target].head.enqueued + age
        turn = self.dials.share(age, self._sharing(view))
        decided = self.swap.victims if self.swap is not None else ()
        kept: dict[str, float] = {}
        for model in view.models.values():
            if model.model in decided:
                continue
            loaded_at = self._loaded_at.get(model.model, -_NEVER)
            least = min(self._linger_of(model.model), age / 4)
            end = max(
                min(loaded_at + turn, hard),
                loaded_at + least,
                self._spared_until.get(model.model, now),
            )
            if end > now and (model.busy or self._linger.until(model, now) is not None):
                kept[model.model] = end
        return kept

    def _grant_ready(
        self, view: PoolView, overdue: Target | None, now: float, actions: list[Action]
    ) -> None:
        closed = self._closed_models(view, overdue, now)
        for target in self.targets:
            if target not in view.ready or self._is_loading(target):
                continue  # a load answers, and grants in the step that ends it
            if target.model in closed:
                continue
            actions.append(Grant(target, self._take_all(target, Outcome.GRANTED)))

    def _start_swap(
        self, view: PoolView, overdue: Target | None, now: float, actions: list[Action]
    ) -> None:
        order = self.targets
        if overdue is not None:
            order = (overdue, *(t for t in order if t != overdue))
        for target in order:
            queue = self._queues[target]
            if target in view.ready:
                continue  # gated: its turn comes after the overdue one
            if now < queue.retry_at:
                if target == overdue:
                    return  # a short pause; nobody takes its room meanwhile
                continue
            keep = self._in_turn(target, view, now) if target == overdue else ()
            wish = self._plan(target, view, now, keep)
            if wish.kind is not PlanKind.SETTLE:
                queue.settling_since = None
            elif queue.settling_since is None:
                queue.settling_since = now
            if wish.kind in (PlanKind.FITS, PlanKind.ASK) or (
                wish.kind is PlanKind.EVICT
                and (target == overdue or self._linger_end(wish, view, now) is None)
            ):
                self.swap = Swap(target, queue.head.size, wish.victims, now, wish.kind.value)
                self._load(self.swap, view, now, actions)
                return
            if target != overdue:
                continue
            if wish.kind is PlanKind.DRAIN:
                self.swap = Swap(target, queue.head.size, wish.victims, now, "age")
                self._drain(wish, actions)
                return
            if (
                queue.settling_since is not None
                and now < queue.settling_since + _PATIENCE_SETTLE_S
            ):
                return  # its room is on its way: nobody takes it

    def _drain(self, wish: Plan, actions: list[Action]) -> None:
        assert self.swap is not None
        self.swap.victims = wish.victims
        fresh = tuple(m for m in wish.busy if m not in self._marked)
        if fresh:
            self._marked.update(fresh)
            actions.append(Drain(fresh, self.swap.target))

    def _load(self, swap: Swap, view: PoolView, now: float, actions: list[Action]) -> None:
        for model in self._marked.intersection(swap.victims):
            self.estimates.saw_drain(model, now - swap.started)
        swap.loading = True
        swap.load_started = now
        for victim in swap.victims:
            self._linger.gave_up(view.models[victim].target, now)
            if victim in self._loaded_at:
                self.estimates.saw_stay(victim, now - self._loaded_at[victim])
        actions.append(Load(swap.target, swap.victims))

    def _advance_drain(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """The decision stands; only the way to it may become shorter or longer."""
        swap = self.swap
        assert swap is not None
        if now < self._queues[swap.target].retry_at:
            return
        wish = self._plan(swap.target, view, now)
        if wish.kind in (PlanKind.FITS, PlanKind.EVICT, PlanKind.ASK):
            swap.victims = wish.victims
            self._load(swap, view, now, actions)
        elif wish.kind is PlanKind.DRAIN:
            self._drain(wish, actions)

    def _load_beside_drain(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """While a drain goes on, load what leaves it, and the swap after it, untouched."""
        swap = self.swap
        assert swap is not None
        later = after(view, swap.target, swap.size, swap.victims)
        for target in self.targets:
            queue = self._queues[target]
            if target == swap.target or target in view.ready or now < queue.retry_at:
                continue
            group = view.exclusive.get(target.model)
            if group is not None and group == view.exclusive.get(swap.target.model):
                continue
            wish = self._plan(target, view, now, keep=swap.victims)
            if wish.kind not in (PlanKind.FITS, PlanKind.EVICT):
                continue
            if self._linger_end(wish, view, now) is not None:
                continue
            size = queue.head.size
            if target.model in later.models and target.model not in wish.victims:
                continue
            if fits(later, size, [later.models[v] for v in wish.victims]):
                self.side = Swap(target, size, wish.victims, now, "beside")
                self._load(self.side, view, now, actions)
                return

    def _cancel_hung(self, now: float, actions: list[Action]) -> None:
        for load in self._loads():
            if not load.cancelled and now >= self._load_limit(load):
                load.cancelled = True
                actions.append(CancelLoad(load.target))

    def _unmark_spared(self, actions: list[Action]) -> None:
        victims = self.swap.victims if self.swap is not None else ()
        spared = self._marked.difference(victims)
        if spared:
            self._marked -= spared
            actions.append(Undrain(tuple(sorted(spared))))

    # -- gates, linger and time ---------------------------------------------

    def _closed_models(
        self, view: PoolView, overdue: Target | None, now: float
    ) -> frozenset[str]:
        """Models whose gate is closed: victims of the swap, and of the next if it is due."""
        closed: set[str] = set()
        later = view
        for load in (self.swap, self.side):
            if load is not None:
                closed.update(load.victims)
                later = after(later, load.target, load.size, load.victims)
        if overdue is not None and (self.swap is None or self.swap.target != overdue):
            keep = set(self._in_turn(overdue, view, now))
            if now < self._queues[overdue].head.enqueued + self._age_of(overdue):
                # What loads now has its turn before it.
                keep.update(load.target.model for load in self._loads())
            closed.update(self._plan(overdue, later, now, keep).victims)
        return frozenset(closed)

    def _plan(
        self,
        target: Target,
        view: PoolView,
        now: float | None = None,
        keep: Collection[str] = (),
    ) -> Plan:
        size = self._queues[target].head.size
        return plan(target, size, view, rank=self._rank(now), keep=keep)

    def _rank(self, now: float | None) -> Callable[[ModelView], tuple[Any, ...]]:
        """Who leaves first: draining already, not lingering, serving few, used long ago."""

        def rank(model: ModelView) -> tuple[Any, ...]:
            lingers = now is not None and self._linger.until(model, now) is not None
            return (
                model.model not in self._marked,
                lingers,
                model.leases,
                model.last_used,
                model.model,
            )

        return rank

    def _linger_end(self, wish: Plan, view: PoolView, now: float) -> float | None:
        """When the last victim stops lingering; None if none does."""
        ends = [self._linger.until(view.models[v], now) for v in wish.victims]
        return max((end for end in ends if end is not None), default=None)

    def _linger_of(self, model: str) -> float:
        return self.dials.linger_for(self.estimates.swap(model, self._sizes.get(model, 0)))

    def _age_of(self, target: Target) -> float:
        return self._age_for(target, self._queues[target].head.size)

    def _age_for(self, target: Target, size: int) -> float:
        return self.dials.age_for(self.estimates.swap(target.model, size))

    def _load_limit(self, load: Swap) -> float:
        expected = self.estimates.swap(load.target.model, load.size)
        wanted = load.target in self._queues
        return load.load_started + self.dials.load_limit(expected, wanted=wanted)

    def _next_wake(self, view: PoolView, now: float) -> float | None:
        times: list[float] = []
        loads = self._loads()
        times += [self._load_limit(load) for load in loads if not load.cancelled]
        if self.swap is not None and not self.swap.loading:
            times.append(self.swap.started + self.dials.drain_limit)
        share = self._sharing(view)
        for target, queue in self._queues.items():
            if self._is_loading(target) or target in view.ready:
                continue
            age = self._age_of(target)
            times += [self._due(target, share), queue.stands_back_until]
            times.append(queue.head.enqueued + age)
            times += self._in_turn(target, view, now).values()
            if loads:
                continue
            times.append(queue.retry_at)
            wish = self._plan(target, view, now)
            if wish.kind in (PlanKind.SETTLE, PlanKind.BLOCKED):
                times.append(now + _SETTLE_POLL_S)
            for victim in wish.victims:
                times.append(self._linger.until(view.models[victim], now) or now)
        return min((time for time in times if time > now), default=None)

    # -- small helpers ------------------------------------------------------

    def _loads(self) -> list[Swap]:
        return [s for s in (self.swap, self.side) if s is not None and s.loading]

    def _is_loading(self, target: Target) -> bool:
        return any(load.target == target for load in self._loads())

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

    def _remember(self, target: Target, queue: _Queue, outcome: Outcome) -> None:
        """The demand goes on for a while though nobody waits at the moment."""
        now = self._latest
        for old in [t for t, demand in self._demands.items() if demand.until < now]:
            del self._demands[old]
        until = now + _COMES_BACK_S.get(outcome, 0.0)
        self._demands[target] = _Demand(queue.since, queue.due_by, until)


def _as_granted(view: PoolView, actions: list[Action]) -> PoolView:
    """The view with the leases of this step's grants, which the pool takes after it.

    Without them a model granted a moment ago would look idle to the swap decided next.
    """
    granted = [a for a in actions if isinstance(a, Grant)]
    if not granted:
        return view
    models = dict(view.models)
    for grant in granted:
        model = models[grant.target.model]
        leases = model.leases + len(grant.waiters)
        models[model.model] = replace(model, busy=True, leases=leases)
    return replace(view, models=models)
