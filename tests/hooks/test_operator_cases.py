"""Reported cases of operators on the pool: settings, rescans, deletion, pins, guard off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .by_hand import ByHand, load, unload
from .conftest import (
    SIZES,
    House,
    Make,
    by_profile,
    refused,
    request_to,
    settle,
    until,
)

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
        assert len(set(await asyncio.gather(*together))) == 1
        await house.release("d", 3)
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


@pytest.mark.parametrize("loading", [True, False])
async def test_b19_a_rescan_changes_nothing_for_who_waits(
    house: House, models: Path, loading: bool
) -> None:
    await house.get("b")
    house.hold_loads = True
    for_a = await house.waits("a")
    if loading:
        await house.release("b")
        await until(lambda: "load a" in house.events)
    before = house.entry("a")
    house.pool.discover_models([str(models)], [])
    for name, size in SIZES.items():
        house.entry(name).estimated_size = size
    assert (house.entry("a") is before) == loading
    if not loading:
        await house.release("b")
    await house.let_load("a")
    await for_a
    assert house.pool._current_model_memory == 600
    assert house.events.count("load a") == 1
    await house.ends_idle("a")


async def test_b19_a_deletion_ends_who_waits_for_the_model(house: House) -> None:
    """Stock unloads it, removes its folder and entry, and scans again."""
    await house.get("a")
    await house.get("d")
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

    async def expired(model: str) -> Any:
        house.entry(model).last_access = 1.0
        return await house.pool.check_ttl_expirations(manager)

    await house.get("a")
    for_b = await house.waits("b")
    assert await expired("a") == []
    await house.release("a")
    await for_b
    assert await expired("b") == []
    late = house.ask("a")
    await house.release("b")
    await late
    await house.release("a")
    assert await expired("a") == ["a"]
    await house.use("a")
    house.assert_idle()


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
    request = request_to("/v1/chat/completions")
    with pytest.raises(house.module.InsufficientMemoryError):
        await house.get("p", by=request)
    assert (request.refusal.status, request.refusal.code) == (507, "model_too_large")
    assert "beside 'd', which is pinned" in request.refusal.message
    assert "only one can be loaded" in request.refusal.message
    # The others of the house are not concerned.
    await house.use("a")
    assert house.resident() == {"a", "d"}
    house.assert_idle()


async def test_f5_an_option_that_fell_back_excludes_nobody(house: House, mocker: Any) -> None:
    """What runs is a plain engine: both fit, so both stay, and no pin forbids either.

    While it loads nobody knows yet: who asks meanwhile waits for that, pinned or not.
    """
    dflash(house, mocker, "dp", runs=False)
    house.entry("d").is_pinned = True
    for_d = await house.held_load("d")
    for_p = await house.waits("p")
    house.hold_loads = False
    await house.let_load("d")
    await asyncio.gather(for_d, for_p)
    assert house.resident() == {"d", "p"}
    assert "unload d" not in house.events
    await house.ends_idle("d", "p")


async def test_f5_the_next_load_knows_that_the_last_one_fell_back(
    house: House, mocker: Any
) -> None:
    dflash(house, mocker, "dp", runs=False)
    await house.use("p")
    await house.pool._unload_engine("p")
    house.dflash.add("d")
    await house.use("d", "p")  # will fall back again: nobody leaves for it
    assert house.resident() == {"d", "p"}
    house.dflash.add("p")  # it was installed meanwhile
    await house.pool._unload_engine("p")
    await house.use("p")
    await house.pool._unload_engine("p")
    await house.use("d", "p")
    assert house.resident() == {"p"}
    house.assert_idle()


@pytest.mark.parametrize("text", [True, False])
async def test_b44_f5_one_of_an_exclusive_kind_drains_for_the_other(
    make_house: Make, mocker: Any, text: bool
) -> None:
    """Two DFlash models that would fit together; a text load of a member is a member."""
    house = make_house(max_age_s=0.0)
    dflash(house, mocker, "dp")
    await house.get("d")
    for_p = await house.waits("p", force_lm=text)
    assert house.entry("d").engine is not None
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
    for_p, by_hand = house.ask("p"), unload(house.pool, "d")
    await settle()
    assert not for_p.done()
    await house.release("d")
    await by_hand.task
    await for_p
    assert house.events.count("unload d") == 1
    await house.ends_idle("p")


@pytest.mark.parametrize("mode", ["guard off", "admin load", "one model"])
async def test_b57_every_way_in_drains_and_swaps(make_house: Make, mode: str) -> None:
    first, other = "dp" if mode == "one model" else "ab"
    house = make_house(max_age_s=0.0, max_models=1 if mode == "one model" else 0)
    if mode == "guard off":
        if not hasattr(house.pool, "_fallback_admission_ceiling"):
            pytest.skip("this oMLX has no fallback with the guard off")
        house.ceiling = 0
        house.pool._get_admission_ceiling = lambda: 1000
    if mode == "admin load":
        assert await load(house.pool, first, admin=True).task == "loaded"
    await house.get(first)
    for_other = await house.waits(other)
    assert house.resident() == {first}
    await house.release(first)
    await for_other
    assert house.resident() == {other}
    await house.ends_idle(other)


async def test_b60_a_load_that_hangs_ends_its_waiters_and_no_resident_notices(
    house: House,
) -> None:
    await house.use("d")
    resident = house.entry("d").engine
    house.hold_loads = True
    path = "/v1/chat/completions"
    stuck = [ByHand(lambda: house.get("a"), path, max_wait="0.1") for _ in range(2)]
    await until(lambda: "load a" in house.events)
    assert await house.get("d") is resident
    for waiter in stuck:
        assert (await refused(waiter.task)).code == "model_swap_timeout"
    assert house.admission.policy.waiting == 0
    assert await house.get("d") is resident
    await house.let_load("a")
    await until(lambda: house.admission.policy.swap is None)
    await house.ends_idle("d", "d")
