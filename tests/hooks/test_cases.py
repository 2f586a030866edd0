"""Reported cases on the pool that need a special moment, each under its id."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import House, Make, by_profile, later, settle


async def test_b10_no_newcomer_revives_the_victim(make_house: Make) -> None:
    house = make_house(max_age_s=0.0)
    await house.get("a")
    for_b = await house.waits("b")
    newcomers = []
    for _ in range(20):
        newcomers.append(house.ask("a"))
        house.entry("a").last_access += 1000  # a keep-alive that is refreshed
        await settle()
    assert not any(n.done() for n in newcomers)
    await house.release("a")
    await for_b
    assert house.resident() == {"b"}
    await house.release("b")
    await asyncio.gather(*newcomers)
    await house.release("a", len(newcomers))
    house.assert_idle()


async def test_b14_steady_traffic_on_one_variant_does_not_freeze_the_other(
    make_house: Make, mocker: Any
) -> None:
    house = make_house(max_age_s=0.0)
    by_profile(house, mocker)
    stop = asyncio.Event()

    async def steady() -> None:
        while not stop.is_set():
            await house.get("d")
            await asyncio.sleep(0)
            await house.release("d")

    clients = [asyncio.ensure_future(steady()) for _ in range(4)]
    await settle()
    await house.get("d", runtime_settings={"mtp": 1})
    # Another model that fits beside it is not held up by the reloads.
    await house.use("p")
    await house.release("d")
    stop.set()
    await asyncio.gather(*clients)
    house.assert_idle()


async def test_b17_requests_all_through_a_load_are_served_by_it(house: House) -> None:
    first = await house.held_load("a")
    second, third = house.ask("a"), house.ask("a")
    await settle()
    first.cancel()
    await house.let_load("a")
    # Asked for in the turn in which the load ends, and in the one after it.
    fourth = house.ask("a")
    await asyncio.gather(second, third, fourth)
    await house.get("a")
    with pytest.raises(asyncio.CancelledError):
        await first
    assert house.events.count("load a") == 1
    await house.release("a", 4)
    house.assert_idle()


@pytest.mark.parametrize("route", ["swap", "ttl"])
async def test_b26_b43_work_that_holds_no_lease_keeps_its_model(
    make_house: Make, mocker: Any, route: str
) -> None:
    """Speech runs on in its thread after the client has left; nothing may unload it."""
    house = make_house(max_age_s=0.0)
    engine = await house.get("a", lease=False)
    engine.has_active_requests.return_value = True
    if route == "swap":
        for_b = house.ask("b")
        await later(3.0)
        assert not for_b.done()
        assert house.entry("a").engine is engine
        engine.has_active_requests.return_value = False
        # Nothing announces the end of such work: the queue looks for itself.
        await for_b
        await house.release("b")
    else:
        house.entry("a").last_access = 1.0
        manager = mocker.Mock()
        manager.get_settings.return_value.ttl_seconds = 1
        assert await house.pool.check_ttl_expirations(manager) == []
        assert house.entry("a").engine is engine
        engine.has_active_requests.return_value = False
        house.entry("a").last_access = 1.0
        assert await house.pool.check_ttl_expirations(manager) == ["a"]
    house.assert_idle()


async def test_b47_a_low_reading_does_not_admit_a_second_model(house: House) -> None:
    """The device reads 0 bytes for a loaded A; its booked size counts."""
    await house.use("a")
    house.events.clear()
    await house.get("b")
    assert house.events == ["unload a", "unloaded a", "load b", "loaded b"]
    await house.ends_idle("b")


async def test_b50_a_failed_load_frees_its_place_for_the_next(house: House) -> None:
    house.fail["b"] = RuntimeError("broken file")
    for_b, for_a = house.ask("b"), house.ask("a")
    with pytest.raises(house.module.ModelUnavailableError):
        await for_b
    await for_a
    await house.release("a")
    assert house.pool._current_model_memory == 600
    house.assert_idle()
