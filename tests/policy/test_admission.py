"""Rules of the policy one by one, each in the smallest situation that shows it."""

from __future__ import annotations

import math

import pytest

from benchmarks.simulation.sim_types import Mark, Model, Request
from benchmarks.simulation.world import World
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials, Estimates
from omlx_admission.core.policy.model import Grant, Outcome, Target

A, B, C, D, E = (Target(n) for n in "ABCDE")
SIZES = {"A": 60, "B": 60, "C": 60, "D": 30, "E": 10}
#: So that the prior expects 10 s for 60: W is 140 s, h is 5 s.
ESTIMATES = {"seconds_per_byte": 9.5 / 60}


def house(
    resident: str = "A", *, dials: Dials | None = None, places: int | None = None
) -> World:
    world = World(
        AdmissionPolicy(dials or Dials(), Estimates(**ESTIMATES)),
        {n: Model(n, s, places=places) for n, s in SIZES.items()},
        100,
    )
    for name in resident:
        world.models[name].resident = True
    return world


def at(world: World, seconds: float) -> None:
    """The policy's alarm rings, as the runtime arms it, until ``seconds``."""
    while (wake := world.policy.wake_at) is not None and wake <= seconds:
        world.now = max(world.now, wake)
        world.step()
    world.now = seconds
    world.probe()


def cancelled_at(world: World) -> list[float]:
    """When loads are given up, as it happens."""
    times: list[float] = []
    world.on_cancel = lambda _job: times.append(world.now)
    return times


def load(world: World, result: str = "ok", seconds: float = 10.0) -> None:
    """Carry the load task in progress through."""
    while world.job is not None:
        stage = world.advance_load()
        if stage == "unloading":
            job = world.job
            assert job is not None
            assert job.unload is not None
            world.end_unload(job.unload)
        elif stage == "loading":
            world.now += seconds
            world.end_load(result)
            return


class TestFirstSwap:
    def test_an_idle_resident_is_given_up_in_the_same_step(self) -> None:
        world = house()
        world.arrive(B)
        assert world.job is not None
        assert world.job.victims == ["A"]

    def test_any_sufficient_idle_victim_will_do(self) -> None:
        """Nobody insists on a busy first choice while another one idles."""
        world = house("DA")
        world.models["D"].last_used = -1
        world.arrive(D)
        world.arrive(B)
        assert world.job is not None
        assert world.job.victims == ["A"]


class TestGate:
    def test_it_closes_when_the_waiter_is_w_old_and_not_before(self) -> None:
        world = house()
        user = world.arrive(A)
        world.arrive(B)
        at(world, 139.9)
        assert world.arrive(A).outcome is Outcome.GRANTED
        at(world, 140.0)
        assert world.models["A"].mark is Mark.OURS
        assert world.arrive(A).outcome is None
        world.finish(user)

    def test_waiting_models_share_w(self) -> None:
        world = house()
        world.arrive(A)
        world.arrive(B)
        world.arrive(C)
        at(world, 69.9)
        assert not world.policy.gated
        at(world, 70.0)
        assert world.policy.gated == {"A"}

    def test_a_loaded_model_has_its_turn_though_the_next_is_due(self) -> None:
        world = house()
        user = world.arrive(A)
        world.arrive(B)
        world.arrive(C)
        at(world, 80.0)
        world.finish(user)
        load(world)  # B, at 80
        assert world.arrive(B).outcome is Outcome.GRANTED
        at(world, 139.9)
        assert world.arrive(B).outcome is Outcome.GRANTED, "C is 139.9 s old"
        at(world, 140.0)
        assert world.policy.gated == {"B"}, "nobody's turn outlasts another's W"

    def test_an_overdue_swap_keeps_its_place_in_a_pause(self) -> None:
        world = house()
        user = world.arrive(A)
        world.arrive(B)
        at(world, 140.0)
        world.finish(user)
        load(world, "refused", 0.0)
        world.arrive(D)
        assert world.job is None, "D would fit, but B's pause is short"
        at(world, 141.0)
        assert world.job is not None
        assert world.job.target == B

    def test_but_not_when_it_is_refused_again_and_again(self) -> None:
        world = house()
        user = world.arrive(A)
        world.arrive(B)
        at(world, 140.0)
        world.finish(user)
        for _ in range(6):
            at(world, world.now + 1.0)
            load(world, "refused")
        d = world.arrive(D)
        load(world)
        assert d.outcome is Outcome.GRANTED

    def test_and_refusals_are_forgiven(self) -> None:
        """Else a target refused at first would wait behind the loaded model for ever."""
        world = house("")
        world.arrive(B)
        for _ in range(6):
            load(world, "refused", 0.0)
            at(world, world.now + 1.0)
        world.models["A"].resident = True
        world.models["A"].leases = 1
        assert world.job is not None
        load(world, "refused", 0.0)
        at(world, 150.0)
        assert world.policy.gated == {"A"}


