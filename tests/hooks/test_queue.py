"""The queue on the pool: order, drain, accounting, one outcome for every request."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.core.pool import port as pool_port
from omlx_admission.core.request import Request
from omlx_admission.hooks.pool.port import admission_refused

from .by_hand import ByHand
from .conftest import (
    House,
    Make,
    by_profile,
    later,
    never,
    refused,
    request_to,
    settle,
    until,
    within,
)


def names(events: list[str]) -> list[str]:
    """Without the begin of each load, whose end is what counts here."""
    return [e for e in events if e.split()[0] in ("loaded", "unloaded")]


async def test_b01_a_request_for_the_evicted_resident_waits_and_is_served(house: House) -> None:
    await house.use("a")
    house.events.clear()
    for_b = await house.held_load("b")
    for_a = await house.waits("a")
    await house.let_load("b")
    await for_b
    # The lease of B was taken in the step that ended its load: A waits still.
    await settle()
    assert house.resident() == {"b"}
    await house.release("b")
    await later(2.0)  # B, idle, might be asked for again
    await house.let_load("a")
    await for_a
    assert names(house.events) == ["unloaded a", "loaded b", "unloaded b", "loaded a"]
    await house.ends_idle("a")


async def test_b02_the_busy_model_drains_and_nobody_is_refused(make_house: Make) -> None:
    house = make_house(max_age_s=0.0)
    stream = await house.get("a")
    for_b = await house.waits("b")
    assert house.entry("a").pending_unload_reason == "admission drain for 'b'"
    late_a = await house.waits("a")
    # The gate is closed: neither is served while A's stream runs, and A stays whole.
    assert not for_b.done()
    assert house.entry("a").engine is stream
    stream.stop.assert_not_awaited()
    stream.abort_all_requests.assert_not_awaited()
    await house.release("a")
    await for_b
    assert not late_a.done()
    await house.release("b")
    await late_a
    await house.ends_idle("a")


async def test_the_resident_serves_on_until_the_waiter_is_old(make_house: Make) -> None:
    house = make_house(max_age_s=1000.0)
    await house.get("a")
    for_b = await house.waits("b")
    await house.get("a")
    assert house.entry("a").pending_unload_reason is None
    await house.release("a")
    await settle()
    assert not for_b.done()
    await house.release("a")
    await for_b
    await house.ends_idle("b")


@pytest.mark.parametrize("settings", [{}, {"features": {"queue", "errors"}}])
async def test_b04_no_unload_before_the_last_lease_is_back(
    make_house: Make, settings: dict[str, Any]
) -> None:
    house = make_house(max_age_s=0.0, **settings)
    for _ in range(3):
        await house.get("a")
    for_b = house.ask("b")
    for left in (2, 1, 0):
        await settle()
        assert "unload a" not in house.events
        await house.release("a")
        assert house.entry("a").in_use == left
    await for_b
    assert house.events.count("unload a") == 1
    await house.ends_idle("b")


@pytest.mark.parametrize("first", ["a", "b"])
async def test_b05_b06_cold_requests_in_one_tick_are_served_in_turn(
    house: House, first: str
) -> None:
    order = [first, "b" if first == "a" else "a", "d"]
    served: list[str] = []

    async def one(model: str) -> None:
        await house.get(model)
        served.append(model)
        used = house.pool._current_model_memory
        assert used <= house.ceiling
        await settle()
        await house.release(model)

    await asyncio.gather(*(one(m) for m in order))
    assert sorted(served) == ["a", "b", "d"]
    assert served[0] == first
    house.assert_idle()


async def test_b07_b23_waiters_are_granted_in_the_step_that_ends_their_one_load(
    house: House, mocker: Any
) -> None:
    house.hold_loads = True
    requests = [house.ask("a") for _ in range(5)]
    for_b = await house.waits("b")
    seen: list[int] = []
    find = house.pool._find_lru_victim

    def spy() -> Any:
        seen.append(house.entry("a").in_use)
        return find()

    mocker.patch.object(house.pool, "_find_lru_victim", spy)
    await house.let_load("a")
    assert set(await asyncio.gather(*requests)) == {house.entry("a").engine}
    assert house.entry("a").in_use == 5
    await house.release("a", 5)
    await house.let_load("b")
    await for_b
    assert house.events.count("load a") == 1
    assert set(seen) == {0}
    await house.ends_idle("b")


async def test_b24_two_waiters_for_one_victim_are_both_served(house: House) -> None:
    house.entry("x").estimated_size = 600
    await house.use("a")
    await asyncio.gather(house.use("b"), house.use("x"))
    assert len(house.resident()) == 1
    house.assert_idle()


class TestNeverFits:
    """K2, B28: 507 at once, and nobody pays for it."""

    @pytest.mark.parametrize("locked", [False, True])
    async def test_larger_than_the_ceiling(self, house: House, locked: bool) -> None:
        """Nor does it wait for the load that has the pool's lock."""
        await house.use("d")
        loading = [await house.held_load("a")] if locked else []
        with pytest.raises(house.module.ModelTooLargeError, match="x"):
            house.pool.get_engine("x").send(None)
        assert house.resident() == {"d"}
        for load in loading:
            await house.let_load("a")
            await load
            await house.release("a")
        house.assert_idle()

    async def test_pinned_models_count_against_it(self, house: House) -> None:
        house.entry("p").is_pinned = True
        await house.get("p")
        await house.use("d")
        house.entry("a").estimated_size = 800
        with pytest.raises(house.module.InsufficientMemoryError, match="pinned"):
            await house.get("a")
        assert house.resident() == {"p", "d"}

    async def test_the_guard_being_off_refuses_nothing(self, house: House) -> None:
        """B57: without a ceiling the pool evicts as well as it can, then loads."""
        if not hasattr(house.pool, "_get_admission_ceiling"):
            pytest.skip("this release has no ceiling for a guard that is off")
        house.pool._get_final_ceiling = lambda: 0
        house.pool._get_admission_ceiling = lambda: 1000
        await house.get("a")
        for_x = await house.waits("x")
        await house.release("a")
        await for_x
        assert house.resident() == {"x"}


