"""Loads by hand: they wait for a model that leaves or comes, and keep it for its first use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from . import by_hand
from .conftest import House, Make, settle, soon, until
from .test_queue import names

pytestmark = pytest.mark.parametrize("admin", [False, True], ids=["public", "admin"])


def load(house: House, model: str, admin: bool) -> asyncio.Task[Any]:
    return by_hand.load(house.pool, model, admin).task


async def test_c6_of_a_model_that_drains_it_waits_until_it_serves_again(
    make_house: Make, admin: bool
) -> None:
    house = make_house(max_age_s=0.0)
    await house.get("a")
    for_b = await house.waits("b")
    assert "a" in house.admission.gated
    loaded = load(house, "a", admin)
    await settle()
    assert not loaded.done()
    await house.release("a")
    await for_b
    await settle()
    assert not loaded.done()
    await house.release("b")
    assert await loaded == "loaded"
    assert house.resident() == {"a"}
    assert names(house.events)[-2:] == ["unloaded b", "loaded a"]
    house.assert_idle()


async def test_c6_of_a_model_that_is_torn_down_it_loads_it_again(
    house: House, admin: bool
) -> None:
    await house.use("a")
    unloading = await house.held_unload("a")
    loaded = load(house, "a", admin)
    await settle()
    assert not loaded.done()
    await house.let_unload("a")
    await unloading
    assert await loaded == "loaded"
    assert house.resident() == {"a"}
    house.assert_idle()


async def test_c24_it_joins_a_load(house: House, admin: bool) -> None:
    house.hold_loads = True
    first = load(house, "b", admin)
    await until(lambda: "load b" in house.events)
    second = load(house, "b", admin)
    await settle()
    assert not second.done()
    await house.let_load("b")
    assert await asyncio.gather(first, second) == ["loaded", "loaded"]
    assert names(house.events) == ["loaded b"]
    house.assert_idle()


async def test_of_a_model_that_serves_it_says_so(house: House, admin: bool) -> None:
    await house.get("a")
    assert await load(house, "a", admin) == "already loaded"
    await house.ends_idle("a")


@pytest.mark.parametrize("loaded", [False, True], ids=["loaded by it", "there already"])
async def test_c5_others_leave_the_model_for_its_first_use(
    make_house: Make, admin: bool, loaded: bool
) -> None:
    house = make_house(max_age_s=0.0)
    if loaded:
        await house.use("b")
    assert await load(house, "b", admin) == ("already loaded" if loaded else "loaded")
    for_a = await house.waits("a")
    house.admission.step()
    await settle()
    assert not for_a.done()
    # The first use of it is served at once, and A after it.
    await house.use("b")
    await for_a
    assert house.resident() == {"a"}
    await house.ends_idle("a")


async def test_c5_but_only_for_a_moment(make_house: Make, admin: bool) -> None:
    """Who loads and never uses costs the others that moment, once, however often it asks."""
    house = make_house(max_age_s=0.0, max_wait_s=40.0)
    await load(house, "b", admin)
    for_a = await house.waits("a")
    for _ in range(3):
        assert await load(house, "b", admin) == "already loaded"
    assert not for_a.done()
    assert house.admission.policy.by_hand
    await soon(for_a)
    assert house.resident() == {"a"}
    await house.ends_idle("a")


async def test_c5_a_model_with_waiters_of_its_own_needs_no_moment(
    make_house: Make, admin: bool
) -> None:
    house = make_house(max_age_s=0.0)
    house.hold_loads = True
    loading = load(house, "b", admin)
    await until(lambda: "load b" in house.events)
    for_b, for_a = house.ask("b"), house.ask("a")
    await house.let_load("b")
    await asyncio.gather(loading, for_b)
    assert not house.admission.policy.by_hand
    await house.release("b")
    await house.let_load("a")
    await for_a
    await house.ends_idle("a")
