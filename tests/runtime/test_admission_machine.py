"""The runtime as a state machine: any order of requests, leaves, loads and failures.

The clock is virtual and the loop is drained after every rule, so a failing run
replays from what Hypothesis prints.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as HypothesisBundle
from hypothesis.stateful import (
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from omlx_admission.core.queue import Admission
from omlx_admission.settings import Settings

from .fake_pool import Broken, FakePool, Model, Refused, Shortage
from .virtual import VirtualLoop

SIZES = {"a": 6, "b": 6, "c": 6, "d": 3, "e": 1, "x": 20}
MODELS = st.sampled_from(sorted(SIZES))


class Queue(RuleBasedStateMachine):
    requests = HypothesisBundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        # Text engines with one slot and with two, and one that takes whatever comes.
        places = {"a": 2, "b": 3, "d": 2}
        models = {n: Model(s, places=places.get(n)) for n, s in SIZES.items()}
        self.pool = FakePool(models, ceiling=10)
        self.admission = Admission(
            self.pool,
            Settings(max_wait_s=120.0, max_queue=8),
            clock=self.loop.time,
        )
        #: Requests that hold a lease: number -> model.
        self.running: dict[int, str] = {}
        self.outcomes: dict[int, str] = {}
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.count = 0

    async def _one(self, number: int, model: str) -> None:
        outcome = "lost"
        try:
            await self.admission.acquire(self.pool.ask(model))
            self.running[number] = model
            outcome = "served"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Refused as error:
            outcome = error.refusal.code
        except Exception as error:
            outcome = type(error).__name__
        finally:
            assert number not in self.outcomes, "a request ended twice"
            self.outcomes[number] = outcome

    # -- rules --------------------------------------------------------------

    @rule(target=requests, model=MODELS)
    def ask(self, model: str) -> int:
        self.count += 1
        number = self.count
        # As the hook does: a resident whose gate is open never meets the queue.
        entry = self.pool.models[model]
        taken = model in self.admission.paced or (
            entry.places is not None and entry.leases >= entry.places
        )
        gated = model in self.admission.gated
        if entry.engine and not entry.loading and not gated and not taken:
            entry.leases += 1
            self.running[number], self.outcomes[number] = model, "served"
            return number
        self.tasks[number] = self.loop.create_task(self._one(number, model))
        self.loop.turn()
        if model == "x":
            assert self.outcomes[number] == "TooLarge", (
                "K2: a permanent refusal waits for nobody"
            )
        return number

    @rule(number=consumes(requests))
    def end(self, number: int) -> None:
        """The client is done, or leaves: release, or cancel what still waits."""
        if number in self.running:
            model = self.running.pop(number)
            self.give_back(model)
        elif number in self.tasks:
            self.tasks[number].cancel()
        self.loop.turn()
        # Granted and cancelled in one turn gives the lease back by itself.
        self.running.pop(number, None) if self.outcomes.get(number) == "cancelled" else None

    @rule(
        pick=st.integers(0, 5),
        error=st.sampled_from([None, None, None, Shortage("none"), Broken("broken")]),
    )
    @precondition(lambda self: self.pool.loads)
    def end_load(self, pick: int, error: Exception | None) -> None:
        names = sorted(self.pool.loads)
        self.pool.end_load(names[pick % len(names)], error)
        self.loop.turn()

    @rule(pick=st.integers(0, 5))
    @precondition(lambda self: self.pool.loads)
    def end_load_and_leave_at_once(self, pick: int) -> None:
        """Every waiter of the model leaves in the very turn that ends its load."""
        names = sorted(self.pool.loads)
        name = names[pick % len(names)]
        self.pool.end_load(name)
        self.loop.turn(1)
        for number, task in self.tasks.items():
            if number not in self.outcomes:
                task.cancel()
        self.loop.turn()

    @rule(seconds=st.sampled_from([0.01, 1.0, 31.0, 121.0]))
    def wait(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @rule(name=MODELS)
    def enforcer(self, name: str) -> None:
        """Memory pressure evicts an idle model behind the queue's back."""
        model = self.pool.models[name]
        if model.engine and model.leases == 0 and not model.loading:
            self.pool.evict(name)
            self.changed()

    @rule(name=MODELS, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.pool.models[name].pinned = pinned
        self.changed()

    # -- on the loop, as oMLX calls them ------------------------------------

    def give_back(self, model: str) -> None:
        self.pool.give_back(model, self.pool.models[model].engine)
        self.loop.call_soon(self.admission.released, model)

    def changed(self) -> None:
        self.loop.call_soon(self.admission.changed)
        self.loop.turn()

    # -- what always holds --------------------------------------------------

    @invariant()
    def every_lease_has_its_request(self) -> None:
        held: dict[str, int] = {}
        for model in self.running.values():
            held[model] = held.get(model, 0) + 1
        for name, model in self.pool.models.items():
            assert model.leases == held.get(name, 0), f"leases of {name}"

    @invariant()
    def memory_stays_under_the_ceiling(self) -> None:
        assert self.pool.used() <= self.pool.ceiling

    @invariant()
    def one_outcome_each(self) -> None:
        waiting = [n for n in self.tasks if n not in self.outcomes]
        assert len(waiting) == self.admission.policy.waiting
        assert not self.admission.broken

    @invariant()
    def nothing_is_gated_for_nobody(self) -> None:
        if self.admission.policy.waiting == 0 and self.admission.policy.swap is None:
            assert self.admission.gated == frozenset()
            assert not any(m.marked for m in self.pool.models.values())

    def teardown(self) -> None:
        try:
            self.everybody_ends()
        finally:
            self.loop.close()

    def everybody_ends(self) -> None:
        """Whoever still waits is served or refused, and nothing is left."""
        for model in self.pool.models.values():
            model.pinned = False
        self.pool.auto = True
        for name in list(self.pool.loads):
            self.pool.end_load(name)
        for _ in range(60):
            self.loop.turn()
            for number, model in list(self.running.items()):
                del self.running[number]
                self.give_back(model)
            self.loop.turn()
            idle = self.admission.policy.waiting == 0 and self.admission.policy.swap is None
            if idle and not self.running:
                break
            self.loop.advance(5.0)
        self.loop.turn()
        assert set(self.outcomes) == set(range(1, self.count + 1))
        assert "lost" not in self.outcomes.values()
        assert self.admission.policy.waiting == 0
        assert self.admission.policy.swap is None
        assert all(m.leases == 0 and not m.marked for m in self.pool.models.values())
        assert not self.admission._loads


TestQueue = Queue.TestCase
TestQueue.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.filter_too_much],
)