class TestOutcomes:
    """K1, K6, K7, K8: each wait ends once, in the right way, and leaves nothing."""

    async def test_the_budget_ends_a_wait(self, house: House) -> None:
        await house.get("a")
        house.admission.config = replace(house.admission.config, max_wait_s=0.02)
        refusal = await refused(house.get("b"))
        assert "'a' (1 running)" in refusal.message
        assert (refusal.status, refusal.code) == (503, "model_swap_timeout")
        assert 1 <= refusal.retry_after <= 60
        assert "unload b" not in house.events
        assert house.entry("a").pending_unload_reason is None
        await house.ends_idle("a")
        assert "load b" not in house.events

    async def test_b29_a_full_queue_refuses_at_once(self, make_house: Make) -> None:
        house = make_house(max_queue=3)
        await house.get("a")
        waiting = [house.ask("b") for _ in range(3)]
        await settle()
        for _ in range(3):
            with pytest.raises(admission_refused()) as at_once:
                house.pool.get_engine("b").send(None)
            assert at_once.value.refusal.code == "admission_queue_full"
        # The loaded model is not behind that queue, and a place freed is a place.
        await house.use("a")
        waiting.pop().cancel()
        await settle()
        waiting.append(house.ask("b"))
        await settle()
        await house.release("a")
        await asyncio.gather(*waiting)
        await house.release("b", 3)
        house.assert_idle()

    async def test_b32_no_budget_serves_only_what_is_loaded(self, make_house: Make) -> None:
        house = make_house(max_wait_s=300.0)
        await house.get("a")
        headers = [(b"x-omlx-max-wait", b"0")]
        request = Request({"path": "/v1/chat/completions", "headers": headers}, never)
        with within(request):
            await house.use("a")
            with pytest.raises(admission_refused()) as at_once:
                house.pool.get_engine("b").send(None)
        assert at_once.value.refusal.code == "model_busy"
        await house.ends_idle("a")
        assert house.resident() == {"a"}

    async def test_b51_a_failed_load_tells_everybody_once_and_holds_no_memory(
        self, house: House, caplog: pytest.LogCaptureFixture
    ) -> None:
        # A captured log record would keep the exception, and with it the "weights".
        caplog.set_level(logging.CRITICAL + 1, logger="omlx")
        weights = type("Weights", (), {})()
        gone = weakref.ref(weights)

        house.fail["d"] = RuntimeError("broken file")
        house.fail["d"].weights = weights  # type: ignore[attr-defined]
        del weights
        house.hold_loads = True
        requests = [house.ask("d") for _ in range(3)]
        await house.let_load("d")
        results = await asyncio.gather(*requests, return_exceptions=True)
        unavailable = house.module.ModelUnavailableError
        assert [type(r) for r in results] == [unavailable] * 3
        assert len({id(r) for r in results}) == 3
        assert all(r.__cause__ is None for r in results)
        # Stock caches the failure; the next one does not load or evict again.
        house.events.clear()
        with pytest.raises(unavailable):
            await house.get("d")
        assert house.events == []
        house.fail.clear()
        await settle()
        gc.collect()
        assert gone() is None
        house.assert_idle()

    async def test_a_passing_shortage_is_tried_again(self, house: House, mocker: Any) -> None:
        """B50: residue that has not settled is a wait, not a refusal."""
        footprint = [900]
        mocker.patch.object(house.module, "get_phys_footprint", lambda: footprint[0])
        request = house.ask("d")
        await until(lambda: house.admission is not None and house.admission._shortages)
        assert not request.done()
        footprint[0] = 0
        await request
        await house.ends_idle("d")

    async def test_a_shortage_that_stays_ends_in_stocks_own_words(
        self, make_house: Make, mocker: Any
    ) -> None:
        house = make_house(max_wait_s=0.5)
        mocker.patch.object(house.module, "get_phys_footprint", lambda: 900)
        with pytest.raises(house.module.InsufficientMemoryError):
            await house.get("d")
        house.assert_idle()

    async def test_shutdown_ends_every_wait(self, house: House) -> None:
        await house.get("a")
        waiting = [house.ask(m) for m in ("b", "b", "p", "d")]
        await settle()
        await house.pool.shutdown()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        codes = [r.refusal.code for r in results if isinstance(r, Exception)]
        assert len(codes) >= 2
        assert set(codes) == {"shutting_down"}
        await refused(house.get("b"))


