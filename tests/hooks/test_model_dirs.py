"""Changes of the model folders: no engine outside of the books, no load forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.hooks.pool import model_dirs, unloads
from omlx_admission.hooks.pool.state import state_of

from .by_hand import ByHand
from .conftest import SIZES, House, Make, later, settle, soon, until

Reload = Callable[..., ByHand]


@pytest.fixture
def house(make_house: Make, mocker: Any, models: Path) -> House:
    """A pool that the admin's routes know as the server's."""
    import omlx.admin.routes as routes
    import omlx.server as server

    house = make_house()
    manager = mocker.MagicMock()
    manager.get_pinned_model_ids.return_value = []
    for name, value in (("engine_pool", house.pool), ("settings_manager", manager)):
        mocker.patch.object(server._server_state, name, value)
    mocker.patch.object(routes, "_get_engine_pool", lambda: house.pool)
    mocker.patch.object(routes, "_get_settings_manager", lambda: manager, create=True)
    mocker.patch.object(house.pool, "apply_settings_overrides")
    return house


@pytest.fixture
def reload(house: House, models: Path, mocker: Any) -> Reload:
    """Ask for a change of the model folders, as the route does it."""
    import omlx.admin.routes as routes

    stock, scan = routes._apply_model_dirs_runtime, house.pool.discover_models

    def discover_models(*args: Any) -> None:
        house.events.append("forgotten")
        scan(*args)
        for name, size in SIZES.items():
            if house.entry(name).engine is None:
                house.entry(name).estimated_size = size

    mocker.patch.object(house.pool, "discover_models", discover_models)

    def ask(**request: Any) -> ByHand:
        return ByHand(
            lambda: model_dirs.change_model_dirs(stock, routes, ([str(models)],), {}),
            path="/admin/api/reload",
            **request,
        )

    return ask


def books_are_right(house: House) -> None:
    """What the pool counts is what its entries hold."""
    assert house.pool._current_model_memory == house.tracked()


async def test_b19_nothing_loads_between_the_unloads_and_the_rescan(
    house: House, reload: Reload
) -> None:
    """Each model is unloaded when it comes to rest itself; what is idle serves on."""
    house.ceiling = 1300
    engines = {model: await house.get(model) for model in "ad"}
    await house.use("p")
    change = reload()
    await settle()
    late = [house.ask("b"), house.ask("a")]
    await settle()
    change.leave()  # an operation that stops half-way would leave the engine behind
    await later(1.0)
    await house.use("p")
    assert not any(t.done() for t in late)
    engines["d"].stop.assert_not_awaited()
    await house.release("d")
    await until(lambda: engines["d"].stop.await_count == 1)
    await settle()
    engines["a"].stop.assert_not_awaited()
    assert house.resident() == {"a", "p"}
    await house.release("a")
    assert (await change.task)[0] is True
    before = house.events[: house.events.index("forgotten")]
    assert (before.count("load b"), before.count("load a")) == (0, 1)
    await asyncio.gather(*late)
    for engine in engines.values():
        engine.stop.assert_awaited_once()
    books_are_right(house)
    await house.ends_idle("b", "a")


async def test_p3_a_second_change_waits_for_the_first_and_then_does_its_own(
    house: House, reload: Reload
) -> None:
    """It must not drop the entry of a model for whose end the first one waits."""
    engine = await house.get("d")
    first = reload()
    await settle()
    second = reload(max_wait="0.05")
    await later(1.0)
    assert not first.task.done()
    assert not second.task.done()
    assert house.entry("d").engine is engine
    await house.release("d")
    assert (await first.task)[0] is True
    assert (await second.task)[0] is True
    engine.stop.assert_awaited_once()
    assert house.resident() == set()
    books_are_right(house)
    assert state_of(house.pool).reloading is None
    await house.use("d")
    house.assert_idle()


async def test_b19_p3_both_at_once_end_what_does_not_end_by_itself(
    house: House, reload: Reload, mocker: Any
) -> None:
    mocker.patch.object(unloads, "_LEAVE_S", 0.02)
    mocker.patch.object(unloads, "ABORT_GRACE_S", 0.05)
    engine = await house.get("d")
    changes = [reload(max_wait="0.05") for _ in range(3)]
    for change in changes:
        assert (await soon(change.task))[0] is True
    engine.abort_all_requests.assert_awaited_once()
    engine.stop.assert_awaited_once()
    assert house.resident() == set()
    books_are_right(house)
    assert state_of(house.pool).reloading is None
    # The lease that outlived its engine is given back to nobody.
    await house.ends_idle("d")


async def test_p4_a_load_in_progress_keeps_its_entry_and_its_bytes(
    house: House, reload: Reload
) -> None:
    for_a = await house.held_load("a")
    entry = house.entry("a")
    change = reload(max_wait="0.05")
    assert (await change.task)[0] is True
    assert house.entry("a") is entry
    assert entry.is_loading
    view = house.admission.port.view((), 0)
    assert view.models["a"].loading
    await house.let_load("a")
    engine = await for_a
    assert entry.engine is engine
    assert house.resident() == {"a"}
    books_are_right(house)
    await house.ends_idle("a")


@pytest.mark.parametrize("evicts", [True, False])
async def test_b19_p4_a_load_is_waited_for(house: House, reload: Reload, evicts: bool) -> None:
    """One that has dropped an engine and has none of its own: stock's entries say nothing."""
    if evicts:
        await house.use("b")
        house.hold_unloads = True
        for_a = house.ask("a")
        await until(lambda: "unload b" in house.events)
    else:
        for_a = await house.held_load("a")
    change = reload()
    await settle()
    assert "forgotten" not in house.events
    if evicts:
        house.hold_unloads = False
        await house.let_unload("b")
    else:
        await house.let_load("a")
    engine = await for_a
    await later(1.0)
    assert not change.task.done()
    assert "forgotten" not in house.events
    assert house.entry("a").engine is engine
    assert evicts or not house.pool._lock.locked(), "it waits with the pool's lock"
    await house.release("a")
    assert (await change.task)[0] is True
    engine.stop.assert_awaited_once()
    assert house.resident() == set()
    books_are_right(house)
    house.assert_idle()


async def test_a_teardown_that_has_yet_to_book_its_bytes_is_waited_for(
    house: House, reload: Reload
) -> None:
    """Its engine is gone, so that stock does not find the model among the loaded ones."""
    from omlx.engine_core import get_mlx_executor

    await house.use("d")
    free = threading.Event()
    get_mlx_executor().submit(free.wait)
    try:
        unload = asyncio.ensure_future(house.pool._unload_engine("d"))
        await until(lambda: house.resident() == set())
        change = reload()
        await later(1.0)
        assert not change.task.done()
    finally:
        free.set()
    await unload
    assert (await change.task)[0] is True
    books_are_right(house)
    house.assert_idle()


async def test_an_engine_that_an_unload_has_spared_stays_in_the_books(
    house: House, reload: Reload, mocker: Any
) -> None:
    """Stock logs an unload that fails, and goes on."""
    engine = await house.get("d")
    await house.release("d")
    house.entry("d").estimated_size = SIZES["d"]

    async def fails(*_: Any) -> None:
        raise RuntimeError("still there")

    mocker.patch.object(house.pool, "_unload_engine", fails)
    assert (await reload().task)[0] is True
    assert house.entry("d").engine is engine
    assert house.resident() == {"d"}
    books_are_right(house)