class TestDecision:
    def decided(self, world: World) -> tuple[Request, Request]:
        user, b = world.arrive(A), world.arrive(B)
        at(world, 140.0)
        assert world.models["A"].mark is Mark.OURS
        return user, b

    def test_a_pin_of_the_victim_does_not_leave_its_mark(self) -> None:
        world = house()
        self.decided(world)
        world.models["A"].pinned = True
        world.changed()
        assert world.models["A"].mark is None

    def test_it_may_take_a_shorter_way(self) -> None:
        """Another model that suffices falls idle: it leaves, the drain is called off."""
        world = house("")
        world.models |= {"F": Model("F", 40), "G": Model("G", 50)}
        world.ceiling = 110
        for name in "FG":
            world.models[name].resident = True
        f, g, b = world.arrive(Target("F")), world.arrive(Target("G")), world.arrive(B)
        at(world, 140.0)
        marked = {m.name for m in world.models.values() if m.mark is Mark.OURS}
        assert len(marked) == 1
        other = ({"F", "G"} - marked).pop()
        world.finish(f if other == "F" else g)
        assert world.job is not None
        assert world.job.victims == [other]
        assert not any(m.mark for m in world.models.values())
        load(world)
        assert b.outcome is Outcome.GRANTED

    def test_its_target_may_be_served_by_other_means(self) -> None:
        world = house()
        _, b = self.decided(world)
        world.ceiling = 0
        world.models["B"].resident = True
        world.changed()
        assert b.outcome is Outcome.GRANTED
        assert world.models["A"].mark is None
        assert not world.policy.gated

    def test_others_load_beside_it_if_that_leaves_it_untouched(self) -> None:
        world = house("AE")
        _, b = self.decided(world)
        d = world.arrive(D)
        load(world)
        assert d.outcome is Outcome.GRANTED
        assert b.outcome is None
        assert world.models["A"].mark is Mark.OURS

    def test_also_by_evicting_an_idle_one_that_it_does_not_need(self) -> None:
        world = house("AD")
        self.decided(world)
        world.models["F"] = Model("F", 30)
        f = world.arrive(Target("F"))
        assert world.job is not None
        assert world.job.victims == ["D"]
        load(world)
        assert f.outcome is Outcome.GRANTED

    def test_but_not_by_what_the_swap_needs(self) -> None:
        world = house("A")
        self.decided(world)
        world.models["A"].size = 50
        world.models["F"] = Model("F", 45)
        world.arrive(Target("F"))
        assert world.job is None, "it fits beside A, but would not beside B"

    def test_it_does_not_change_its_mind_among_busy_ones(self) -> None:
        world = house("")
        world.models |= {"F": Model("F", 50), "G": Model("G", 50)}
        world.ceiling = 110
        for name in "FG":
            world.models[name].resident = True
        users = [world.arrive(Target(n)) for n in "FFGGG"]
        world.arrive(B)
        at(world, 140.0)
        assert world.policy.gated == {"F"}
        for user in users[2:4]:
            world.finish(user)
        assert world.models["G"].leases == 1
        assert world.policy.gated == {"F"}
        assert world.counts.drains == 1
        assert world.counts.withdrawn == 0

    def test_a_model_that_keeps_coming_back_is_not_evicted_beside_it(self) -> None:
        world = house("AD")
        self.decided(world)
        world.models["F"] = Model("F", 30)
        back = world.arrive(D)
        world.policy.linger._comes_back[D] = True
        world.finish(back)
        world.arrive(Target("F"))
        assert world.job is None
        at(world, world.now + 3.0)
        assert world.job is not None, "h of D is 2.6 s"

    def test_nothing_of_its_own_exclusive_group_loads_beside_it(self) -> None:
        """Pinned by then, it would make the decision's target impossible."""
        world = house("A")
        world.models["B"].exclusive = world.models["D"].exclusive = "hooks"
        self.decided(world)
        world.arrive(D)
        assert world.job is None
        e = world.arrive(E)
        load(world)
        assert e.outcome is Outcome.GRANTED

    def test_one_carried_out_withdraws_nothing(self) -> None:
        world = house()
        user, b = self.decided(world)
        world.finish(user)
        load(world)
        assert b.outcome is Outcome.GRANTED
        assert world.counts.drains == 1
        assert world.counts.withdrawn == 0