class TestCancelWindows:
    """K6: a client that leaves leaves nothing, wherever it leaves."""

    @pytest.mark.parametrize("leaves", ["task", "client"])
    @pytest.mark.parametrize("age", [1000.0, 0.0], ids=["queued", "draining"])
    async def test_queued(self, make_house: Make, age: float, leaves: str) -> None:
        """The server does not cancel a handler whose client has left: we notice that."""
        house = make_house(max_age_s=age)
        await house.get("a")
        for_b = ByHand(lambda: house.get("b"), path="/v1/chat/completions")
        await settle()
        assert bool(house.entry("a").pending_unload_reason) is not bool(age)
        if leaves == "client":
            for_b.leave()
            assert "left" in (await refused(for_b.task)).message
        else:
            await cancel(for_b.task)
        assert house.entry("a").pending_unload_reason is None
        await house.use("a")
        await house.ends_idle("a")
        assert house.resident() == {"a"}
        assert "load b" not in house.events

    async def test_decided(self, house: House) -> None:
        """The load was decided, its task has not run yet: nothing is evicted for nobody."""
        await house.use("a")
        for_b = house.ask("b")
        await asyncio.sleep(0)
        assert house.admission.policy.swap.loading
        assert "unload a" not in house.events
        (waiter,) = house.admission.policy.waiters(house.admission.policy.targets[0])
        house.admission._client_left(waiter)
        assert "left" in (await refused(for_b)).message
        await settle()
        house.assert_idle()
        assert house.resident() == {"a"}

    async def test_unloading(self, house: House) -> None:
        """The victim is on its way out: that ends, and the load for nobody does too."""
        await house.use("a")
        house.hold_unloads = True
        for_b = house.ask("b")
        await until(lambda: "unload a" in house.events)
        await cancel(for_b)
        await house.let_unload("a")
        await until(lambda: house.admission.policy.swap is None)
        house.assert_idle()

    @pytest.mark.parametrize("others", [0, 2])
    async def test_b33_loading(self, house: House, others: int) -> None:
        house.hold_loads = True
        first = house.ask("a")
        rest = [house.ask("a") for _ in range(others)]
        await until(lambda: "load a" in house.events)
        await cancel(first)
        await house.let_load("a")
        await asyncio.gather(*rest)
        await until(lambda: house.admission.policy.swap is None)
        # One load, accounted and evictable even when nobody is left to use it.
        assert house.events == ["load a", "loaded a"]
        assert house.pool._current_model_memory == 600
        assert house.entry("a").in_use == others
        await house.release("a", len(rest))
        house.hold_loads = False
        await house.get("b")
        assert house.resident() == {"b"}
        await house.ends_idle("b")

    async def test_just_granted(self, make_house: Make) -> None:
        """Granted and cancelled in the same turn: the lease goes back, the next one goes."""
        house = make_house(max_age_s=0.0)
        await house.get("a")
        first, second = house.ask("b"), house.ask("a")
        await settle()
        admission = house.admission
        granted = asyncio.Event()
        grant = admission._grant

        def spy(target: Any, waiters: Any) -> None:
            grant(target, waiters)
            if target.model == "b" and waiters:
                assert house.entry("b").in_use == 1
                first.cancel()
                granted.set()

        admission._grant = spy
        await house.release("a")
        await granted.wait()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        await house.ends_idle("a")


