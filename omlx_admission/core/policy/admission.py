"""The admission policy: exhaustive service, an age-triggered gate and a linger.

Pure: events and a view of the pool go in, actions come out, time is an
argument. Two rules keep it right.

* Every decision is made in :meth:`AdmissionPolicy.step`, from the whole state
  and a fresh view. Events only change state; nothing is decided from a delta.
* A waiter leaves the queue in ``queues.py`` only, and its outcome is set there.

Theory of operation. The loaded model serves freely ("exhaustive service":
fewest swaps) until another model has been waited for W seconds. Then
its gate closes: new requests for it queue, it drains, and the swap goes to the
model that was waited for longest. That bounds every wait by
``W + R + (M-2)(S + ceil(q/C) R) + S`` with R the longest residual of a running
request, S the swap, M models, q waiters and C slots a model. R is about two answers
whatever waits for the model, because grants keep pace with what its engine takes
(``places_for``): a request without a place waits here, in order, and is no part of
the drain. It does not grow older while its model serves, so a long queue on one side
cannot take the other's turn away.

Where n models wait they share W: a gate closes when the oldest demand is W/n old
and the loaded model has had a turn of W/n since its load. Else the second in
line becomes due while the first still loads, and the swap to the first buys a
single request. But for a moment (h, W/4 at most) no model's turn outlasts the W of
another, so the bound stands wherever R + S is below three quarters of W.

An idle model is given up at once, unless models have shown lately that they come
back within h seconds; then it is kept for h. A decision to swap stands: it is
withdrawn only when its last waiter leaves (one that was refused is expected until
the moment it was told), or when the drain has run into its limit, because an engine
that never becomes idle must not hold everybody for ever.

With parking (``Dials.park``) R is no answer's rest any more. What a model in the way runs
is taken out of its engine once its gate has been closed for a fifth of S (what is about to
end ends), it has had its turn (W/2, one S at least), and the answers are old enough: how
long one still takes is not known, but of those whose lengths differ most one that has run
for r seconds takes about as long again, so q waiters gain q r by it, and k answers that
are interrupted lose 2 S + T each, T being the other model's turn; they are parked when
q r > k (2 S + T). A waiter is then served within ``W + max(S/5, W/2, S, k (2 S + T)/q) + S``
and the unload, however long the answers are. A parked answer is a waiter of its model,
without a deadline: its silence is the bound of any waiter, ``S + W + ...`` of the model that
took the place, whose own answers are parked for it in turn.
"""

from __future__ import annotations

from dataclasses import replace

from .estimates import Dials, Estimates
from .model import (
    Action,
    CancelLoad,
    Drain,
    Grant,
    Load,
    Outcome,
    Park,
    PoolView,
    RefusalReason,
    Refuse,
    Swap,
    Target,
    Undrain,
    Waiter,
)
from .planner import Plan, PlanKind, after, fits, never_fits
from .retry import estimated_wait_s, part_read, retry_after_s
from .schedule import Schedule

#: So many seconds of an unload that does not end, and the target that waits for
#: its room no longer keeps others waiting. oMLX's settle barrier gives up after 8 s.
_PATIENCE_SETTLE_S = 10.0

#: While room is on its way without an event to announce it (memory that
#: settles, another tool's unload), look again after this many seconds.
_SETTLE_POLL_S = 0.05

#: A load that no request waits for any more, and that has had nothing on the load thread for
#: so many seconds, is given up. Whatever else a load awaits takes less.
_QUIET_S = 2.0

#: The part of the ceiling that parked answers may hold.
_PARKED_SHARE = 0.05

_NEVER = float("inf")


