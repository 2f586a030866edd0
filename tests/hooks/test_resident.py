"""Residents never wait: K5, B08, B11 and the release without the lock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.core import faults
from omlx_admission.hooks.pool import resident
from omlx_admission.hooks.pool.state import state_of

from .conftest import House, Make, settle, until


@pytest.fixture
def house(make_house: Make) -> House:
    """With the resident path alone."""
    return make_house(features={"resident"})


async def test_b11_a_resident_is_handed_out_while_another_model_loads(house: House) -> None:
    first = await house.get("d")
    loading = await house.held_load("a")
    assert house.pool._lock.locked()
    # No await is needed in between: the coroutine ends without suspending.
    with pytest.raises(StopIteration) as done:
        house.pool.get_engine("d", _lease=True).send(None)
    assert done.value.value is first
    assert house.entry("d").in_use == 2
    await house.release("d", 2)
    assert house.pool._lock.locked()
    assert house.entry("d").in_use == 0
    await house.let_load("a")
    await loading
    await house.ends_idle("a")


async def test_a_lease_is_taken_only_when_asked_for(house: House) -> None:
    await house.get("d", lease=False)
    before = house.entry("d").last_access
    house.entry("d").last_access = 0.0
    await house.get("d", lease=False)
    assert house.entry("d").in_use == 0
    assert house.entry("d").last_access >= before > 0


async def test_b08_a_request_during_an_unlocked_unload_gets_a_new_engine(house: House) -> None:
    for _round in range(5):
        dying = await house.get("a")
        await house.release("a")
        await house.use("a")  # so that the hot path knows it
        unload = await house.held_unload("a")
        request = await house.waits("a")
        await house.let_unload("a")
        await unload
        assert await request is not dying
        assert dying.start.await_count == 1
        await house.release("a")
        house.hold_unloads = False
        await house.pool._unload_engine("a")
        house.assert_idle()
        house.events.clear()
    assert house.pool._current_model_memory == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_f1_a_second_unload_joins_the_first_and_may_be_cancelled(
    house: House, cancelled: bool
) -> None:
    engine = await house.get("a", lease=False)
    first = await house.held_unload("a")
    second = asyncio.ensure_future(house.pool._unload_engine("a"))
    await settle()
    assert not second.done()
    if cancelled:
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert "a" in state_of(house.pool).unloading
    await house.let_unload("a")
    await asyncio.gather(first, second, return_exceptions=cancelled)
    assert engine.stop.await_count == 1
    assert house.pool._current_model_memory == 0


async def test_f1_a_cancel_waits_for_the_end_of_the_teardown(house: House) -> None:
    """Cancelled half-way it would leave a stopped engine to be handed out."""
    dying = await house.get("a", lease=False)
    unload = await house.held_unload("a")
    for _ in range(2):
        unload.cancel()
        await settle()
        assert not unload.done()
    request = await house.waits("a")
    await house.let_unload("a")
    with pytest.raises(asyncio.CancelledError):
        await unload
    assert await request is not dying
    assert house.tracked() == house.pool._current_model_memory == 600
    await house.ends_idle("a")


async def test_f1_a_cancel_after_the_engine_has_gone_leaves_no_bytes(
    house: House, mocker: Any
) -> None:
    """Stock takes the bytes off its books last, after it has waited on a shared thread."""
    await house.get("a", lease=False)
    busy = threading.Event()
    thread = concurrent.futures.ThreadPoolExecutor(1)
    mocker.patch("omlx.engine_core._global_mlx_executor", thread)
    thread.submit(busy.wait)
    unload = asyncio.ensure_future(house.pool._unload_engine("a"))
    await until(lambda: house.entry("a").engine is None)
    unload.cancel()
    await settle()
    assert not unload.done()
    busy.set()
    with pytest.raises(asyncio.CancelledError):
        await unload
    thread.shutdown()
    assert house.pool._current_model_memory == 0
    house.assert_idle()


async def test_a_release_obeys_a_mark_that_is_not_ours(house: House) -> None:
    """Stock unloads a model that the enforcer marked when its last lease drops."""
    await house.get("a")
    house.pool._mark_pending_unload_locked("a", "hard memory pressure")
    await house.release("a")
    await until(lambda: house.pool._current_model_memory == 0)
    assert house.resident() == set()
    await settle()
    house.assert_idle()


@pytest.mark.parametrize("reason", ["another variant", "loading", "pending unload"])
async def test_what_stock_would_not_hand_out_at_once_goes_the_stock_way(
    house: House, mocker: Any, reason: str
) -> None:
    await house.get("d", lease=False)
    entry = house.entry("d")
    if reason == "another variant":
        mocker.patch.object(
            house.pool, "_engine_runtime_signature", lambda *_a: (("mtp_enabled", "True"),)
        )
        entry.runtime_settings_signature = (("mtp_enabled", "False"),)
    elif reason == "loading":
        entry.is_loading = True
    else:
        entry.pending_unload_reason = "somebody else's"
    await house.pool._lock.acquire()
    request = await house.waits("d")  # for the lock, as stock does
    request.cancel()
    house.pool._lock.release()


async def test_a_fault_of_ours_lets_stock_answer(
    house: House, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await house.get("d", lease=False)
    faults._noted.clear()
    mocker.patch.object(resident, "checked_engine", side_effect=ZeroDivisionError)
    assert await house.get("d", lease=False) is engine
    assert await house.get("d", lease=False) is engine
    assert caplog.text.count("resident path failed") == 1


@pytest.mark.parametrize("in_place", [True, False])
async def test_settings_that_have_changed_are_looked_at_again(
    house: House, tmp_path: Path, in_place: bool
) -> None:
    from omlx.model_settings import ModelSettings, ModelSettingsManager

    manager = ModelSettingsManager(tmp_path)
    house.pool._settings_manager = manager
    manager.set_settings("d", ModelSettings(model_alias="one"))
    first = await house.get("d", lease=False)
    state = state_of(house.pool)
    assert await house.get("d", lease=False) is first
    assert resident.verified_engine(house.pool, state, "d") is first
    if in_place:
        vars(manager._settings["d"])["model_alias"] = "two"
    else:
        manager.set_settings("d", ModelSettings(model_alias="two"))
    # What they mean for a loaded engine is stock's to say.
    assert resident.verified_engine(house.pool, state, "d") is None
    assert await house.get("d", lease=False) is first
    assert resident.verified_engine(house.pool, state, "d") is first