async def test_b13_an_option_that_fell_back_at_load_does_not_reload(
    house: House, mocker: Any
) -> None:
    """Before 0.5.4 the engine's own signature is kept, not the one that was wanted."""
    by_profile(house, mocker)
    first = await house.get("d", runtime_settings={"mtp": 1})
    house.entry("d").runtime_settings_signature = (("mtp_enabled", "None"),)
    again = [await house.get("d", runtime_settings={"mtp": 1}) for _ in range(3)]
    assert set(again) == {first}
    assert house.events == ["load d", "loaded d"]


async def test_the_enforcer_is_offered_stocks_own_victim(house: House) -> None:
    await house.get("a")
    await house.get("d", lease=False)
    await house.waits("b")
    # A is planned to leave, but it is busy and the enforcer has no plan.
    assert house.pool._find_lru_victim() == "d"


async def test_max_models_holds_at_every_instant(make_house: Make) -> None:
    house = make_house(max_models=1)
    house.ceiling = 10_000
    most = []

    async def one(model: str) -> None:
        await house.get(model)
        entries = house.pool._entries.values()
        most.append(sum(e.engine is not None or e.is_loading for e in entries))
        await house.release(model)

    await asyncio.gather(*(one(m) for m in "abdpx" * 3))
    assert set(most) == {1}
    assert len(house.resident()) == 1
    house.assert_idle()


async def test_c15_helpers_of_chat_models_take_no_place(make_house: Make, mocker: Any) -> None:
    """An embedder beside the one chat model: no swap for every half turn."""
    house = make_house(max_models=1)
    house.ceiling = 10_000
    mocker.patch.object(house.module, "EmbeddingEngine", house.engine)
    house.entry("d").engine_type = "embedding"
    await house.use(*"dadada")
    assert house.resident() == {"a", "d"}
    assert house.events.count("load a") == house.events.count("load d") == 1
    await house.use("b")  # it takes A's place, and D is none
    assert house.resident() == {"b", "d"}
    house.entry("d").is_pinned = True
    await house.use("a")
    assert house.resident() == {"a", "d"}
    house.entry("d").is_pinned = False
    loads = house.events.count("load a")
    for pinned in (False, True):
        # The place that A has is none of its, and neither is one that A has for good.
        house.entry("a").is_pinned = pinned
        await house.pool._unload_engine("d")
        await house.use("d")
    assert house.resident() == {"a", "d"}
    assert house.events.count("load a") == loads
    house.assert_idle()


async def test_c15_the_refusal_for_places_names_what_helps(
    make_house: Make, mocker: Any
) -> None:
    house = make_house(max_models=1)
    house.ceiling = 10_000
    mocker.patch.object(house.module, "EmbeddingEngine", house.engine)
    house.entry("p").engine_type = "embedding"
    house.entry("p").is_pinned = True  # in nobody's way, and not named
    await house.use("p")
    house.entry("a").is_pinned = True
    await house.use("a")
    request = request_to("/v1/chat/completions")
    with within(request), pytest.raises(house.module.InsufficientMemoryError):
        await house.get("d")
    assert request.refusal.status == 507
    assert request.refusal.message == (
        "Model 'd' cannot be loaded: OMLX_ADMISSION_MAX_MODELS allows 1, and 'a' stays "
        "loaded because it is pinned. No wait can change that: unpin a model, or raise "
        "OMLX_ADMISSION_MAX_MODELS."
    )
    assert house.resident() == {"a", "p"}
    house.assert_idle()


