"""Reported cases of operators on the pool: settings, rescans, deletion, pins, guard off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.hooks.pool import model_dirs, unloads
from omlx_admission.hooks.pool.state import state_of

from .by_hand import ByHand
from .conftest import SIZES, House, Make, by_profile, later, refused, settle, soon, until

FAST, SLOW = {"mtp": 1}, {"mtp": 2}


async def test_b13_b14_the_other_variant_waits_for_the_drain_and_both_are_batched(
    make_house: Make, mocker: Any
) -> None:
    house = make_house(max_age_s=0.0, linger_s=0.0)
    by_profile(house, mocker)
    fast = await house.get("d", runtime_settings=FAST)
    slow = [house.ask("d", runtime_settings=SLOW) for _ in range(3)]
    late = [house.ask("d", runtime_settings=FAST) for _ in range(3)]
    await settle()
    assert not any(t.done() for t in slow)
    fast.stop.assert_not_awaited()
    await house.release("d")
    for together in (slow, late):
        engines = await asyncio.gather(*together)
        assert len({id(e) for e in engines}) == 1
        await house.release("d", len(together))
    # One load for each turn of a variant, whatever the number of its requests.
    assert house.events.count("loaded d") == 3
    house.assert_idle()


async def test_b13_settings_that_change_while_requests_wait_load_once(
    make_house: Make, mocker: Any
) -> None:
    """The operator saves new settings while the old variant is in use and waited for."""
    house = make_house(max_age_s=0.0)
    now = {"mtp": 1}
    mocker.patch.object(
        house.pool,
        "_engine_runtime_signature",
        lambda _m, s=None, **_k: (("mtp_enabled", str((s or now)["mtp"])),),
    )
    old = await house.get("d")
    now["mtp"] = 2
    change = ByHand(
        lambda: house.pool._unload_engine("d"),
        path="/admin/api/models/d/settings",
        method="PUT",
    )
    late = [house.ask("d") for _ in range(3)]
    await settle()
    assert not change.task.done()
    await house.release("d")
    await change.task
    engines = await asyncio.gather(*late)
    assert engines[0] is not old
    assert house.entry("d").runtime_settings_signature == (("mtp_enabled", "2"),)
    assert house.events.count("loaded d") == 2
    await house.release("d", len(late))
    house.assert_idle()


async def test_a_forced_text_load_of_a_vision_model_waits_for_its_requests(
    make_house: Make, mocker: Any
) -> None:
    house = make_house(max_age_s=0.0, linger_s=0.0)
    vision = type("VLMBatchedEngine", (), {})
    mocker.patch.object(house.module, "VLMBatchedEngine", vision)
    from omlx_admission.hooks.patching.switches import switches

    mocker.patch.object(switches, "vlm_engine", vision)
    engine = await house.get("d")
    mocker.patch.object(engine, "__class__", vision)
    house.entry("d").engine_type = "vlm"
    as_text = await house.waits("d", force_lm=True)
    engine.stop.assert_not_awaited()
    await house.release("d")
    assert await as_text is not engine
    await house.ends_idle("d")


@pytest.mark.parametrize("when", ["loading", "queued"])
async def test_b19_a_rescan_changes_nothing_for_who_waits(
    house: House, models: Path, when: str
) -> None:
    await house.get("b")
    house.hold_loads = True
    for_a = await house.waits("a")
    if when == "loading":
        await house.release("b")
        await until(lambda: "load a" in house.events)
    before = house.entry("a")
    house.pool.discover_models([str(models)], [])
    for name, size in SIZES.items():
        house.entry(name).estimated_size = size
    assert (house.entry("a") is before) == (when == "loading")
    if when == "queued":
        await house.release("b")
    await house.let_load("a")
    await for_a
    assert house.pool._current_model_memory == 600
    assert house.events.count("load a") == 1
    await house.ends_idle("a")


@pytest.fixture
def change_dirs(models: Path, mocker: Any) -> Iterator[Callable[[House], ByHand]]:
    """Stock's change of the model folders, with our wrapper round it."""

    def change(house: House, **request: Any) -> ByHand:
        pool = house.pool
        mocker.patch.object(model_dirs, "_admin_pool", lambda: pool)

        async def stock(dirs: list[str]) -> tuple[bool, str]:
            for model in pool.get_loaded_model_ids():
                await pool._unload_engine(model)
            house.events.append("forgotten")
            pool._entries.clear()
            pool._current_model_memory = 0
            pool.discover_models(dirs, [])
            for name, size in SIZES.items():
                pool._entries[name].estimated_size = size
            return True, "ok"

        return ByHand(
            lambda: model_dirs.change_model_dirs(stock, None, ([str(models)],), {}),
            path="/admin/api/reload",
            **request,
        )

    return change  # type: ignore[return-value]


