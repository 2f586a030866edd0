"""A pool without memory or time, driven exactly as the runtime drives the real one.

The world holds the state of the models and of the requests, asks the policy
what to do and carries it out. It does not know durations: whoever drives it (the
simulator in virtual time, or a test step by step) says when a load or an unload ends.
After each event the whole contract K1 to K8 is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.contract import Contract
from benchmarks.simulation.sim_types import (
    Broken,
    Counts,
    LoadJob,
    Mark,
    Model,
    Request,
)
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import (
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
    Target,
    Undrain,
    Waiter,
)
from omlx_admission.core.policy.planner import never_fits

#: As in the runtime: repetitions of one step until nothing more follows.
MOST_STEPS = 16


@dataclass(eq=False)
class World:
    """See the module's text.

    Args:
        tracks_loading: whether ``used`` counts the bytes of a load in progress, as
            the device sees them or not yet (the real pool books them at the end).
        on_end: called when a request got its outcome.
        refusing: called where the runtime works out a ``Retry-After``: before a
            request expires, or is refused at the door for a shortage that passes. It
            returns after how many seconds the client will be back, if it will.
        strict: check the contract after every event.
    """

    policy: AdmissionPolicy
    models: dict[str, Model]
    ceiling: int = 0
    max_models: int = 0
    never_refuse: bool = False
    tracks_loading: bool = False
    max_queue: int = 100_000
    now: float = 0.0
    soft_residue: int = 0
    hard_residue: int = 0
    strict: bool = True
    on_end: Callable[[Request], None] = lambda _request: None
    counts: Counts = field(default_factory=Counts)
    requests: list[Request] = field(default_factory=list)
    job: LoadJob | None = None
    log: list[tuple[float, str, str]] = field(default_factory=list)
    evicted: Callable[[str], None] = lambda _model: None
    on_cancel: Callable[[LoadJob], None] = lambda _job: None
    refusing: Callable[[Request], float | None] = lambda _request: None
    _last_granted: dict[Target, int] = field(default_factory=dict)
    closing: bool = False
    #: What of the ceiling is fixed; 0: all of it.
    fixed_ceiling: int = 0
    _unseen: bool = False
    _contract: Contract = field(init=False)

    def __post_init__(self) -> None:
        self._contract = Contract(self)

    # -- what the pool looks like -------------------------------------------

    def tracked(self) -> int:
        """Bytes of models: resident, loading and unloading."""
        return sum(m.size for m in self.models.values() if m.holds_memory)

    def view(self, targets: Iterable[Target]) -> PoolView:
        """The pool as the policy sees it."""
        views = {}
        tracked = 0
        for m in self.models.values():
            if not m.holds_memory:
                continue
            if self.tracks_loading or not m.loading:
                tracked += m.size
            views[m.name] = ModelView(
                m.name,
                m.size,
                m.variant,
                m.busy,
                m.leases,
                m.pinned,
                m.loading,
                m.unloading,
                m.last_used,
                places=m.places,
                group=m.exclusive,
                resting=m.resting,
                read=m.read,
            )
        committed = tracked + self.hard_residue
        return PoolView(
            models=views,
            ready=frozenset(t for t in targets if self.is_ready(t)),
            unknown=frozenset(
                t
                for t in targets
                if t.model not in self.models or not self.models[t.model].registered
            ),
            ceiling=self.ceiling,
            fixed_ceiling=self.fixed_ceiling or self.ceiling,
            used=committed + self.soft_residue,
            committed=committed,
            never_refuse=self.never_refuse,
            max_models=self.max_models,
            exclusive={
                t: group
                for t in targets
                if (group := self.models[t.model].exclusive) is not None
            },
        )

    def is_ready(self, target: Target) -> bool:
        """Whether the queue may grant ``target`` now."""
        m = self.models.get(target.model)
        return (
            m is not None
            and m.resident
            and not m.loading
            and not m.unloading
            and m.mark is not Mark.FOREIGN
            and m.variant == target.variant
        )

    # -- requests -----------------------------------------------------------

    def arrive(
        self, target: Target, budget: float = 300.0, *, context: object = None
    ) -> Request:
        """A request arrives: served at once, refused at the door, or queued."""
        request = Request(len(self.requests), target, self.now, budget, context=context)
        self.requests.append(request)
        model = self.models.get(target.model)
        if model is None or not model.registered:
            self._end(request, Outcome.REFUSED)
            return request
        if (
            self.is_ready(target)
            and model.mark is None
            and target.model not in self.policy.gated
            and target.model not in self.policy.paced
            and not model.full
        ):
            self._take(model)
            self._granted(request)
            return request
        if self.closing:
            self._end(request, Outcome.SHUT_DOWN)
            return request
        if budget <= 0 or self.policy.waiting >= self.max_queue:
            view = self.view((target,))
            if target in view.ready and target.model not in self.policy.gated:
                self._take(model)
                self._granted(request)
                return request
            if target in view.ready or not never_fits(target, model.size, view):
                self.refusing(request)
            self._end(request, Outcome.REFUSED)
            return request
        joins = self.policy.head(target) is not None
        request.waiter = self.policy.enqueue(
            target, model.size, self.now, self.now + budget, request
        )
        if not joins:
            self.step()
        loading = self.job is not None and self.job.target == target
        if request.outcome is None and not joins and not loading:
            view = self.view((target,))
            if target not in view.ready and never_fits(target, model.size, view):
                raise Broken(f"K2: {target} never fits, yet it waits")
        return request

    def finish(self, request: Request) -> None:
        """A granted request is done: its lease is released."""
        assert request.holds_lease
        request.holds_lease = False
        model = self.models[request.target.model]
        model.leases -= 1
        model.last_used = self.now
        self.released(model)

    def leave(self, request: Request, outcome: Outcome) -> bool:
        """The client leaves or its budget ends while it waits."""
        assert request.waiter is not None
        back_in = None
        if outcome is Outcome.EXPIRED and request.outcome is None:
            back_in = request.back_in = self.refusing(request)
        if not self.policy.leave(request.waiter, outcome, self.now, back_in):
            return False
        self._end(request, outcome)
        self.step()
        return True

    def released(self, model: Model) -> None:
        """Somebody stopped using ``model``."""
        if not model.busy and model.mark is Mark.FOREIGN:
            self.begin_unload(model.name)
        self.policy.used(model.name, self.now)
        if self.policy.active:
            self.step()

    def changed(self) -> None:
        """Something changed in the pool that is no request."""
        if self.policy.active:
            self.step()

    def shut_down(self) -> None:
        """The server stops."""
        self.closing = True
        for waiter in self.policy.shut_down():
            self._end(_request(waiter), Outcome.SHUT_DOWN)
        for name in self.policy.marked:
            if self.models[name].mark is Mark.OURS:
                self.models[name].mark = None

    # -- the pool's own events ----------------------------------------------

    def begin_unload(self, name: str) -> None:
        """A resident model starts to leave."""
        m = self.models[name]
        if m.busy:
            raise Broken(f"K4: {name} is unloaded while it is in use")
        assert m.resident
        assert not m.unloading
        assert not m.loading
        m.unloading = True
        m.resident = False
        self._unseen = True
        m.mark = None
        self.log.append((self.now, "unload", name))
        self.evicted(name)

    def end_unload(self, name: str, *, hard: int = 0, soft: int = 0) -> None:
        """Its memory is back, but for residue that settles later."""
        m = self.models[name]
        assert m.unloading
        m.unloading = False
        m.variant = None
        self.hard_residue += hard
        self.soft_residue += soft
        self.log.append((self.now, "unloaded", name))
        job = self.job
        if job is not None and job.unload == name:
            job.unload = None
        self.changed()

    def stray_begins(self, name: str) -> None:
        """Somebody uses a resident model without a lease; nobody announces that."""
        self.models[name].strays += 1
        self._unseen = True

    def stray_ends(self, name: str) -> None:
        """And stops; the runtime polls busy models without a lease."""
        m = self.models[name]
        m.strays -= 1
        if not m.busy and m.mark is Mark.FOREIGN:
            self.begin_unload(name)
        self.changed()

    def add_residue(self, *, hard: int = 0, soft: int = 0) -> None:
        """Memory of no model appears; nobody announces that."""
        self.hard_residue += hard
        self.soft_residue += soft
        self._unseen = True

    def settle(self, *, hard: int = 0, soft: int = 0) -> None:
        """Residue is gone."""
        self.hard_residue -= hard
        self.soft_residue -= soft
        self.changed()

    # -- the load task, stage by stage --------------------------------------

    def advance_load(self) -> str:
        """Do the next stage of the load task; what it does now is the answer.

        ``"unloading"``: an eviction is under way, call again when it ended.
        ``"loading"``: call :meth:`end_load` when it ended. ``"over"``: refused, or
        the model was there already.
        """
        job = self.job
        assert job is not None
        if job.unload is not None:
            return "unloading"
        target = self.models[job.target.model]
        if job.stage == "created":
            job.stage = "evicting"
            if target.mark is Mark.OURS:
                target.mark = None
            if target.mark is Mark.FOREIGN:
                return self._refused()
            if self.is_ready(job.target):
                return self._loaded(job)
        while job.victims:
            m = self.models.get(job.victims[0])
            if m is None or not m.holds_memory:
                job.victims.pop(0)
                continue
            if m.loading or (m.resident and (m.busy or (m.pinned and m is not target))):
                return self._refused()
            job.victims.pop(0)
            job.unload = m.name
            if m.resident:
                self.begin_unload(m.name)
            return "unloading"
        if target.holds_memory or not target.registered or self._no_room(target):
            return self._refused()
        job.stage = "loading"
        target.loading = True
        self._unseen = True
        self.log.append((self.now, "load", target.name))
        return "loading"

    def _no_room(self, target: Model) -> bool:
        count = sum(m.holds_memory for m in self.models.values()) + 1
        if self.max_models and count > self.max_models:
            return True
        if self.ceiling <= 0 or self.never_refuse:
            return False
        return self.tracked() + self.hard_residue + target.size > self.ceiling

    def end_load(self, result: str) -> None:
        """The load task ends: ``"ok"``, ``"refused"`` (passing) or ``"failed"``."""
        job = self.job
        assert job is not None
        assert job.stage == "loading"
        self.models[job.target.model].loading = False
        if result == "ok":
            self.models[job.target.model].variant = job.target.variant
            self._loaded(job)
        elif result == "refused":
            self._refused()
        else:
            self.job = None
            self.counts.failed_loads += 1
            for waiter in self.policy.load_failed(job.target):
                self._end(_request(waiter), Outcome.FAILED)
            self.step()

    def cancel_load(self) -> None:
        """A load that hung is cancelled by whoever drives the world."""
        job = self.job
        assert job is not None
        if job.stage == "loading":
            self.models[job.target.model].loading = False
            self.models[job.target.model].resting = 0.0
        self._refused()

    def set_ceiling(self, ceiling: int) -> None:
        """The enforcer moves the ceiling; what is loaded already stays for now."""
        self.ceiling = ceiling
        self._contract.overhang = self.tracked()
        self.changed()

    def _loaded(self, job: LoadJob) -> str:
        self.job = None
        m = self.models[job.target.model]
        if not m.resident:
            m.resident = True
            m.mark = None
            m.last_used = self.now
            self.counts.swaps += 1
            self.log.append((self.now, "loaded", m.name))
        waiters = self.policy.load_succeeded(job.target, self.now, m.places)
        self._grant(job.target, waiters)
        self.step()
        return "over"

    def _refused(self) -> str:
        job = self.job
        assert job is not None
        self.job = None
        self.counts.refused_loads += 1
        self.policy.load_refused(job.target, self.now)
        self.step()
        return "over"

    # -- the policy's decisions ---------------------------------------------

    def step(self) -> None:
        """As the runtime does: decide on a fresh view until nothing more follows."""
        if self.closing:
            return
        self._unseen = False
        for _ in range(MOST_STEPS):
            self.counts.steps += 1
            view = self.view(self.policy.targets)
            actions = self.policy.step(view, self.now)
            for action in actions:
                self._apply(action, view)
            if not actions:
                break
        else:
            raise Broken("livelock: a step is never done")
        if self.strict:
            self.check()

    def probe(self) -> None:
        """Without any event nothing may be left to do: no lost wake-up (K7).

        What changes unannounced (the start of a load or unload, residue) is seen at the next
        event or safety poll, so a probe says nothing then.
        """
        if self.closing or not self.policy.active or self._unseen:
            return
        if self.policy.wake_at is not None and self.policy.wake_at <= self.now:
            return
        view = self.view(self.policy.targets)
        actions = self.policy.step(view, self.now)
        if actions:
            raise Broken(f"K7: lost wake-up, nothing announced {actions}")

    def _apply(self, action: Action, view: PoolView) -> None:
        match action:
            case Grant(target, waiters):
                self._grant(target, waiters)
            case Drain(models, _):
                self.counts.drains += 1
                self._mark(models)
            case Undrain(models):
                self.counts.withdrawn += 1
                for name in models:
                    if self.models[name].mark is Mark.OURS:
                        self.models[name].mark = None
            case Load(target, victims):
                self._start_load(target, victims, view)
            case CancelLoad(target):
                if self.job is None or self.job.target != target:
                    raise Broken(f"no load of {target} can be cancelled")
                self.on_cancel(self.job)
            case Refuse(target, waiters, reason):
                self._refuse(target, waiters, reason, view)

    def _mark(self, models: Sequence[str]) -> None:
        for name in models:
            m = self.models[name]
            if not m.resident:
                raise Broken(f"{name} cannot be drained")
            if m.mark is None:
                m.mark = Mark.OURS

    def _grant(self, target: Target, waiters: Sequence[Waiter]) -> None:
        if not waiters:
            return
        if not self.is_ready(target):
            raise Broken(f"B08: {target} is granted but does not serve")
        for waiter in waiters:
            if waiter.sequence < self._last_granted.get(target, 0):
                raise Broken(f"K7: {target} is not served first in, first out")
            self._last_granted[target] = waiter.sequence
            if self.models[target.model].full:
                raise Broken(f"R: {target} is granted more than it has places")
            self._take(self.models[target.model])
        for waiter in waiters:
            self._granted(_request(waiter))

    def _start_load(self, target: Target, victims: Sequence[str], view: PoolView) -> None:
        if self.job is not None:
            raise Broken("two loads at once")
        if self.policy.head(target) is None:
            raise Broken(f"K6: {target} is loaded for nobody")
        size = self.models[target.model].size
        leaving = [self.models[v] for v in victims]
        for m in leaving:
            if m.busy or not m.resident or (m.pinned and m.name != target.model):
                raise Broken(f"K4: {m.name} cannot be evicted now")
        left = self.tracked() + self.hard_residue - sum(m.size for m in leaving)
        # Where nothing of ours is in the way the pool itself is asked.
        asked = all(m.pinned for m in view.models.values())
        if not (self.never_refuse or asked) and 0 < self.ceiling < left + size:
            raise Broken(f"K3: {target} would not fit after {list(victims)} left")
        count = len(view.models) - len(leaving) + 1
        if self.max_models and count > self.max_models:
            raise Broken(f"K3: {count} models at once")
        self.job = LoadJob(target, size, list(victims), self.now)

    def _refuse(
        self, target: Target, waiters: Sequence[Waiter], reason: RefusalReason, view: PoolView
    ) -> None:
        if reason is RefusalReason.NEVER_FITS and not never_fits(
            target, self.models[target.model].size, view
        ):
            raise Broken(f"K1: {target} is refused for good though it could fit")
        for waiter in waiters:
            self._end(_request(waiter), Outcome.REFUSED)

    def _take(self, m: Model) -> None:
        m.leases += 1
        m.last_used = self.now

    def _granted(self, request: Request) -> None:
        request.holds_lease = True
        self._end(request, Outcome.GRANTED)

    def _end(self, request: Request, outcome: Outcome) -> None:
        if request.outcome is not None:
            raise Broken(f"K7: request {request.number} ended twice")
        request.outcome = outcome
        request.ended = self.now
        self.on_end(request)

    # -- the contract -------------------------------------------------------

    def check(self) -> None:
        """Raise :class:`Broken` where the state violates the contract."""
        self._contract.check()

    def check_idle(self) -> None:
        """K8 and K7 at the end: nobody waits, nothing is left."""
        self._contract.check_idle()


def _request(waiter: Waiter) -> Request:
    request = waiter.context
    assert isinstance(request, Request)
    return request