async def test_a_fault_of_the_queue_lets_everybody_run_stock(
    make_house: Make, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(max_age_s=0.0)
    await house.get("a")
    for_b = await house.waits("b")
    assert house.entry("a").pending_unload_reason
    mocker.patch.object(house.admission.policy, "step", side_effect=ZeroDivisionError)
    house.admission.changed()
    # What stock says to a busy pool.
    with pytest.raises(house.module.InsufficientMemoryError):
        await for_b
    assert house.entry("a").pending_unload_reason is None
    await house.get("a")
    assert caplog.text.count("the queue failed") == 1


#: Where the queue may fail, and when: on the admission's own objects.
FAULTS = {
    "at the end of the budget": ("policy.retry_in", {"max_wait_s": 0.05}),
    "in the text of a refusal": ("_refusal", {"max_wait_s": 0.05}),
    "after it left the queue": ("_refused", {"max_wait_s": 0.05}),
    "at the door": ("policy.retry_in", {"max_queue": 0}),
    "as it never fits": ("_too_large", {}),
    "at its place in the queue": ("policy.enqueue", {}),
    "as a lease comes back": ("policy.used", {"max_wait_s": 0.05}),
}


@pytest.mark.parametrize("where", FAULTS)
async def test_a_fault_of_the_queue_makes_nobody_wait_for_ever(
    house: House, mocker: Any, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    place, values = FAULTS[where]
    await house.get("a")
    house.admission.config = replace(house.admission.config, **values)
    holder, _, name = place.rpartition(".")
    broken = house.admission.policy if holder else house.admission
    mocker.patch.object(broken, name, side_effect=ZeroDivisionError)
    model, stock = "b", house.module.InsufficientMemoryError
    if where == "as it never fits":
        model, stock = "x", house.module.ModelTooLargeError
    if name == "used":
        await house.use("a")
    with pytest.raises(stock):
        await asyncio.wait_for(house.ask(model), 10)
    assert house.admission.broken
    assert caplog.text.count("the queue failed") == 1
    assert house.entry("a").in_use == 1
    # The pool goes on without it.
    await house.release("a")
    await house.use("b")
    mocker.stopall()
    house.assert_idle()


async def test_a_fault_at_the_end_of_a_load_makes_nobody_wait_for_ever(
    house: House, mocker: Any
) -> None:
    for_a = await house.held_load("a")
    mocker.patch.object(house.admission.policy, "load_succeeded", side_effect=ZeroDivisionError)
    await house.let_load("a")
    # Stock finds it loaded.
    assert await asyncio.wait_for(for_a, 10) is house.entry("a").engine
    assert house.admission.broken
    assert house.entry("a").in_use == 1
    await house.release("a")


async def test_a_fault_in_the_waking_takes_and_returns_each_lease_once(
    house: House, mocker: Any
) -> None:
    house.hold_loads = True
    waiters = [house.ask("a") for _ in range(3)]
    await until(lambda: "load a" in house.events)
    wake = house.admission._wake

    def broken(waiters: Any, engine: Any, start: int) -> None:
        wake(waiters[:1], engine, start)
        raise ZeroDivisionError

    mocker.patch.object(house.admission, "_wake", broken)
    await house.let_load("a")
    engines = await asyncio.wait_for(asyncio.gather(*waiters), 10)
    assert {id(e) for e in engines} == {id(house.entry("a").engine)}
    assert house.entry("a").in_use == 3
    await house.release("a", len(engines))
    assert house.entry("a").in_use == 0


async def test_a_folder_that_is_gone_is_said_and_changes_no_list_that_is_being_read(
    house: House, models: Path
) -> None:
    """Stock drops the entry under its lock: whoever has the lock may go through them."""
    shutil.rmtree(models / "b")
    async with house.pool._lock:
        before = list(house.pool._entries)
        with pytest.raises(house.module.ModelNotFoundError):
            await house.get("b")
        assert list(house.pool._entries) == before
    with pytest.raises(house.module.ModelNotFoundError):
        await house.get("b")
    assert "b" not in house.pool._entries
    house.assert_idle()


async def test_a_planned_victim_that_works_without_a_lease_is_spared(house: House) -> None:
    await house.use("a", "d")
    working = house.entry("a").engine
    working.has_active_requests.return_value = True
    token = pool_port.planned_victims.set(("a",))
    assert house.pool._find_lru_victim() == "d"
    working.has_active_requests.return_value = False
    assert house.pool._find_lru_victim() == "a"
    pool_port.planned_victims.reset(token)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
