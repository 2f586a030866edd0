"""The policy as a Hypothesis state machine: any order of events, the contract after each.

The world of ``benchmarks.simulation`` carries the policy's decisions out and checks
K1 to K8 in every step; the rules here decide what happens next, so a failure shrinks
to the shortest sequence of events.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from benchmarks.simulation.sim_types import Mark, Model, Request
from benchmarks.simulation.world import World
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import Outcome, Target
from omlx_admission.core.policy.planner import never_fits

pytestmark = pytest.mark.slow

SIZES = {"A": 60, "B": 60, "D": 30, "E": 10, "P": 30, "X": 120}
NAMES = st.sampled_from(sorted(SIZES))
CEILING = 100


class PolicyMachine(RuleBasedStateMachine):
    @initialize(
        age=st.sampled_from([None, 0.0, 5.0, 1e9]),
        linger=st.sampled_from([None, 0.0]),
        budget=st.sampled_from([4.0, 300.0]),
        max_models=st.sampled_from([0, 0, 1, 2]),
        never_refuse=st.booleans(),
        pinned=st.booleans(),
        grouped=st.booleans(),
        places=st.sampled_from([None, 1, 2]),
        back_in=st.sampled_from([None, 1.0, 30.0]),
    )
    def start(
        self,
        age: float | None,
        linger: float | None,
        budget: float,
        max_models: int,
        never_refuse: bool,
        pinned: bool,
        grouped: bool,
        places: int | None,
        back_in: float | None,
    ) -> None:
        self.budget = budget
        models = {
            name: Model(
                name,
                size,
                pinned=pinned and name == "P",
                exclusive="hooks" if grouped and name in "DE" else None,
                places=places,
            )
            for name, size in SIZES.items()
        }
        self.world = World(
            AdmissionPolicy(Dials(age, linger, budget)),
            models,
            CEILING,
            max_models,
            never_refuse,
            refusing=lambda _request: back_in,
        )

    # -- clients ------------------------------------------------------------

    @rule(name=NAMES, variant=st.sampled_from([None, None, "v"]), fast=st.booleans())
    def arrive(self, name: str, variant: str | None, fast: bool) -> None:
        world = self.world
        target = Target(name, variant)
        evicted = len([1 for _, kind, _ in world.log if kind == "unload"])
        raise_if_unavailable = not world.is_ready(target) and never_fits(
            target, SIZES[name], world.view((target,))
        )
        loading = world.job is not None and world.job.target == target
        request = world.arrive(target, 0.0 if fast else self.budget)
        if raise_if_unavailable and world.models[name].registered and not loading:
            # K2: at once, and nobody was evicted for it.
            assert request.outcome is Outcome.REFUSED
            assert evicted == len([1 for _, kind, _ in world.log if kind == "unload"])

    def _running(self) -> list[Request]:
        return [r for r in self.world.requests if r.holds_lease]

    def _waiting(self) -> list[Request]:
        return [r for r in self.world.requests if r.outcome is None]

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self._running())))

    @precondition(lambda self: self._waiting())
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._waiting()))
        assert self.world.leave(request, Outcome.CANCELLED)
        assert not self.world.leave(request, Outcome.EXPIRED), "it ended already"

    @precondition(lambda self: self._waiting())
    @rule()
    def everybody_leaves(self) -> None:
        for request in self._waiting():
            if request.outcome is None:
                self.world.leave(request, Outcome.CANCELLED)
        assert not self.world.policy.waiting

    # -- time ---------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0, 40.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        """Budgets end and the policy's own alarm rings on the way."""
        world = self.world
        until = world.now + seconds
        for _ in range(40):
            wake = world.policy.wake_at if world.policy.active else None
            expiry = min((r.arrived + r.budget for r in self._waiting()), default=None)
            due = min((t for t in (wake, expiry) if t is not None), default=until)
            if due > until:
                break
            world.now = max(world.now, due)
            for request in self._waiting():
                if request.outcome is None and world.now >= request.arrived + request.budget:
                    world.leave(request, Outcome.EXPIRED)
            if wake is not None and world.now >= wake:
                world.step()
        world.now = max(world.now, until)
        world.probe()

    # -- the pool -----------------------------------------------------------

    def _unloading(self) -> list[str]:
        return [m.name for m in self.world.models.values() if m.unloading]

    @precondition(lambda self: self._unloading())
    @rule(data=st.data())
    def unload_ends(self, data: st.DataObject) -> None:
        self.world.end_unload(data.draw(st.sampled_from(self._unloading())))

    @precondition(lambda self: self.world.job is not None and self.world.job.stage != "loading")
    @rule()
    def load_goes_on(self) -> None:
        self.world.advance_load()

    @precondition(lambda self: self.world.job is not None and self.world.job.stage == "loading")
    @rule(result=st.sampled_from(["ok", "ok", "ok", "refused", "failed"]))
    def load_ends(self, result: str) -> None:
        job = self.world.job
        assert job is not None
        waited = [r for r in self._waiting() if r.target == job.target]
        self.world.end_load(result)
        if result == "ok":
            # B07: all that have a place, in the very step that made the model resident.
            places = self.world.models[job.target.model].places
            granted = [r.outcome is Outcome.GRANTED for r in waited]
            assert granted == [places is None or i < places for i in range(len(waited))]
        if result == "failed":
            assert all(r.outcome is Outcome.FAILED for r in waited)

    @precondition(lambda self: self.world.job is not None)
    @rule()
    def load_is_cancelled(self) -> None:
        self.world.cancel_load()

    @rule(name=NAMES)
    def enforcer_evicts_or_marks(self, name: str) -> None:
        m = self.world.models[name]
        if not m.resident or m.unloading:
            return
        if m.busy:
            m.mark = Mark.FOREIGN
        else:
            self.world.begin_unload(name)
        self.world.changed()

    @rule(name=NAMES)
    def pin_or_unpin(self, name: str) -> None:
        self.world.models[name].pinned ^= True
        self.world.changed()

    @rule(name=NAMES)
    def rescan(self, name: str) -> None:
        """Removes a model that holds no memory, or finds it again (B19)."""
        m = self.world.models[name]
        if not m.holds_memory:
            m.registered ^= True
            self.world.changed()
            loading = self.world.job is not None and self.world.job.target.model == name
            if not m.registered and not loading:
                assert not [r for r in self._waiting() if r.target.model == name]

    @rule(name=NAMES, begins=st.booleans())
    def stray(self, name: str, begins: bool) -> None:
        m = self.world.models[name]
        if begins and m.resident and not m.unloading and m.mark is None:
            self.world.stray_begins(name)
        elif not begins and m.strays:
            self.world.stray_ends(name)

    @rule(amount=st.sampled_from([5, 30]))
    def residue_comes_and_goes(self, amount: int) -> None:
        if self.world.soft_residue:
            self.world.settle(soft=self.world.soft_residue)
        else:
            self.world.add_residue(soft=amount)

    # -- always -------------------------------------------------------------

    @invariant()
    def contract(self) -> None:
        self.world.check()

    @invariant()
    def nothing_is_left_to_do(self) -> None:
        """A step that changed nothing decides nothing: no livelock, no lost wake-up."""
        self.world.probe()

    @invariant()
    def estimates_are_finite(self) -> None:
        policy, world = self.world.policy, self.world
        view = world.view(policy.targets)
        for target in policy.targets:
            seconds = policy.estimate(target, SIZES[target.model], view, world.now)
            assert 0 <= seconds < 2e9

    def teardown(self) -> None:
        """Let everything end: nobody waits, and nothing is left (K7, K8)."""
        world = self.world
        for m in world.models.values():
            while m.strays:
                world.stray_ends(m.name)
        for request in self._running():
            world.finish(request)
        for request in self._waiting():
            if request.outcome is None:
                world.leave(request, Outcome.CANCELLED)
        if world.job is not None:
            world.cancel_load()
        for name in self._unloading():
            world.end_unload(name)
        world.now += 100.0  # nobody who was told to come back is expected any more
        world.step()
        world.check_idle()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(
    max_examples=400,
    stateful_step_count=50,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
