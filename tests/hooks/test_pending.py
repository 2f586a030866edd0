"""What the memory enforcer marks is completed or withdrawn, with stock's own enforcer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omlx_admission.hooks.pool import state

from .conftest import House, Make, enforcer_of, settle, until

#: Bytes over the ceiling of 1000 at which one poll is enough for an emergency.
EMERGENCY = 1000 + 3 * 1024**3


@pytest.fixture
def house(make_house: Make) -> House:
    """Its residents drain for the first request that waits."""
    return make_house(max_age_s=0.0)


@pytest.fixture
def enforcer(house: House, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stock's memory enforcer on the house; its reading is ``usage``, the ceiling 1000."""
    monkeypatch.setenv("OMLX_DISABLE_PRESSURE_RECLAIM", "1")
    enforcer = enforcer_of(house.pool, memory_guard_tier="custom")
    enforcer._running = True  # its level counts; the test polls
    return enforcer


async def under_pressure(enforcer: Any, usage: int = EMERGENCY) -> None:
    """One poll of the enforcer at ``usage`` bytes."""
    enforcer.usage = usage
    await enforcer._check_and_enforce()


async def test_a_mark_that_outlives_its_lease_is_completed_and_the_next_request_served(
    house: House, enforcer: Any
) -> None:
    """The lease goes while the engine still has the ended request in its own queues."""
    engine = await house.get("a")
    engine.has_active_requests.return_value = True
    await under_pressure(enforcer)
    engine.abort_all_requests.assert_awaited()
    assert house.entry("a").pending_unload_reason == "hard memory pressure"
    late = house.ask("a")
    await house.release("a")  # the request is out, the engine not yet
    await settle()
    assert not late.done()
    engine.has_active_requests.return_value = False
    assert await late is not engine
    engine.stop.assert_awaited_once()
    assert not house.entry("a").abort_requested
    await house.ends_idle("a")


async def test_a_mark_that_recovery_made_pointless_is_withdrawn(
    house: House, enforcer: Any
) -> None:
    engine = await house.get("a")
    engine.has_active_requests.return_value = True
    await under_pressure(enforcer)
    late = house.ask("a")
    await house.release("a")
    await under_pressure(enforcer, usage=0)
    await settle()
    assert not late.done()
    engine.has_active_requests.return_value = False
    # The memory is back and the model still there: nobody pays for a load.
    assert await late is engine
    assert not house.entry("a").abort_requested
    engine.stop.assert_not_awaited()
    await house.ends_idle("a")


async def test_a_model_pinned_after_its_mark_stays(house: House, enforcer: Any) -> None:
    engine = await house.get("a")
    await under_pressure(enforcer)
    house.pool.set_pinned("a", True)
    late = await house.waits("a")
    await house.release("a")
    assert await late is engine
    await house.ends_idle("a")


async def test_a_marked_engine_whose_loop_has_died_is_unloaded(
    house: House, enforcer: Any, mocker: Any
) -> None:
    engine = await house.get("a")
    engine.has_active_requests.return_value = True
    await under_pressure(enforcer)
    engine._engine = mocker.Mock()
    engine._engine.engine._task.done.return_value = True
    engine._engine.engine.scheduler = None
    await house.release("a")
    assert await house.get("a") is not engine
    await house.ends_idle("a")


async def test_an_evicted_model_comes_back_for_its_next_request(
    house: House, enforcer: Any
) -> None:
    engine = await house.get("a")
    await house.release("a")
    house.hold_unloads = True
    enforcer.usage = 990
    stop = engine.stop.side_effect

    async def stopped() -> None:
        await stop()
        enforcer.usage = 0

    engine.stop.side_effect = stopped
    poll = asyncio.ensure_future(enforcer._check_and_enforce())
    await until(lambda: "unload a" in house.events)
    late = await house.waits("a")
    await house.let_unload("a")
    await poll
    assert await late is not engine
    await house.ends_idle("a")


@pytest.mark.parametrize("when", ["draining", "loading"])
@pytest.mark.parametrize("usage", [990, EMERGENCY])
async def test_pressure_during_a_drain_or_a_load_leaves_each_waiter_one_outcome(
    house: House, enforcer: Any, when: str, usage: int
) -> None:
    engine = await house.get("a")
    engine.has_active_requests.return_value = True
    house.hold_loads = True
    waiters = [house.ask("b"), house.ask("b"), house.ask("a")]
    await settle()
    assert house.entry("a").pending_unload_reason

    async def aborted(**_said: str) -> int:
        engine.has_active_requests.return_value = False
        return 1

    engine.abort_all_requests.side_effect = aborted
    if when == "draining":
        await under_pressure(enforcer, usage)
        assert house.entry("a").in_use == 1  # its request has not been told yet
    await house.release("a")
    engine.has_active_requests.return_value = False
    await until(lambda: "load b" in house.events)
    if when == "loading":
        enforcer.usage = usage
        poll = asyncio.ensure_future(enforcer._check_and_enforce())
        await settle()
    enforcer.usage = 0
    house.hold_loads = False

    async def use(model: str, waiter: asyncio.Task[Any]) -> None:
        await waiter
        await house.release(model)

    served = asyncio.gather(*(use(m, w) for m, w in zip("bba", waiters, strict=True)))
    await house.let_load("b")
    await served
    if when == "loading":
        await poll
    await until(lambda: not house.entry("a").pending_unload_reason)
    house.assert_idle()


async def test_the_mark_of_an_admin_unload_is_always_completed(house: House) -> None:
    """Since 0.6.2; with the memory in order, as it is in nearly every such unload."""
    if not hasattr(house.pool, "request_unload"):
        pytest.skip("this oMLX has no request_unload")
    engine = await house.get("a")
    assert await house.pool.request_unload("a", reason="manual admin unload") is False
    late = await house.waits("a")
    await house.release("a")
    assert await late is not engine
    await house.ends_idle("a")


async def test_nobody_follows_marks_of_our_own(house: House) -> None:
    await house.get("a")
    for_b = await house.waits("b")
    assert house.entry("a").pending_unload_reason == "admission drain for 'b'"
    names = [task.get_name() for task in state.background]
    assert not [name for name in names if name.startswith("admission-pending:")]
    await house.release("a")
    await for_b
    await house.release("b")