async def test_b19_nothing_loads_between_the_unloads_and_the_rescan(
    house: House, change_dirs: Callable[[House], ByHand]
) -> None:
    house.ceiling = 1300
    engine = await house.get("a")
    await house.use("d")
    change = change_dirs(house)
    await settle()
    late = [house.ask("p"), house.ask("a")]
    await settle()
    change.leave()  # an operation that stops half-way would leave the engine behind
    await later(1.0)
    # What is loaded and idle serves on meanwhile.
    await house.use("d")
    assert not any(t.done() for t in late)
    engine.stop.assert_not_awaited()
    await house.release("a")
    assert await change.task == (True, "ok")
    forgotten = house.events.index("forgotten")
    assert house.events[:forgotten].count("load p") == 0
    assert house.events[:forgotten].count("load a") == 1
    for task, model in zip(late, "pa", strict=True):
        await task
        await house.release(model)
    loaded = sum(SIZES[m] for m in house.resident())
    assert house.pool._current_model_memory == loaded
    house.assert_idle()


async def test_b19_each_model_is_unloaded_when_it_comes_to_rest_itself(
    house: House, change_dirs: Callable[[House], ByHand]
) -> None:
    house.ceiling = 1300
    engines = {model: await house.get(model) for model in ("a", "d")}
    change = change_dirs(house)
    await settle()
    await house.release("a")
    await until(lambda: engines["a"].stop.await_count == 1)
    await settle()
    engines["d"].stop.assert_not_awaited()
    assert house.resident() == {"d"}
    await house.release("d")
    await change.task
    engines["a"].stop.assert_awaited_once()
    engines["d"].stop.assert_awaited_once()
    house.assert_idle()


async def test_b19_at_the_end_of_the_budget_what_runs_is_ended(
    house: House, change_dirs: Callable[..., ByHand], mocker: Any
) -> None:
    mocker.patch.object(unloads, "ABORT_GRACE_S", 0.05)
    engine = await house.get("a")
    await soon(change_dirs(house, max_wait="0.1").task)
    engine.abort_all_requests.assert_awaited_once()
    engine.stop.assert_awaited_once()
    assert house.pool._current_model_memory == 0
    assert state_of(house.pool).reloading is None
    # The lease that outlived its engine is given back to nobody.
    await house.ends_idle("a")


async def test_b19_a_load_that_runs_ends_before_everything_is_forgotten(
    house: House, change_dirs: Callable[[House], ByHand]
) -> None:
    for_a = await house.held_load("a")
    change = change_dirs(house)
    await settle()
    assert "forgotten" not in house.events
    await house.let_load("a")
    await for_a
    await later(1.0)
    assert "forgotten" not in house.events
    await house.release("a")
    await change.task
    assert house.resident() == set()
    assert house.pool._current_model_memory == 0
    house.assert_idle()


async def test_b19_a_deletion_ends_who_waits_for_the_model(house: House) -> None:
    """Stock unloads it, removes its folder and entry, and scans again."""
    await house.get("a")
    for_d = house.ask("d", runtime_settings=None)
    await for_d
    waiting = await house.waits("b")

    async def delete() -> None:
        await house.pool._unload_engine("d")
        for name in ("d", "b"):
            house.pool._entries.pop(name)
        house.pool.discover_models([], [])

    deletion = ByHand(delete, path="/admin/api/hf/models/d", method="DELETE")
    await settle()
    assert not deletion.task.done()
    await house.release("d")
    await deletion.task
    with pytest.raises(house.module.ModelNotFoundError):
        await waiting
    await house.ends_idle("a")