def test_what_is_granted_in_a_step_is_not_evicted_in_the_same_step() -> None:
    """The view still shows it idle."""
    world = house("A")
    policy = world.policy
    for target in (A, B):
        policy.enqueue(target, 60, 0.0, 300.0, Request(0, target, 0.0, 300.0))
    actions = policy.step(world.view((A, B)), 0.0)
    assert [type(a) for a in actions] == [Grant]


class TestLinger:
    def ping_pong(self) -> World:
        """A, given up while idle, was wanted again 3 s later; now it is loaded and idle."""
        world = house()
        b = world.arrive(B)
        world.now = 3.0
        a = world.arrive(A)
        load(world)
        world.finish(b)
        assert world.job is None, "B is given the chance to come back too"
        at(world, world.now + 6.5)  # its load took 13 s
        load(world)
        world.finish(a)
        return world

    def test_an_idle_model_that_came_back_is_kept_for_h(self) -> None:
        world = self.ping_pong()
        world.arrive(B)
        assert world.job is None
        idle = world.now + 4.0
        at(world, idle)
        again = world.arrive(A)
        assert again.outcome is Outcome.GRANTED
        world.finish(again)
        at(world, idle + 4.9)
        assert world.job is None, "h counts from its last use"
        at(world, idle + 5.0)
        assert world.job is not None

    def test_one_that_did_not_use_its_chance_is_not_kept_again(self) -> None:
        world = self.ping_pong()
        b = world.arrive(B)
        at(world, world.now + 5.0)
        load(world)
        world.finish(b)
        world.now += 100.0
        a = world.arrive(A)
        load(world)
        world.finish(a)
        world.arrive(B)
        assert world.job is not None

    def test_the_gate_ends_a_linger(self) -> None:
        world = self.ping_pong()
        world.policy.dials = Dials(max_age=0.0)
        world.arrive(B)
        assert world.job is not None

    def test_a_model_loaded_for_nobody_is_not_kept(self) -> None:
        world = self.ping_pong()
        b = world.arrive(B)
        at(world, world.now + 5.0)
        world.leave(b, Outcome.CANCELLED)
        load(world)
        world.arrive(A)
        assert world.job is not None


class TestDemand:
    def test_clients_that_send_again_keep_their_age(self) -> None:
        """One that gives up after 50 s would else never grow W = 140 s old."""
        world = house()
        world.arrive(A)
        for start in (0.0, 51.0, 102.0):
            world.now = start
            request = world.arrive(B)
            at(world, min(start + 50.0, 139.9))
            if start < 102:
                world.leave(request, Outcome.CANCELLED)
        assert not world.policy.gated
        at(world, 140.0)
        assert world.policy.gated == {"A"}

    def test_but_a_demand_that_pauses_is_over(self) -> None:
        world = house()
        world.arrive(A)
        world.leave(world.arrive(B), Outcome.CANCELLED)
        world.now = 100.0
        world.arrive(B)
        at(world, 239.9)
        assert not world.policy.gated
        at(world, 240.0)
        assert world.policy.gated == {"A"}

    def test_who_was_refused_is_due_when_told_to_come_back(self) -> None:
        world = house()
        world.arrive(A)
        first = world.arrive(B, 20.0)
        at(world, 20.0)
        world.leave(first, Outcome.EXPIRED)
        world.now = 79.0
        world.arrive(B, 20.0)
        assert not world.policy.gated
        at(world, 80.0)
        assert world.policy.gated == {"A"}


