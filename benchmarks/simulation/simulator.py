"""Virtual time: services, loads, unloads and clients on top of :class:`World`.

Everything follows from one seed: durations, the order of simultaneous events,
faults. Ties are shuffled, so no result depends on a polite schedule.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.simulation.sim_types import LoadJob, Model, Request
from benchmarks.simulation.world import World
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import Outcome, Target


@dataclass(frozen=True, slots=True)
class Spec:
    """One model of a scenario: bytes, seconds of its load and unload, slots."""

    name: str
    size: int
    load_s: float = 9.5
    unload_s: float = 0.5
    slots: int = 8
    pinned: bool = False
    exclusive: str | None = None
    places: int | None = None


@dataclass(slots=True, eq=False)
class Job:
    """What a client wants: how long it computes, and what follows its end."""

    service: float
    patience: float | None = None
    then: Callable[[Request], None] = lambda _request: None


class Simulator:
    """Runs one scenario. Build it, :meth:`submit` or :meth:`at`, then :meth:`run`.

    Args:
        specs: the models.
        ceiling: bytes for models.
        load_result: asked at the end of every load: ``"ok"``, ``"refused"``,
            ``"failed"`` or ``"hang"``.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        specs: Iterable[Spec],
        ceiling: int,
        seed: int = 0,
        *,
        max_models: int = 0,
        max_queue: int = 100_000,
        never_refuse: bool = False,
        strict: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.specs = {s.name: s for s in specs}
        self.world = World(
            policy,
            {
                s.name: Model(s.name, s.size, s.pinned, exclusive=s.exclusive, places=s.places)
                for s in self.specs.values()
            },
            ceiling,
            max_models,
            never_refuse,
            max_queue=max_queue,
            strict=strict,
            on_end=self._ended,
        )
        self.world.evicted = self._evicted
        self.world.on_cancel = self._cancel_load
        self.load_result: Callable[[str], str] = lambda _model: "ok"
        self.unload_seconds: Callable[[str], float] = lambda m: self.specs[m].unload_s
        self.events = 0
        self.last_done = 0.0
        self._heap: list[tuple[float, float, int, Callable[[], object]]] = []
        self._sequence = 0
        self._running: dict[str, int] = dict.fromkeys(self.specs, 0)
        self._queued: dict[str, deque[Request]] = {n: deque() for n in self.specs}
        self._poll_at: float | None = None

    # -- clients ------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.world.now

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Run ``event`` at ``time``; simultaneous ones in random order."""
        self._sequence += 1
        entry = (max(time, self.now), self.random.random(), self._sequence, event)
        heapq.heappush(self._heap, entry)

    def submit(
        self,
        target: Target | str,
        job: Job,
        *,
        budget: float = 1e9,
    ) -> Request:
        """A request arrives now."""
        if isinstance(target, str):
            target = Target(target)
        request = self.world.arrive(target, budget, context=job)
        if request.outcome is None:
            self.at(self.now + budget, lambda: self._expire(request))
        if job.patience is not None and request.outcome in (None, Outcome.GRANTED):
            self.at(self.now + job.patience, lambda: self.client_leaves(request))
        return request

    def client_leaves(self, request: Request) -> None:
        """The client of ``request`` is gone: queued, granted or served, whatever it is."""
        if request.outcome is None:
            self.world.leave(request, Outcome.CANCELLED)
        elif request.holds_lease:
            self._done(request)

    def _expire(self, request: Request) -> None:
        if request.outcome is None:
            self.world.leave(request, Outcome.EXPIRED)

    def _ended(self, request: Request) -> None:
        job = request.context
        assert isinstance(job, Job)
        if request.outcome is Outcome.GRANTED:
            # As in the runtime, the caller runs in a later turn of the loop.
            self.at(self.now, lambda: self._serve(request))
        else:
            job.then(request)

    def _serve(self, request: Request) -> None:
        if not request.holds_lease:
            return
        name = request.target.model
        if self._running[name] >= self.specs[name].slots:
            self._queued[name].append(request)
            return
        self._running[name] += 1
        job = request.context
        assert isinstance(job, Job)
        request.context = (job, self.now)
        self.at(self.now + job.service, lambda: self._done(request))

    def _done(self, request: Request) -> None:
        if not request.holds_lease:
            return
        name = request.target.model
        running = isinstance(request.context, tuple)
        job = request.context[0] if isinstance(request.context, tuple) else request.context
        assert isinstance(job, Job)
        if running:
            self._running[name] -= 1
        else:
            try:
                self._queued[name].remove(request)
            except ValueError:
                pass  # granted in this very turn
        self.last_done = self.now
        self.world.finish(request)
        while running and self._queued[name]:
            following = self._queued[name].popleft()
            if following.holds_lease:
                self._serve(following)
                break
        job.then(request)

    # -- pool ---------------------------------------------------------------

    def _evicted(self, name: str) -> None:
        self.at(self.now + self.unload_seconds(name), lambda: self._unloaded(name))

    def _unloaded(self, name: str) -> None:
        if self.world.models[name].unloading:
            self.world.end_unload(name)

    def _advance_load(self) -> None:
        job = self.world.job
        if job is None or job.stage == "loading" or job.unload is not None:
            return
        if self.world.advance_load() == "loading":
            name = job.target.model
            self.at(self.now + self.specs[name].load_s, lambda: self._load_ended(job))

    def _load_ended(self, job: object) -> None:
        current = self.world.job
        if current is None or current is not job:
            return
        result = self.load_result(current.target.model)
        if result == "hang":
            self._rest(current, self.now)
        else:
            self.world.end_load(result)

    def _rest(self, job: LoadJob, since: float) -> None:
        """Nothing works for this load any more; somebody looks at it every second."""
        if self.world.job is job and not self.world.closing:
            self.world.models[job.target.model].resting = self.now - since
            self.world.step()
            self.at(self.now + 1.0, lambda: self._rest(job, since))

    def _cancel_load(self, job: LoadJob) -> None:
        def cancel() -> None:
            if self.world.job is job:
                self.world.cancel_load()

        self.at(self.now, cancel)

    @property
    def pending(self) -> int:
        """Events still to come."""
        return len(self._heap)

    # -- time ---------------------------------------------------------------

    def run(self, until: float = float("inf"), *, events: int | None = None) -> None:
        """Run until nothing is left, ``until``, or ``events`` more events."""
        while self._heap and (events is None or self.events < events):
            if self._heap[0][0] > until:
                self.world.now = until
                break
            time, _tie, _sequence, event = heapq.heappop(self._heap)
            self.world.now = time
            self.events += 1
            event()
            self._arm()

    def _arm(self) -> None:
        world = self.world
        job = world.job
        if job is not None and job.stage != "loading" and job.unload is None:
            # The load task runs in a later turn of the loop.
            self.at(self.now, self._advance_load)
        wake = world.policy.wake_at if world.policy.active and not world.closing else None
        if wake != self._poll_at:
            self._poll_at = wake
            if wake is not None:
                self.at(wake, lambda: self._tick(wake))

    def _tick(self, armed_for: float) -> None:
        if armed_for != self._poll_at:
            return  # armed anew since
        self._poll_at = None
        if self.world.policy.active:
            self.world.step()