async def test_a_pin_of_the_draining_model_ends_its_drain(make_house: Make) -> None:
    """What is pinned meanwhile never leaves: who waits for its room is told so."""
    house = make_house(max_age_s=0.0)
    engine = await house.get("a")
    for_b = await house.waits("b")
    assert house.entry("a").pending_unload_reason
    house.pool.set_pinned("a", True)
    late = house.ask("a")
    with pytest.raises(house.module.InsufficientMemoryError):
        await for_b
    assert await late is engine
    house.pool.set_pinned("a", False)
    again = house.ask("b")
    await house.release("a")
    await house.release("a")
    await again
    await house.ends_idle("b")


async def test_the_sweep_for_expired_models_spares_who_drains_or_waits(
    make_house: Make, mocker: Any
) -> None:
    house = make_house(max_age_s=0.0)
    manager = mocker.Mock()
    manager.get_settings.return_value.ttl_seconds = 1
    await house.get("a")
    for_b = await house.waits("b")
    house.entry("a").last_access = 1.0
    assert await house.pool.check_ttl_expirations(manager) == []
    await house.release("a")
    await for_b
    house.entry("b").last_access = 1.0
    assert await house.pool.check_ttl_expirations(manager) == []
    late = house.ask("a")
    await house.release("b")
    await late
    await house.release("a")
    house.entry("a").last_access = 1.0
    assert await house.pool.check_ttl_expirations(manager) == ["a"]
    assert await house.get("a")
    await house.ends_idle("a")


def dflash(house: House, mocker: Any, models: str, runs: bool = True) -> None:
    house.dflash |= set(models if runs else "")
    mocker.patch.object(
        house.pool,
        "_engine_runtime_signature",
        lambda model, *_a, **_k: (("dflash_enabled", str(model in models)),),
    )


async def test_b44_a_pinned_member_of_an_exclusive_kind_is_the_reason(
    house: House, mocker: Any
) -> None:
    dflash(house, mocker, "dp")
    house.entry("d").is_pinned = True
    await house.use("d")

    async def ask() -> None:
        await house.get("p")

    by_hand = ByHand(ask, path="/v1/chat/completions")
    with pytest.raises(house.module.InsufficientMemoryError):
        await by_hand.task
    refusal = by_hand.request.refusal
    assert (refusal.status, refusal.code) == (507, "model_too_large")
    assert "beside 'd', which is pinned" in refusal.message
    assert "only one can be loaded" in refusal.message
    # The others of the house are not concerned.
    await house.use("a")
    assert house.resident() == {"a", "d"}
    house.assert_idle()


async def test_f5_an_option_that_fell_back_excludes_nobody(house: House, mocker: Any) -> None:
    """What runs is a plain engine: both fit, so both stay, and no pin forbids either."""
    dflash(house, mocker, "dp", runs=False)
    house.entry("d").is_pinned = True
    for model in "dp":
        await house.get(model)
        await house.release(model)
    assert house.resident() == {"d", "p"}
    # And where it is not known yet what the wanted one will be.
    assert "unload d" not in house.events
    house.assert_idle()


async def test_f5_the_next_load_knows_that_the_last_one_fell_back(
    house: House, mocker: Any
) -> None:
    dflash(house, mocker, "dp", runs=False)
    await house.use("p")
    await house.pool._unload_engine("p")
    house.dflash.add("d")
    await house.use("d")
    await house.get("p")  # will fall back again: nobody leaves for it
    await house.release("p")
    assert house.resident() == {"d", "p"}
    house.dflash.add("p")  # it was installed meanwhile
    await house.pool._unload_engine("p")
    await house.use("p")
    await house.pool._unload_engine("p")
    await house.use("d", "p")
    assert house.resident() == {"p"}
    house.assert_idle()


async def test_f5_a_load_says_nothing_of_what_it_will_be(house: House, mocker: Any) -> None:
    """It may fall back too: who asks meanwhile waits for that, pinned or not."""
    dflash(house, mocker, "dp", runs=False)
    house.entry("d").is_pinned = True
    for_d = await house.held_load("d")
    for_p = await house.waits("p")
    house.hold_loads = False
    await house.let_load("d")
    await asyncio.gather(for_d, for_p)
    assert house.resident() == {"d", "p"}
    for model in "dp":
        await house.release(model)
    house.assert_idle()


async def test_f5_a_text_load_of_a_member_is_a_member(make_house: Make, mocker: Any) -> None:
    house = make_house(max_age_s=0.0)
    dflash(house, mocker, "dp")
    await house.get("d")
    for_p = await house.waits("p", force_lm=True)
    assert "load p" not in house.events
    await house.release("d")
    await for_p
    assert house.resident() == {"p"}
    await house.ends_idle("p")