class TestHangs:
    """P1: slow and hung are told apart by the load's thread, never by the clock."""

    def test_a_load_at_work_is_never_given_up(self) -> None:
        world = house("", dials=Dials(budget=3.0))
        cancelled = cancelled_at(world)
        request = world.arrive(A)
        world.advance_load()
        at(world, 3.0)
        world.leave(request, Outcome.EXPIRED)
        for hour in range(1, 10):
            world.now = 3600.0 * hour
            world.step()
        assert cancelled == []

    def test_one_without_a_thread_is_given_up_once_nobody_waits(self) -> None:
        world = house("")
        cancelled = cancelled_at(world)
        request = world.arrive(A)
        world.advance_load()
        world.arrive(B)
        world.models["A"].resting = world.now = 20.0
        world.step()
        assert cancelled == []
        world.leave(request, Outcome.EXPIRED)
        assert cancelled == [20.0]
        world.models["A"].resting = world.now = 30.0
        world.step()
        assert cancelled == [20.0], "once"
        world.cancel_load()
        assert world.job is not None
        assert world.job.target == B

    def test_a_load_between_two_jobs_is_not_given_up(self) -> None:
        world = house("")
        cancelled = cancelled_at(world)
        request = world.arrive(A)
        world.advance_load()
        world.now, world.models["A"].resting = 60.0, 1.0
        world.leave(request, Outcome.CANCELLED)
        assert cancelled == []

    def test_clients_that_keep_coming_do_not_keep_a_hung_load(self) -> None:
        """Else nobody else would be served for as long as they come."""
        world = house("")
        cancelled = cancelled_at(world)
        request = world.arrive(A)
        world.advance_load()
        world.models["A"].resting = world.now = 299.0
        world.arrive(A)
        world.leave(request, Outcome.EXPIRED)
        assert cancelled == []
        world.models["A"].resting = world.now = 301.0
        world.step()
        assert cancelled == [301.0]


class TestLateLoads:
    """A load that takes much longer than expected: its end, and the next turn, are unknown."""

    def late(self) -> World:
        """A, of 60, loads since 0 and should have ended at 10; D (30) serves beside it."""
        world = house("D")
        user = world.arrive(D)
        world.arrive(A)
        world.advance_load()
        at(world, 200.0)
        assert user.holds_lease
        return world

    def test_p1_nothing_drains_or_leaves_for_a_load_that_cannot_begin(self) -> None:
        world = self.late()
        world.models["C"].size = 80
        world.arrive(C)
        at(world, 1000.0)
        assert world.policy.gated == frozenset()
        assert world.models["D"].mark is None
        assert world.arrive(D).outcome is Outcome.GRANTED

    def test_the_gate_closes_once_it_has_ended(self) -> None:
        world = self.late()
        world.models["C"].size = 80
        world.arrive(C)
        at(world, 1000.0)
        world.end_load("ok")
        at(world, 1000.0 + 60.0)
        assert "D" in world.policy.gated

    def test_a_drain_waits_until_a_late_load_beside_it_has_ended(self) -> None:
        world = house("A")
        user = world.arrive(A)
        world.arrive(B)
        at(world, 140.0)
        assert world.policy.gated == {"A"}
        world.arrive(D)
        world.advance_load()
        at(world, 150.0)
        assert world.job is not None
        assert world.policy.gated == {"A"}
        at(world, 600.0)
        world.step()
        assert world.policy.gated == frozenset(), "D may take for ever"
        assert world.arrive(A).outcome is Outcome.GRANTED
        world.end_load("ok")
        assert world.policy.gated == {"A"}
        world.finish(user)

    def hint(self, world: World, patience: float) -> float:
        view = world.view((A,))
        return world.policy.retry_in(A, 60, view, world.now, patience)

    def test_retry_after_points_at_the_end_that_its_progress_foretells(self) -> None:
        world = self.late()
        world.models["A"].read = 40
        assert self.hint(world, 20.0) == pytest.approx(100.0 - 5.0)

    def test_without_progress_the_client_is_soon_back(self) -> None:
        """It may end at any moment, and who waits then is served."""
        assert self.hint(self.late(), 20.0) == pytest.approx(5.0)


class TestByHand:
    """C5: who loads a model by hand finds it there at the first use."""

    def waits(self) -> World:
        """A was loaded by hand and is idle; B is wanted, and older than any age."""
        world = house(dials=Dials(max_age=0.0))
        world.policy.keep_for_first_use("A", 0.0)
        world.arrive(B)
        assert world.job is None
        return world

    def test_it_is_left_until_it_is_used(self) -> None:
        world = self.waits()
        at(world, 9.0)
        assert world.job is None
        world.policy.first_use("A")
        world.step()
        assert world.job is not None

    def test_or_until_the_moment_ends(self) -> None:
        world = self.waits()
        for second in range(1, 10):
            at(world, float(second))
            # Asking again does not prolong it.
            world.policy.keep_for_first_use("A", world.now)
        assert world.job is None
        at(world, 10.0)
        assert world.job is not None

    def test_what_wants_the_model_itself_does_not_wait(self) -> None:
        world = house(dials=Dials(max_age=0.0))
        world.policy.keep_for_first_use("A", 0.0)
        world.arrive(Target("A", "other settings"))
        assert world.job is not None


