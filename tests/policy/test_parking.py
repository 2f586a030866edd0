"""Parking: when what runs is taken out, what may not be, and that it comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import (
    Action,
    Drain,
    Grant,
    Load,
    ModelView,
    Outcome,
    Park,
    PoolView,
    Target,
    Undrain,
    Waiter,
)
from omlx_admission.core.policy.planner import PlanKind, plan

A, B = Target("a"), Target("b")
#: Seconds of a swap: S.
S = 10.0
FOREVER = float("inf")


def pool(*models: ModelView, parked: int = 0, ceiling: int = 100) -> PoolView:
    used = parked + sum(m.size for m in models)
    return PoolView(
        {m.model: m for m in models},
        ready=frozenset(m.target for m in models),
        ceiling=ceiling,
        fixed_ceiling=ceiling,
        used=used,
        committed=used,
        parked=parked,
    )


def busy(answering: float | None, leases: int = 1, model: str = "a") -> ModelView:
    return ModelView(model, 60, busy=leases > 0, leases=leases, answering=answering)


def policy(park: bool = True, age: float | None = 0.0) -> AdmissionPolicy:
    made = AdmissionPolicy(Dials(age, 0.0, park=park))
    for target in (A, B):
        made.estimates.saw_swap(target.model, S)
    return made


def draining(answering: float | None, leases: int = 1, waiters: int = 1) -> AdmissionPolicy:
    """B is waited for since 0, A drains for it."""
    made = policy()
    for _ in range(waiters):
        made.enqueue(B, 60, 0.0, 300.0)
    actions = made.step(pool(busy(answering, leases)), 0.0)
    assert actions == [Drain(("a",), B)]
    return made


def parks(actions: list[Action]) -> list[Park]:
    return [action for action in actions if isinstance(action, Park)]


def test_it_is_parked_when_waiters_gain_more_than_its_clients_lose() -> None:
    """q r > k (2 S + T); T is taken to be S where nothing is known of it."""
    for leases, waiters in ((1, 1), (3, 1), (1, 3)):
        made = draining(0.0, leases, waiters)
        at = leases * 3 * S / waiters
        assert made.wake_at == pytest.approx(at)
        assert not parks(made.step(pool(busy(at - 0.1, leases)), at - 0.1))
        assert parks(made.step(pool(busy(at, leases)), at)) == [Park(("a",), B, 5)]
        assert not parks(made.step(pool(busy(at + 1, leases)), at + 1)), "asked once a drain"


def test_what_is_about_to_end_gets_a_grace() -> None:
    made = draining(1000.0)
    assert made.wake_at == pytest.approx(S / 5)
    assert not parks(made.step(pool(busy(1000.0)), S / 5 - 0.1))
    assert parks(made.step(pool(busy(1000.0)), S / 5))


def test_a_model_has_its_turn_before_it_is_parked() -> None:
    """Half of W, one swap at least: else two busy models park each other to and fro."""
    for age, turn in ((0.0, S), (8 * S, 4 * S)):
        made = policy(age=age)
        made.loaded_at["a"] = 100.0
        made.enqueue(B, 60, 100.0 - age, 1e9)
        made.step(pool(busy(1e6)), 100.0)
        began = 100.0
        while made.swap is None:
            assert made.wake_at is not None
            began = made.wake_at
            made.step(pool(busy(1e6)), began)
        at = max(100.0 + turn, began + S / 5)
        assert not parks(made.step(pool(busy(1e6)), at - 0.1))
        assert parks(made.step(pool(busy(1e6)), at))


def test_what_cannot_be_parked_drains() -> None:
    made = draining(None)
    assert not parks(made.step(pool(busy(None)), 500.0))
    # One of two that cannot: the other would wait for it in vain.
    made = policy()
    made.enqueue(B, 60, 0.0, 300.0)
    both = (replace(busy(1e6), size=45), replace(busy(None, model="c"), size=45))
    made.step(pool(*both), 0.0)
    assert made.swap is not None
    assert set(made.swap.victims) == {"a", "c"}
    assert not parks(made.step(pool(*both), 100.0))


def test_without_the_variable_nothing_is_parked() -> None:
    made = policy(park=False)
    made.enqueue(B, 60, 0.0, 300.0)
    made.step(pool(busy(1e6)), 0.0)
    assert not parks(made.step(pool(busy(1e6)), 500.0))
    assert Dials().age_for(S, rare=True) == Dials().age_for(S) == 14 * S


def test_parked_bytes_are_a_share_of_the_ceiling_and_fit_beside_both_models() -> None:
    made = draining(1000.0)
    (park,) = parks(made.step(pool(busy(1000.0), parked=2), 100.0))
    assert park.most == 3
    made = draining(1000.0)
    (park,) = parks(made.step(pool(busy(1000.0), ceiling=61), 100.0))
    assert park.most == 1
    made = draining(1000.0)
    no_limit = replace(pool(busy(1000.0), ceiling=0), max_models=1)
    (park,) = parks(made.step(no_limit, 100.0))
    assert park.most is None


def test_parked_bytes_are_reserved() -> None:
    held = pool(ModelView("d", 30), parked=20)
    assert plan(B, 50, held).kind is PlanKind.FITS
    assert plan(B, 51, held).kind is PlanKind.EVICT
    assert plan(B, 81, held).kind is PlanKind.BLOCKED
    assert plan(B, 81, pool(parked=20)).kind is PlanKind.BLOCKED, "not asked of the pool"


def parked_for_b() -> tuple[AdmissionPolicy, list[Waiter]]:
    """Two answers of A were taken out, and B's load begins in that step."""
    made = draining(1000.0, leases=2, waiters=2)
    assert parks(made.step(pool(busy(1000.0, 2)), 60.0))
    waiters = [made.enqueue(A, 60, 60.0, FOREVER, parked=True) for _ in range(2)]
    actions = made.step(pool(busy(0.0, 0), parked=4), 60.0)
    assert actions == [Load(B, ("a",))]
    return made, waiters