class AdmissionPolicy(Schedule):
    """All state of the queue. One instance per pool; one thread.

    Attributes:
        gated: models that take no new requests now (read on the hot path).
        paced: models that serve, and whose requests wait for a place (the same).
        wake_at: when :meth:`step` should run again though nothing happened;
            None when only an event can change anything.
    """

    def __init__(self, dials: Dials | None = None, estimates: Estimates | None = None) -> None:
        super().__init__(dials, estimates)
        self.gated: frozenset[str] = frozenset()
        self.paced: frozenset[str] = frozenset()
        self._in_turn: tuple[Target, ...] = ()
        self._released_at: dict[str, float] = {}
        #: Models that drain and were told to be parked.
        self._parking: set[str] = set()
        self.wake_at: float | None = None
        self._latest = 0.0

    def estimate(self, target: Target, size: int, view: PoolView, now: float) -> float:
        """Seconds until ``target`` could be served, whether or not a request waits for it."""
        if target in view.ready and target.model not in self.gated:
            queue = self.queues.get(target)
            if queue is None:
                return 0.0
            return len(queue.waiters) * self.estimates.gap(target.model)
        return estimated_wait_s(self, target, size, view, now)

    def retry_in(
        self, target: Target, size: int, view: PoolView, now: float, patience: float
    ) -> float:
        """Seconds for ``Retry-After``; ``patience`` is what the client can wait then."""
        served = self.estimate(target, size, view, now)
        for load in self.loads:
            if load.target == target and self.is_late(load, now) and not part_read(load, view):
                # It may end at any moment: who waits is there then.
                return min(served, patience / 4)
        return retry_after_s(served, patience)

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
        keep: frozenset[str] = frozenset(),
        unpaced: bool = False,
        parked: bool = False,
    ) -> Waiter:
        """Add a waiter. ``since`` keeps the age of one that has waited before.

        ``keep`` are models that must not leave for it, because it uses them itself.
        ``unpaced``: it takes no place of the engine. ``parked``: see :class:`Waiter`.
        """
        self._latest = max(self._latest, now)
        self._sizes[target.model] = size
        if target not in self.queues:
            self.linger.wanted(target, now)
        enqueued = now if since is None else since
        waiter = self.queues.enqueue(
            target, size, now, deadline, context, enqueued, unpaced, parked
        )
        waiter.keep = keep
        return waiter

    def leave(
        self, waiter: Waiter, outcome: Outcome, now: float, back_in: float | None = None
    ) -> bool:
        """End a wait from outside (expired, cancelled). False if it had ended already.

        ``back_in`` is after how many seconds its client was told to come back.
        """
        self._latest = max(self._latest, now)
        back_by = -_NEVER if back_in is None else now + back_in
        return self.queues.leave(waiter, outcome, now, back_by)

    def used(self, model: str, now: float) -> None:
        """A request of ``model`` ended: if it is idle now, it is idle since now."""
        self._latest = max(self._latest, now)
        self.linger.idle(model, now)
        if model in self.paced:
            before = self._released_at.get(model)
            if before is not None:
                self.estimates.saw_gap(model, now - before)
            self._released_at[model] = now
        if model not in self._marked:
            # It takes requests again: which one has ended is not known.
            self.busy_since.pop(model, None)

    def keep_for_first_use(self, model: str, now: float) -> None:
        """``model`` serves, and was asked for by hand: others' swaps leave it for a moment.

        Until it is used, or the moment ends. Asking again does not prolong it.
        """
        self.by_hand.setdefault(model, now + self.dials.for_first_use)

    def first_use(self, model: str) -> None:
        """``model`` is handed to a request: it was worth the load."""
        self.by_hand.pop(model, None)

    def load_succeeded(
        self, target: Target, now: float, places: int | None = None
    ) -> tuple[Waiter, ...]:
        """``target`` is resident: its waiters are granted in this step.

        Newcomers that arrived during the load are among them. Returns the first
        ``places`` of them in order, without a number all; the caller takes their leases
        before it does anything else. The others follow as places fall free.
        """
        swap = self._end_load(target)
        self.estimates.saw_swap(target.model, now - swap.load_started)
        self.loaded_at[target.model] = now
        waiters = self.queues.take(target, Outcome.GRANTED, places)
        # Loaded for clients that have all left, it is not worth keeping a moment.
        self.linger.idle(target.model, now if waiters else -_NEVER)
        return waiters

    def load_refused(self, target: Target, now: float) -> None:
        """The pool found no room after all: the waiters stay, the next try is later."""
        self._end_load(target)
        queue = self.queues.get(target)
        if queue is not None:
            queue.load_refused(now)

    def load_failed(self, target: Target) -> tuple[Waiter, ...]:
        """The load failed for good: all its waiters end with the cause, once."""
        self._end_load(target)
        return self.queues.take(target, Outcome.FAILED)

    def shut_down(self) -> tuple[Waiter, ...]:
        """Everybody ends. A load in progress still reports its end."""
        if self.swap is not None and not self.swap.loading:
            self.swap = None
        self.gated = self.paced = frozenset()
        return tuple(
            waiter
            for target in self.targets
            for waiter in self.queues.take(target, Outcome.SHUT_DOWN)
        )

    # -- decisions ----------------------------------------------------------

    def step(self, view: PoolView, now: float) -> list[Action]:
        """Decide all that can be decided now. Idempotent for an unchanged view."""
        self._latest = max(self._latest, now)
        actions: list[Action] = []
        self.linger.observe(view, now)
        for target in self._in_turn:
            self.queues.served(target, now)
        self._marked &= view.models.keys()  # a model that left memory took its mark along
        for known in (self.loaded_at, self.no_drain_before, self.busy_since, self.by_hand):
            for gone in known.keys() - view.models.keys():
                del known[gone]
        for name in [m for m, until in self.by_hand.items() if now >= until]:
            del self.by_hand[name]
        for name in [m for m in self.busy_since if not view.models[m].busy]:
            del self.busy_since[name]
        self._refuse_hopeless(view, actions)
        view = self._review_swap(view, now, actions)
        if self.swap is None:
            self.swap, self.concurrent_load = self.concurrent_load, None
        next_due = self.next_due(view, now)
        view = self._grant_ready(view, next_due, now, actions)
        if self.swap is None:
            self._start_swap(view, next_due, now, actions)
        elif not self.swap.loading and self.concurrent_load is None:
            self._advance_drain(view, now, actions)
        self._park(view, now, actions)
        if self.swap is not None and not self.swap.loading and self.concurrent_load is None:
            self._load_beside_drain(view, now, actions)
        self._cancel_hung(view, actions)
        self._unmark_spared(actions)
        self._parking &= self._marked
        # A swap begun above changes who is overdue and whose gate is closed.
        self.gated = self._closed_models(view, self.next_due(view, now), now)
        self._in_turn = tuple(
            t
            for t in self.targets
            if t in view.ready and t.model not in self.gated and not self.is_loading(t)
        )
        self.paced = frozenset(t.model for t in self._in_turn)
        for name in self._released_at.keys() - self.paced:
            del self._released_at[name]
        self.wake_at = self._next_wake(view, now)
        return actions

    def _refuse_hopeless(self, view: PoolView, actions: list[Action]) -> None:
        for target in self.targets:
            if self.is_loading(target):
                continue  # its load answers
            if target in view.unknown:
                reason = RefusalReason.NOT_FOUND
            elif target not in view.ready and never_fits(
                target, self.queues[target].head.size, view
            ):
                reason = RefusalReason.NEVER_FITS
            else:
                continue
            waiters = self.queues.take(target, Outcome.REFUSED)
            actions.append(Refuse(target, waiters, reason))

    def _review_swap(self, view: PoolView, now: float, actions: list[Action]) -> PoolView:
        """End a drain without waiters, with a target that serves, or past its limit."""
        swap = self.swap
        if swap is None or swap.loading:
            return view
        if self.concurrent_load is not None and self.is_late(self.concurrent_load, now):
            # What drains for it serves while it is not known when its turn comes.
            self.swap = None
        elif swap.target not in self.queues and (
            now >= self.held_until(swap)
            or self.next_due(view, now) is not None
            or self._has_parked(swap.victims)
        ):
            self.swap = None
        elif swap.target in view.ready:
            # It was loaded outside of the queue; it was first in line, so it is served.
            self.swap = None
            view = self._grant(swap.target, view, actions)
        elif now >= swap.started + self.dials.drain_limit:
            # Who did not become idle serves again, and is left alone for a while.
            pause = max(self.age_for(swap.target, swap.size), self.dials.drain_limit / 4)
            for name in swap.victims:
                model = view.models.get(name)
                if model is not None and model.busy:
                    self.no_drain_before[name] = now + pause
            self.swap = None
        return view

    def _grant_ready(
        self, view: PoolView, next_due: Target | None, now: float, actions: list[Action]
    ) -> PoolView:
        """Grant what serves; returns the view with the leases that it will have."""
        closed = self._closed_models(view, next_due, now)
        for target in self.targets:
            if target not in view.ready or self.is_loading(target):
                continue  # a load answers, and grants in the step that ends it
            if target.model in closed:
                continue
            view = self._grant(target, view, actions)
        return view

    def _grant(self, target: Target, view: PoolView, actions: list[Action]) -> PoolView:
        """Grant as many as there are places. Their leases count at once: without them
        the model would look idle to the swap that is decided next."""
        model = view.models[target.model]
        waiters = self.queues.take(target, Outcome.GRANTED, model.free)
        if not waiters:
            return view
        actions.append(Grant(target, waiters))
        leased = replace(model, busy=True, leases=model.leases + len(waiters))
        return replace(view, models={**view.models, target.model: leased})

    def _start_swap(
        self, view: PoolView, next_due: Target | None, now: float, actions: list[Action]
    ) -> None:
        order = self.targets
        share = self.competing_targets(view)
        if next_due is not None:
            order = (next_due, *(t for t in order if t != next_due))
        for target in order:
            queue = self.queues[target]
            if target in view.ready:
                continue  # gated: its turn comes after the overdue one
            if now < queue.retry_at:
                if target == next_due:
                    return  # a short pause; its room stays free meanwhile
                continue
            keep = self.protected_until(target, view, now, share) if target == next_due else ()
            planned = self.plan_for(target, view, now, keep)
            if now < queue.disturbs_at and self.in_regular_use(planned, target, view, now):
                continue
            if planned.kind is not PlanKind.SETTLE:
                queue.settling_since = None
            elif queue.settling_since is None:
                queue.settling_since = now
            if planned.kind in (PlanKind.FITS, PlanKind.ASK) or (
                planned.kind is PlanKind.EVICT
                and (target == next_due or self.linger_end(planned, view, now) is None)
            ):
                self.swap = Swap(
                    target, queue.head.size, planned.victims, now, planned.kind.value
                )
                self._load(self.swap, view, now, actions)
                return
            if target != next_due:
                continue
            if planned.kind is PlanKind.DRAIN:
                self.swap = Swap(target, queue.head.size, planned.victims, now, "age")
                self._drain(planned, now, actions)
                return
            if (
                queue.settling_since is not None
                and now < queue.settling_since + _PATIENCE_SETTLE_S
            ):
                return  # its room is about to become free, and is kept for it

    def _drain(self, planned: Plan, now: float, actions: list[Action]) -> None:
        assert self.swap is not None
        self.swap.victims = planned.victims
        fresh = tuple(m for m in planned.busy if m not in self._marked)
        if fresh:
            self._marked.update(fresh)
            for model in fresh:
                self.busy_since.setdefault(model, now)
            actions.append(Drain(fresh, self.swap.target))

    def _load(self, swap: Swap, view: PoolView, now: float, actions: list[Action]) -> None:
        for model in self._marked.intersection(swap.victims):
            if model not in self._parking:
                self.estimates.saw_drain(model, now - swap.started)
        swap.loading = True
        swap.load_started = now
        self._left_at.pop(swap.target.model, None)
        for victim in swap.victims:
            self._left_at[victim] = now
            self.linger.gave_up(view.models[victim].target, now)
            if victim in self.loaded_at:
                self.estimates.saw_stay(victim, now - self.loaded_at[victim])
        actions.append(Load(swap.target, swap.victims))

    def _advance_drain(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """The decision stands; only the way to it may become shorter or longer."""
        swap = self.swap
        assert swap is not None
        queue = self.queues.get(swap.target)
        if queue is None or now < queue.retry_at:
            return  # refused, and expected back: what runs goes on to its end
        planned = self.plan_for(swap.target, view, now)
        if planned.kind in (PlanKind.FITS, PlanKind.EVICT, PlanKind.ASK):
            swap.victims, swap.size = planned.victims, queue.head.size
            self._load(swap, view, now, actions)
        elif planned.kind is PlanKind.DRAIN:
            self._drain(planned, now, actions)
        if planned.kind is not PlanKind.BLOCKED:
            swap.blocked_since = None
        elif swap.blocked_since is None:
            swap.blocked_since = now
        elif now >= swap.blocked_since + _PATIENCE_SETTLE_S:
            self.swap = None  # the ceiling has fallen: what drains serves on meanwhile

    def _park(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """Take out what keeps the swap waiting, once that is due and all of it can be."""
        at = self._park_at(view, now)
        if self.swap is None or at is None or now < at:
            return
        swap = self.swap
        busy = [v for v in swap.victims if view.models[v].busy]
        self._parking.update(busy)
        most = self._most_parked(view, swap)
        most = most // len(busy) if most is not None else None
        actions.append(Park(tuple(busy), swap.target, most))

    def _park_at(self, view: PoolView, now: float) -> float | None:
        """When what runs may be parked for the swap; None: not in this drain."""
        swap = self.swap
        queue = self.queues.get(swap.target) if swap is not None else None
        if not self.dials.park or swap is None or swap.loading or queue is None:
            return None
        models = [view.models[v] for v in swap.victims if v in view.models]
        busy = [m for m in models if m.busy]
        ages = [m.answering for m in busy if m.answering is not None]
        if not busy or len(ages) < len(busy) or self._parking.intersection(swap.victims):
            return None
        seconds = self.estimates.swap(swap.target.model, swap.size)
        turn = self.dials.least_turn(self.age_for(swap.target, swap.size), seconds)
        served = max(self.loaded_at.get(m.model, -_NEVER) for m in busy) + turn
        lost = 2 * seconds + self.estimates.service(swap.target.model, swap.size)
        rest = sum(m.leases for m in busy) * lost / len(queue.waiters)
        return max(swap.started + self.dials.grace(seconds), served, now + rest - max(ages))

    def _most_parked(self, view: PoolView, swap: Swap) -> int | None:
        """Bytes that may be parked: a share of the ceiling, and no more than stay free of
        it beside what will be loaded then, or would have to come back."""
        if view.ceiling <= 0:
            return None
        leaving = sum(view.models[v].size for v in swap.victims)
        booked = sum(m.size for m in view.models.values())
        beside = max(booked, booked - leaving + swap.size)
        share = int(view.ceiling * _PARKED_SHARE)
        return max(0, min(share, view.ceiling - beside) - view.parked)

    def _has_parked(self, models: tuple[str, ...]) -> bool:
        return any(q.parked and t.model in models for t, q in self.queues.items())

    def _load_beside_drain(self, view: PoolView, now: float, actions: list[Action]) -> None:
        """While a drain goes on, load what leaves it, and the swap after it, untouched."""
        swap = self.swap
        assert swap is not None
        later = after(view, swap.target, swap.size, swap.victims)
        for target in self.targets:
            queue = self.queues[target]
            if target == swap.target or target in view.ready or now < queue.retry_at:
                continue
            group = view.exclusive.get(target)
            if group is not None and group == view.exclusive.get(swap.target):
                continue
            planned = self.plan_for(target, view, now, keep=swap.victims)
            if planned.kind not in (PlanKind.FITS, PlanKind.EVICT):
                continue
            if self.linger_end(planned, view, now) is not None:
                continue
            size = queue.head.size
            if target.model in later.models and target.model not in planned.victims:
                continue
            leaving = [later.models[v] for v in planned.victims]
            if fits(later, size, leaving, helper=target.model in view.helpers):
                self.concurrent_load = Swap(target, size, planned.victims, now, "beside")
                self._load(self.concurrent_load, view, now, actions)
                return

    def _cancel_hung(self, view: PoolView, actions: list[Action]) -> None:
        """Give up loads that no thread works for, once all that wait have had their answer.

        However long a load at work takes, it stays: a cancel would free neither its
        thread nor its memory.
        """
        for load in self.loads:
            model = view.models.get(load.target.model)
            wanted = load.target in self.queues
            patience = self.dials.budget if wanted else _QUIET_S
            if model is not None and not load.cancelled and model.resting >= patience:
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
        self, view: PoolView, next_due: Target | None, now: float
    ) -> frozenset[str]:
        """Models whose gate is closed: victims of the swap, and of the next if it is due."""
        closed: set[str] = set()
        later = view
        for load in (self.swap, self.concurrent_load):
            if load is not None:
                closed.update(load.victims)
                later = after(later, load.target, load.size, load.victims)
        if any(self.is_late(load, now) for load in self.loads):
            return frozenset(closed)  # when the next one's turn comes is not known
        if next_due is not None and (self.swap is None or self.swap.target != next_due):
            keep = set(self.protected_until(next_due, view, now, self.competing_targets(view)))
            if now < self.queues[next_due].aged_from + self.age_of(next_due):
                # What loads now has its turn before it.
                keep.update(load.target.model for load in self.loads)
            closed.update(self.plan_for(next_due, later, now, keep).victims)
        return frozenset(closed)

    def _next_wake(self, view: PoolView, now: float) -> float | None:
        times: list[float] = []
        loads = self.loads
        times += [self.late_at(load) for load in loads]
        times += self.by_hand.values()
        if self.swap is not None and not self.swap.loading:
            times.append(self.swap.started + self.dials.drain_limit)
            times.append(self._park_at(view, now) or now)
            if self.swap.target not in self.queues:
                times.append(self.held_until(self.swap))
        share = self.competing_targets(view)
        for target, queue in self.queues.items():
            if self.is_loading(target) or target in view.ready:
                continue
            age = self.age_of(target)
            times += [self.due(target, share), queue.stands_back_until, queue.disturbs_at]
            times.append(queue.aged_from + age)
            times += self.protected_until(target, view, now, share).values()
            if loads:
                continue
            times.append(queue.retry_at)
            planned = self.plan_for(target, view, now)
            if planned.kind in (PlanKind.SETTLE, PlanKind.BLOCKED):
                times.append(now + _SETTLE_POLL_S)
            for victim in planned.victims:
                times.append(self.linger.until(view.models[victim], now) or now)
        return min((time for time in times if time > now), default=None)

    # -- small helpers ------------------------------------------------------

    def _end_load(self, target: Target) -> Swap:
        for name in ("swap", "concurrent_load"):
            load: Swap | None = getattr(self, name)
            if load is not None and load.loading and load.target == target:
                setattr(self, name, None)
                return load
        raise AssertionError(f"a load of {target} ended that was never started")