class TestForecast:
    def seconds(self, world: World, target: Target) -> float:
        view = world.view((*world.policy.targets, target))
        return world.policy.estimate(target, SIZES[target.model], view, world.now)

    def test_a_loaded_model_is_served_now(self) -> None:
        assert self.seconds(house(), A) == 0.0

    def test_a_cold_one_after_its_swap(self) -> None:
        assert self.seconds(house(), B) == pytest.approx(10.0)

    def test_the_rest_of_a_load_in_progress(self) -> None:
        world = house("")
        world.arrive(A)
        world.now = 4.0
        assert self.seconds(world, A) == pytest.approx(6.0)
        assert self.seconds(world, B) > 6.0 + 10.0

    def test_it_grows_with_the_queue(self) -> None:
        world = house()
        world.arrive(A)
        alone = self.seconds(world, C)
        world.arrive(B)
        assert self.seconds(world, C) > alone

    def test_it_learns_how_long_loads_take(self) -> None:
        world = house("")
        world.arrive(A)
        world.advance_load()
        world.now = 30.0
        world.end_load("ok")
        world.finish(world.requests[0])
        world.begin_unload("A")
        world.end_unload("A")
        assert self.seconds(world, A) == pytest.approx(30.0)

    @pytest.mark.parametrize("other", [False, True])
    def test_what_has_outlived_a_drain_is_expected_to_run_on(self, other: bool) -> None:
        """Nobody waits for a while, and the same request still runs: it is a long one."""
        world = house()
        world.arrive(A)
        first = world.arrive(B, 160.0)
        at(world, 140.0)
        assert world.policy.gated == {"A"}
        at(world, 160.0)
        world.leave(first, Outcome.EXPIRED)
        assert not world.policy.gated
        if other:
            # It serves others too: who ran at the first drain may long be gone.
            world.finish(world.arrive(A))
        world.now = 200.0
        world.arrive(B)
        at(world, 600.0)
        assert world.policy.gated == {"A"}
        swap = world.policy.swap
        assert swap is not None
        began = swap.started if other else 140.0
        assert self.seconds(world, B) == pytest.approx((600.0 - began) / 2 + 10.0)
        world.finish(world.requests[0])
        assert world.policy.busy_since == {}

    def test_patience_brings_a_client_back_earlier(self) -> None:
        world = house()
        world.arrive(A)
        view = world.view((B,))
        policy = world.policy
        late = policy.retry_in(B, 60, view, 0.0, 0.0)
        early = policy.retry_in(B, 60, view, 0.0, 100.0)
        assert late == pytest.approx(self.seconds(world, B))
        assert early == pytest.approx(late - 25.0)


class TestAlarm:
    def test_none_when_nobody_waits(self) -> None:
        world = house()
        world.step()
        assert world.policy.wake_at is None

    def test_never_in_the_past_and_finite_while_somebody_waits(self) -> None:
        world = house()
        world.arrive(A)
        world.arrive(B)
        for _ in range(20):
            wake = world.policy.wake_at
            assert wake is not None
            assert world.now < wake < math.inf
            world.now = wake
            world.step()

    def test_rounding_does_not_silence_it(self) -> None:
        """At the instant that it named itself the policy acts."""
        for start in (0.1, 1 / 3, 1e6 + 0.7, 123.456):
            world = house()
            world.now = start
            world.arrive(A)
            world.arrive(B)
            assert world.policy.wake_at is not None
            world.now = world.policy.wake_at
            world.step()
            assert world.policy.gated == {"A"}


def test_what_is_remembered_of_models_and_variants_has_a_bound() -> None:
    world = house("")
    for index in range(1000):
        target = Target("E", index)
        request = world.arrive(target, 300.0)
        load(world)
        world.finish(request)
        world.now += 20.0
    policy = world.policy
    sizes = [len(v) for v in vars(policy).values() if isinstance(v, dict | set)]
    sizes += [len(v) for v in vars(policy.linger).values() if isinstance(v, dict)]
    assert max(sizes) <= 300
