"""Places, drains that outlast a refusal, and demands that leave within a moment."""

from __future__ import annotations

import pytest

from benchmarks.simulation.sim_types import Mark, Request
from benchmarks.simulation.traces import bound_s, overlap
from benchmarks.simulation.world import World
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import Outcome, places_for

from .test_admission import A, B, C, at, house, load


def expires(world: World, request: Request, back_in: float) -> None:
    world.refusing = lambda _request: back_in
    world.leave(request, Outcome.EXPIRED)


class TestPlaces:
    @pytest.mark.parametrize(("slots", "places"), [(1, 2), (2, 3), (8, 10), (256, 264)])
    def test_a_few_more_than_run(self, slots: int, places: int) -> None:
        assert places_for(slots) == places

    def test_the_load_grants_the_first_and_each_release_the_next(self) -> None:
        world = house(places=2, resident="")
        requests = [world.arrive(A) for _ in range(5)]
        load(world)
        for first in range(4):
            outcomes = [r.outcome is Outcome.GRANTED for r in requests]
            assert outcomes == [i < first + 2 for i in range(5)]
            world.finish(requests[first])

    def test_a_newcomer_waits_behind_those_who_wait(self) -> None:
        world = house(places=1)
        first, second, third = (world.arrive(A) for _ in range(3))
        assert first.holds_lease
        assert world.policy.paced == {"A"}
        assert not world.policy.gated
        world.leave(second, Outcome.CANCELLED)
        world.finish(first)
        assert third.holds_lease
        assert not world.policy.paced

    def test_those_without_a_place_are_no_part_of_the_drain(self) -> None:
        world = house(places=2, dials=Dials(max_age=10.0))
        crowd = [world.arrive(A) for _ in range(8)]
        for_b = world.arrive(B)
        at(world, 10.0)
        assert world.models["A"].mark is Mark.OURS
        world.finish(crowd[0])
        world.finish(crowd[1])
        assert world.job is not None
        load(world)
        assert for_b.holds_lease

    def test_a_queue_that_is_served_does_not_grow_old(self) -> None:
        """Else B's leftover, older than W, would cut each turn of A to a moment."""
        world = house(places=2, resident="", dials=Dials(max_age=100.0))
        for_b = [world.arrive(B) for _ in range(50)]
        load(world)
        for_a = world.arrive(A)
        # B is served for W, whatever waits for it; then A until B has waited for W anew.
        at(world, world.now + 100.0)
        assert world.policy.gated == {"B"}
        for request in [r for r in for_b if r.holds_lease]:
            world.finish(request)
        load(world)
        assert for_a.holds_lease
        closed = world.now - 10.0
        at(world, closed + 99.0)
        assert not world.policy.gated
        at(world, closed + 101.0)
        assert world.policy.gated == {"A"}

    def test_a_refusal_tells_when_a_place_falls_free(self) -> None:
        world = house(places=1)
        requests = [world.arrive(A) for _ in range(12)]
        for request in requests[:6]:
            world.now += 3.0
            world.finish(request)
        policy = world.policy
        # Five wait, one is answered each three seconds.
        assert policy.estimate(A, 60, world.view((A,)), world.now) == pytest.approx(15.0)


class TestBound:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize(("slots", "clients"), [(1, 6), (8, 60)])
    def test_c3_a_crowd_makes_no_wait_longer_than_two_answers(
        self, slots: int, clients: int, seed: int
    ) -> None:
        """The bound with R of two answers: what runs, and what the engine holds next."""
        run = overlap(AdmissionPolicy(), seed, clients=clients, slots=slots)
        assert len(run.waits) > 5
        longest = max(run.services)
        bound = bound_s(run, age_s=140.0, models=2, queued=0, slots=slots)
        assert run.worst <= bound + longest

    def test_c3_it_is_the_pace_that_does_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.simulation.traces.places_for", lambda _slots: None)
        run = overlap(AdmissionPolicy(), 0, clients=20, slots=1)
        bound = bound_s(run, age_s=140.0, models=2, queued=0, slots=1)
        assert run.worst > bound + max(run.services)