def test_parked_answers_come_back_all_at_once_whatever_the_places() -> None:
    made, waiters = parked_for_b()
    newcomer = made.enqueue(A, 60, 61.0, 300.0)
    assert (made.waiting, made.parked) == (5, 2)
    served = made.load_succeeded(B, 70.0)
    assert len(served) == 2
    view = pool(ModelView("b", 60), parked=4)
    assert made.step(view, 70.0) == [Load(A, ("b",))], "B is idle: it leaves at once"
    granted = made.load_succeeded(A, 80.0, places=0)
    assert granted == tuple(waiters)
    assert {w.outcome for w in waiters} == {Outcome.GRANTED}
    assert newcomer.outcome is Outcome.WAITING
    assert (made.waiting, made.parked) == (1, 0)


def test_parked_answers_fill_the_places_before_newcomers() -> None:
    made, waiters = parked_for_b()
    newcomers = [made.enqueue(A, 60, 61.0, 300.0) for _ in range(3)]
    made.load_succeeded(B, 70.0)
    made.step(pool(ModelView("b", 60), parked=4), 70.0)
    assert made.load_succeeded(A, 80.0, places=3) == (*waiters, newcomers[0])


def test_the_drain_that_parked_it_says_nothing_of_how_long_drains_take() -> None:
    made, _ = parked_for_b()
    assert made.estimates.drain("a") == AdmissionPolicy().estimates.drain("a")


def test_where_nobody_waits_any_more_it_goes_back_into_its_engine() -> None:
    made = draining(1000.0)
    (head,) = made.waiters(B)
    assert parks(made.step(pool(busy(1000.0)), 60.0))
    made.leave(head, Outcome.EXPIRED, 60.0, back_in=30.0)
    waiter = made.enqueue(A, 60, 60.0, FOREVER, parked=True)
    actions = made.step(pool(busy(0.0, 0), parked=4), 60.0)
    assert Grant(A, (waiter,)) in actions
    assert Undrain(("a",)) in actions


def test_each_parked_answer_ends_once() -> None:
    made, (first, second) = parked_for_b()
    assert made.leave(first, Outcome.CANCELLED, 61.0)
    assert not made.leave(first, Outcome.CANCELLED, 61.0)
    assert made.parked == 1
    assert made.shut_down()
    assert second.outcome is Outcome.SHUT_DOWN
    assert made.parked == made.waiting == 0


def test_a_model_that_is_rarely_asked_for_is_due_after_four_swaps() -> None:
    made = policy(age=None)
    made.enqueue(B, 60, 1000.0, 1e9)
    assert made.age_of(B) == 4 * S
    # It left lately: both are in use all the time, and a swap costs what it costs.
    made, _ = parked_for_b()
    made.dials = replace(made.dials, max_age=None)
    assert made.age_of(A) == 14 * S