async def test_f6_the_size_of_what_is_loaded_is_not_counted_twice(
    make_house: Make, mocker: Any
) -> None:
    """What its settings add is in the runtime size already, and is added again at a load."""
    house = make_house(max_age_s=0.0)
    if not hasattr(house.pool, "_entry_runtime_resident_size"):
        pytest.skip("this oMLX knows no size of settings")
    mocker.patch.object(
        house.pool, "_entry_runtime_resident_size", lambda *_a, base_size, **_k: base_size + 300
    )
    await house.get("a")  # 900
    assert house.entry("a").runtime_estimated_size == 900
    for_b = await house.waits("b")
    again = house.ask("a")  # its gate is closed
    await settle()
    (size,) = {
        w.size
        for t in house.admission.policy.targets
        if t.model == "a"
        for w in house.admission.policy.waiters(t)
    }
    assert size == 900
    await house.release("a")
    await for_b
    await house.release("b")
    await again
    await house.ends_idle("a")


async def test_f6_sizes_are_asked_again_while_requests_wait(house: House) -> None:
    """A rescan found other files: what was too large at the door may fit, and vice versa."""
    await house.get("a")
    waiting = [house.ask("b") for _ in range(2)]
    await settle()
    house.entry("b").estimated_size = 300
    house.admission.step()
    await asyncio.gather(*waiting)  # beside it
    assert house.resident() == {"a", "b"}
    for model in "bb":
        await house.release(model)
    await house.pool._unload_engine("b")
    house.entry("b").estimated_size = 600
    late = await house.waits("b")
    house.entry("b").estimated_size = 1100
    house.admission.step()
    with pytest.raises(house.module.ModelTooLargeError, match="b"):
        await late
    await house.ends_idle("a")


async def test_b44_an_exclusive_member_that_is_unloaded_by_hand_makes_room(
    make_house: Make, mocker: Any
) -> None:
    house = make_house(max_age_s=0.0)
    dflash(house, mocker, "dp")
    await house.get("d")
    for_p = house.ask("p")
    by_hand = ByHand(lambda: house.pool._unload_engine("d"), path="/v1/models/d/unload")
    await settle()
    assert not for_p.done()
    await house.release("d")
    await by_hand.task
    await for_p
    assert house.events.count("unload d") == 1
    await house.ends_idle("p")


@pytest.mark.parametrize("mode", ["guard off", "admin load", "one model"])
async def test_b57_every_way_in_drains_and_swaps(make_house: Make, mode: str) -> None:
    house = make_house(max_age_s=0.0, max_models=1 if mode == "one model" else 0)
    first = "d" if mode == "one model" else "a"
    if mode == "guard off":
        if not hasattr(house.pool, "_fallback_admission_ceiling"):
            pytest.skip("this oMLX has no fallback with the guard off")
        house.ceiling = 0
        house.pool._get_admission_ceiling = lambda: 1000
    if mode == "admin load":
        route = ByHand(
            lambda: house.get(first, lease=False), path=f"/admin/api/models/{first}/load"
        )
        await route.task
        await house.get(first)
    else:
        await house.get(first)
    other = "p" if mode == "one model" else "b"
    for_other = await house.waits(other)
    assert house.resident() == {first}
    await house.release(first)
    await for_other
    assert house.resident() == {other}
    await house.release(other)
    house.assert_idle()


async def test_b60_a_load_that_hangs_ends_its_waiters_and_no_resident_notices(
    house: House,
) -> None:
    resident = await house.get("d")
    await house.release("d")
    house.hold_loads = True
    path = "/v1/chat/completions"
    stuck = [ByHand(lambda: house.get("a"), path, max_wait="0.1") for _ in range(2)]
    await until(lambda: "load a" in house.events)
    assert await house.get("d") is resident
    for waiter in stuck:
        await refused(waiter.task)
        assert waiter.code == "model_swap_timeout"
    assert house.admission.policy.waiting == 0
    assert await house.get("d") is resident
    await house.release("d", 2)
    await house.let_load("a")
    await until(lambda: house.admission.policy.swap is None)
    house.assert_idle()
