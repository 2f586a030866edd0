"""Every instant at which a client may leave, by name; afterwards nothing is left of it."""

from __future__ import annotations

import pytest

from benchmarks.simulation.sim_types import Mark, Model, Request
from benchmarks.simulation.world import World
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import Outcome, Target

A, B, D = Target("A"), Target("B"), Target("D")


class Stage:
    """A is resident and in use, B waits; W is 5 s. Stage by stage towards B's load."""

    def __init__(self, max_age: float = 5.0) -> None:
        self.world = World(
            AdmissionPolicy(Dials(max_age=max_age)),
            {n: Model(n, s) for n, s in (("A", 60), ("B", 60), ("D", 30), ("X", 120))},
            100,
        )
        self.world.models["A"].resident = True
        self.user = self.world.arrive(A)
        self.first = self.world.arrive(B)

    def at(self, seconds: float) -> None:
        self.world.now = seconds
        self.world.step()

    def draining(self) -> None:
        self.at(5.0)
        assert self.world.models["A"].mark is Mark.OURS
        assert self.world.policy.gated == {"A"}

    def created(self) -> None:
        self.draining()
        self.world.finish(self.user)
        assert self.world.job is not None

    def evicting(self) -> None:
        self.created()
        assert self.world.advance_load() == "unloading"

    def loading(self) -> None:
        self.evicting()
        self.world.end_unload("A")
        assert self.world.advance_load() == "loading"

    def loaded(self) -> None:
        """The load ends, from whatever stage it is in."""
        world, job = self.world, self.world.job
        assert job is not None
        if job.stage == "created":
            assert world.advance_load() == "unloading"
        if job.unload is not None:
            world.end_unload("A")
            world.advance_load()
        world.end_load("ok")

    def leave(self, request: Request) -> None:
        assert self.world.leave(request, Outcome.CANCELLED)
        assert request.outcome is Outcome.CANCELLED

    def loads(self) -> list[str]:
        return [m for _, kind, m in self.world.log if kind == "load"]


def test_queued() -> None:
    stage = Stage()
    stage.leave(stage.first)
    stage.at(1000.0)
    stage.world.finish(stage.user)
    assert stage.loads() == []
    stage.world.check_idle()


def test_queued_head_next_must_go() -> None:
    stage = Stage()
    second = stage.world.arrive(B)
    stage.leave(stage.first)
    stage.world.finish(stage.user)
    assert stage.world.job is not None
    assert stage.world.policy.head(B) is second.waiter


def test_draining_the_last_waiter_withdraws_the_decision() -> None:
    stage = Stage()
    stage.draining()
    late = stage.world.arrive(A)
    assert late.outcome is None, "the gate is closed"
    stage.leave(stage.first)
    assert late.outcome is Outcome.GRANTED, "and opens in the same step"
    assert stage.world.models["A"].mark is None
    stage.world.finish(late)
    stage.world.finish(stage.user)
    assert stage.loads() == []
    stage.world.check_idle()


def test_draining_not_the_last_one_changes_nothing() -> None:
    stage = Stage()
    stage.draining()
    second = stage.world.arrive(B)
    stage.leave(stage.first)
    assert stage.world.models["A"].mark is Mark.OURS
    stage.world.finish(stage.user)
    stage.loaded()
    assert second.outcome is Outcome.GRANTED


@pytest.mark.parametrize("window", ["created", "evicting", "loading"])
def test_during_the_load_it_ends_idle_and_can_be_evicted(window: str) -> None:
    stage = Stage()
    getattr(stage, window)()
    stage.leave(stage.first)
    world = stage.world
    stage.loaded()
    assert world.models["B"].resident
    assert not world.models["B"].busy
    world.check_idle()
    again = world.arrive(A)
    assert world.job is not None, "B, idle, gives its place back at once"
    assert world.job.victims == ["B"]
    stage.leave(again)


@pytest.mark.parametrize("window", ["created", "evicting", "loading"])
def test_during_the_load_those_who_stay_are_served(window: str) -> None:
    stage = Stage()
    getattr(stage, window)()
    second = stage.world.arrive(B)
    stage.leave(stage.first)
    stage.loaded()
    assert second.outcome is Outcome.GRANTED
    assert stage.world.models["B"].leases == 1


def test_just_granted_gives_its_lease_to_whom_it_is_due() -> None:
    stage = Stage()
    stage.loading()
    for_a = stage.world.arrive(A)
    stage.world.end_load("ok")
    assert stage.first.holds_lease
    # Its caller was cancelled before it ran: the lease is its to give back.
    assert not stage.world.leave(stage.first, Outcome.CANCELLED)
    stage.world.finish(stage.first)
    assert stage.world.models["B"].leases == 0
    stage.at(6.0)
    assert stage.world.job is not None
    assert stage.world.job.target == A
    stage.leave(for_a)


@pytest.mark.parametrize("expiry_first", [True, False])
def test_expiry_racing_the_grant_exactly_one_wins(expiry_first: bool) -> None:
    stage = Stage()
    stage.loading()
    if expiry_first:
        assert stage.world.leave(stage.first, Outcome.EXPIRED)
        stage.world.end_load("ok")
        assert stage.first.outcome is Outcome.EXPIRED
        assert stage.world.models["B"].leases == 0
    else:
        stage.world.end_load("ok")
        assert not stage.world.leave(stage.first, Outcome.EXPIRED)
        assert stage.first.outcome is Outcome.GRANTED
        assert stage.world.models["B"].leases == 1


def test_leaving_twice_counts_once() -> None:
    stage = Stage()
    stage.leave(stage.first)
    assert not stage.world.leave(stage.first, Outcome.CANCELLED)
    assert stage.world.policy.waiting == 0


def test_after_a_refusal_there_is_nothing_to_leave() -> None:
    stage = Stage()
    refused = stage.world.arrive(Target("X"))
    assert refused.outcome is Outcome.REFUSED
    assert not stage.world.leave(refused, Outcome.CANCELLED)


def test_in_the_pause_after_a_refused_load() -> None:
    stage = Stage()
    stage.loading()
    stage.world.end_load("refused")
    assert stage.first.outcome is None
    assert stage.world.policy.wake_at == pytest.approx(5.05)
    stage.leave(stage.first)
    stage.at(10.0)
    assert stage.world.job is None
    stage.world.check_idle()


@pytest.mark.parametrize("window", ["draining", "created", "evicting", "loading"])
def test_shut_down_ends_everybody_and_leaves_no_mark(window: str) -> None:
    stage = Stage()
    getattr(stage, window)()
    for_d = stage.world.arrive(D)
    stage.world.shut_down()
    assert stage.first.outcome is Outcome.SHUT_DOWN
    assert for_d.outcome is Outcome.SHUT_DOWN
    assert stage.world.models["A"].mark is None
    assert stage.world.policy.gated == frozenset()
    late = stage.world.arrive(B)
    assert late.outcome is Outcome.SHUT_DOWN


def test_ten_thousand_leave_one_by_one() -> None:
    """Each in constant time, and the policy holds nothing of them afterwards."""
    stage = Stage(max_age=1e9)
    waiting = [stage.first] + [stage.world.arrive(B) for _ in range(10_000)]
    stage.world.strict = False
    for request in waiting[::2] + waiting[1::2]:
        assert request.waiter is not None
        assert stage.world.policy.leave(request.waiter, Outcome.CANCELLED, stage.world.now)
    assert stage.world.policy.waiting == 0
    assert stage.world.policy.targets == ()
