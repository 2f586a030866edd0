"""F4: what a resident's request meets on its way never waits for another model's load.

Loads are held where they are held for minutes on a Mac: on oMLX's load thread, with the
pool's lock taken.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from omlx_admission.hooks.pool.state import state_of

from .conftest import House, enforcer_of, settle, until

#: A prefill of 300 bytes under a cap of 900.
WANTED = SimpleNamespace(
    target_cap_bytes=900, predicted_transient_bytes=300, request_id="r", model_id="d"
)


@asynccontextmanager
async def loading(house: House, mocker: Any, model: str) -> AsyncIterator[asyncio.Task[Any]]:
    """``model`` loads all the while, on a thread that does nothing else."""
    go_on = threading.Event()
    thread = concurrent.futures.ThreadPoolExecutor(1)
    mocker.patch("omlx.engine_core._global_mlx_executor", thread)
    house.hold_loads = True
    load = house.ask(model)
    await until(lambda: f"load {model}" in house.events)
    thread.submit(go_on.wait)
    assert house.pool._lock.locked()
    try:
        yield load
        assert house.pool._lock.locked() and not load.done()
    finally:
        go_on.set()
        house.hold_loads = False
        await house.let_load(model)
        await load
        await house.release(model)
        thread.shutdown()


def evict(house: House, wanted: Any = WANTED) -> asyncio.Task[bool]:
    """What the engine's loop of D asks for while its streams stand still."""
    return asyncio.ensure_future(
        house.pool._evict_idle_lru_for_prefill(exclude_model_id="d", eviction_request=wanted)
    )


async def test_f4_a_prefill_finds_nothing_to_evict_at_once(house: House, mocker: Any) -> None:
    await house.get("d")
    async with loading(house, mocker, "a"):
        wanted = SimpleNamespace(**{**vars(WANTED), "target_cap_bytes": 500})
        # It may be told that buffers were reclaimed; there is no model to evict.
        await asyncio.wait_for(evict(house, wanted), 20)
        assert house.resident() == {"d"}
    await house.ends_idle("d")


async def test_f4_a_prefill_evicts_an_idle_model_during_a_load(
    house: House, mocker: Any
) -> None:
    """Its teardown ends on the thread of the load: what is gone counts as gone."""
    house.ceiling = 2000
    await house.get("d")
    await house.use("p")
    house.entry("a").estimated_size = 100
    async with loading(house, mocker, "a"):
        # 300 of D and 300 of P are in use; 300 more do not fit under 800.
        wanted = SimpleNamespace(**{**vars(WANTED), "target_cap_bytes": 800})
        assert await asyncio.wait_for(evict(house, wanted), 20)
        assert house.resident() == {"d"}
        assert "p" in state_of(house.pool).unloading
        assert house.pool._current_model_memory == 600
    await until(lambda: not state_of(house.pool).unloading)
    assert house.pool._current_model_memory == 400
    await house.ends_idle("d")


async def test_f4_a_victim_that_is_handed_out_meanwhile_stays(house: House) -> None:
    house.ceiling = 2000
    await house.get("d")
    await house.use("p")
    wanted = SimpleNamespace(**{**vars(WANTED), "target_cap_bytes": 600})
    evicting = evict(house, wanted)
    await asyncio.sleep(0)
    taken = await house.get("p")
    await evicting
    assert house.entry("p").engine is taken
    taken.stop.assert_not_awaited()
    await house.ends_idle("p", "d")


async def test_f4_the_end_of_a_request_that_read_a_pdf(house: House, mocker: Any) -> None:
    house.ceiling = 2000
    for model in ("d", "p"):
        await house.get(model)
    await house.release("p")
    async with loading(house, mocker, "a"):
        # In use: nothing happens, and nothing is waited for.
        unload = house.pool.unload_if_idle_unpinned
        assert await asyncio.wait_for(unload("d"), 20) is False
        assert await asyncio.wait_for(unload("p"), 20) is True
        assert house.resident() == {"d"}
    await until(lambda: not state_of(house.pool).unloading)
    await house.ends_idle("d")


@pytest.mark.parametrize("mark", ["hard memory pressure", "manual unload"])
async def test_f4_a_release_under_a_mark_that_is_not_ours(
    house: House, mocker: Any, mark: str
) -> None:
    """The finished answer of a model that the enforcer marked, and its unload too."""
    engine = await house.get("d")
    async with loading(house, mocker, "a"):
        house.pool._mark_pending_unload_locked("d", mark)
        await asyncio.wait_for(house.release("d"), 20)
        assert house.entry("d").in_use == 0
        await until(lambda: house.resident() == set())
        engine.stop.assert_awaited_once()
    await until(lambda: not state_of(house.pool).unloading)
    house.assert_idle()


async def test_f11_a_model_that_the_enforcer_chose_is_handed_out_while_it_waits(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It awaits ``abort_all_requests`` of a distributed engine after its choice."""
    monkeypatch.setenv("OMLX_DISABLE_PRESSURE_RECLAIM", "1")
    engine = await house.get("d")
    await house.release("d")
    enforcer = enforcer_of(house.pool, 1100, memory_guard_tier="custom")
    chosen, go_on = asyncio.Event(), asyncio.Event()

    async def closes() -> int:
        chosen.set()
        await go_on.wait()
        return 0

    engine.abort_all_requests.side_effect = closes
    enforcer._running = True
    enforcer._task = asyncio.ensure_future(enforcer._check_and_enforce())
    await chosen.wait()
    assert await house.get("d") is engine
    go_on.set()
    await enforcer._task
    engine.stop.assert_not_awaited()
    assert house.resident() == {"d"} and house.entry("d").in_use == 1
    enforcer._task = None
    enforcer.usage = 0
    await house.release("d")
    await settle()


async def test_c18_victims_are_chosen_by_a_clock_that_does_not_go_back(
    house: House, mocker: Any
) -> None:
    house.entry("a").estimated_size = 400
    house.entry("d").estimated_size = 400
    import time

    wall = time.time()
    clock = mocker.patch("time.time", lambda: wall)
    for model in ("a", "d"):
        await house.get(model)
        await house.release(model)
    assert clock is not None
    mocker.patch("time.time", lambda: wall - 3600)
    await house.use("a")
    house.entry("b").estimated_size = 400
    await house.get("b")
    # D was used before A, whatever the clock on the wall says.
    assert house.resident() == {"a", "b"}
    await house.ends_idle("b")