class TestReturn:
    def test_c3_a_drain_goes_on_until_the_announced_return(self) -> None:
        world = house(places=2, dials=Dials(max_age=5.0, budget=60.0))
        running = world.arrive(A)
        first = world.arrive(B, 8.0)
        at(world, 8.0)
        expires(world, first, back_in=20.0)
        assert world.policy.gated == {"A"}
        assert world.models["A"].mark is Mark.OURS
        world.now = 15.0
        world.finish(running)
        # Nothing is loaded for nobody, and A's newcomers wait for that moment.
        assert world.job is None
        late_a = world.arrive(A)
        assert late_a.outcome is None
        world.now = 28.0
        again = world.arrive(B)
        assert world.job is not None
        load(world)
        assert again.holds_lease

    def test_and_no_longer(self) -> None:
        world = house(places=2, dials=Dials(max_age=5.0, budget=60.0))
        running = world.arrive(A)
        first = world.arrive(B, 8.0)
        at(world, 8.0)
        expires(world, first, back_in=20.0)
        world.finish(running)
        late_a = world.arrive(A)
        at(world, 29.0)
        assert late_a.outcome is None
        at(world, 31.0)
        assert late_a.holds_lease
        assert world.policy.swap is None
        assert not world.policy.gated

    def test_it_keeps_no_third_model_waiting(self) -> None:
        world = house(places=2, dials=Dials(max_age=5.0, budget=60.0))
        running = world.arrive(A)
        first = world.arrive(B, 8.0)
        world.now = 4.0
        for_c = world.arrive(C)
        at(world, 8.0)
        expires(world, first, back_in=50.0)
        world.finish(running)
        at(world, 9.5)
        load(world)
        assert for_c.holds_lease

    def test_a_client_that_leaves_ends_it_at_once(self) -> None:
        world = house(places=2, dials=Dials(max_age=5.0))
        world.arrive(A)
        first = world.arrive(B)
        at(world, 8.0)
        world.leave(first, Outcome.CANCELLED)
        assert not world.policy.gated


class TestHasty:
    def typed(self, world: World, count: int) -> None:
        """A request for B with each key, of which each leaves for the next."""
        for _ in range(count):
            request = world.arrive(B)
            world.now += 0.3
            if request.outcome is None:
                world.leave(request, Outcome.CANCELLED)
            world.now += 0.03

    def test_c16_it_evicts_nothing_that_is_in_regular_use(self) -> None:
        world = house(dials=Dials(max_age=10.0))
        world.finish(world.arrive(A))
        self.typed(world, 1)
        # The first one is any first swap, and immediate; then A comes back.
        assert world.job is not None
        load(world, seconds=2.0)
        for_a = world.arrive(A)
        load(world)
        world.finish(for_a)
        swaps = world.counts.swaps
        self.typed(world, 20)
        assert world.job is None
        assert world.counts.swaps == swaps

    def test_c16_but_one_that_stays_is_served_after_a_moment(self) -> None:
        world = house(dials=Dials(max_age=10.0))
        running = world.arrive(A)
        self.typed(world, 20)
        world.finish(running)
        patient = world.arrive(B)
        assert world.job is None
        at(world, world.now + 4.0)
        assert world.job is not None
        load(world)
        assert patient.holds_lease

    def test_c16_what_is_idle_for_long_leaves_at_once(self) -> None:
        world = house(dials=Dials(max_age=10.0))
        running = world.arrive(A)
        self.typed(world, 3)
        world.finish(running)
        world.now += 9.0  # within what is remembered of a demand
        policy = world.policy
        policy.linger.idle("A", world.now - 20.0)
        world.arrive(B)
        assert world.job is not None
