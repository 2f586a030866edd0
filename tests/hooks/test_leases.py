"""B12: a model handed to a route that takes no lease stays until its request ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omlx_admission.core import request as requests
from omlx_admission.hooks.pool.port import admission_refused
from omlx_admission.hooks.pool.state import state_of

from .conftest import House, Make, by_profile, never, request_to, settle, soon, until, within

LOAD = "/v1/models/a/load"

#: A route that uses what it is handed, where a load by hand is kept for its first use.
USE = "/admin/api/bench/start"


@pytest.fixture
def house(make_house: Make) -> House:
    """Its residents drain for the first request that waits."""
    return make_house(max_age_s=0.0)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("features", [None, {"queue"}])
async def test_b12_an_unleased_model_is_no_victim_before_its_request_ends(
    make_house: Make, cold: bool, features: set[str] | None
) -> None:
    house = make_house(max_age_s=0.0, features=features)
    if not cold:
        await house.get("a", lease=False)
    request = request_to(LOAD)
    engine = await house.get("a", lease=False, by=request)
    assert house.entry("a").in_use == 1
    for_b = await house.waits("b")
    assert house.entry("a").engine is engine
    request.end()
    await soon(for_b)  # for a first use it is kept for some seconds
    await house.ends_idle("b")


@pytest.mark.parametrize("cold", [True, False])
async def test_b12_without_the_queue_stock_finds_no_victim_either(
    make_house: Make, cold: bool
) -> None:
    house = make_house(features={"resident"})
    if not cold:
        await house.get("a", lease=False)
    request = request_to(LOAD)
    engine = await house.get("a", lease=False, by=request)
    with pytest.raises(house.module.InsufficientMemoryError):
        await house.get("b")
    assert house.entry("a").engine is engine
    request.end()
    await house.use("b")
    house.assert_idle()


async def test_b12_without_the_queue_its_holder_gets_a_model_again_that_is_to_go(
    make_house: Make,
) -> None:
    """Stock would wait for the lease of the very request that asks."""
    house = make_house(features={"resident"})
    request = request_to(LOAD)
    with within(request):
        engine = await house.get("a", lease=False)
        house.pool._mark_pending_unload_locked("a", "hard memory pressure")
        assert await house.get("a", lease=False) is engine
    assert house.entry("a").in_use == 2
    request.end()
    await until(lambda: not house.resident() and not state_of(house.pool).unloading)
    house.assert_idle()


@pytest.mark.parametrize("ended", [True, False])
async def test_a_job_keeps_what_it_was_handed_until_its_own_end(
    house: House, ended: bool
) -> None:
    """A benchmark: the request that began it ends before or after its first model."""
    request = request_to("/admin/api/bench/start")
    handed, finish = asyncio.Event(), asyncio.Event()

    async def job() -> None:
        engine = await house.get("a", lease=False)
        handed.set()
        await finish.wait()
        assert house.entry("a").engine is engine

    with within(request):
        running = asyncio.ensure_future(job())
    if ended:
        request.end()
    await handed.wait()
    request.end()
    await settle()
    assert house.entry("a").in_use == 1
    for_b = await house.waits("b")
    finish.set()
    await running
    await for_b
    await house.ends_idle("b")


@pytest.mark.parametrize("end", ["error", "cancel"])
async def test_a_job_that_fails_gives_its_model_back(house: House, end: str) -> None:

    async def job() -> None:
        await house.get("a", lease=False)
        if end == "error":
            raise ValueError
        await asyncio.Event().wait()

    request = request_to("/admin/api/bench/start")
    with within(request):
        running = asyncio.ensure_future(job())
    request.end()
    await until(lambda: house.entry("a").in_use == 1 or running.done())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await settle()
    house.assert_idle()


async def test_a_job_is_not_bound_by_what_its_request_allowed(make_house: Make) -> None:
    """Fail-fast is for clients; the one that began the job has its answer long since."""
    house = make_house(max_wait_s=0.0)
    headers = [(b"x-omlx-max-wait", b"0")]
    request = requests.Request({"path": "/admin/api/bench/start", "headers": headers}, never)
    request.end()

    async def job() -> None:
        await house.get("a", lease=False)

    with within(request):
        running = asyncio.ensure_future(job())
    await running
    await settle()
    assert house.resident() == {"a"}
    house.assert_idle()


async def test_a_job_that_unloads_its_model_lets_go_of_it(house: House) -> None:
    """Benchmarks unload what they loaded, then take the next; both in one task."""
    told: list[int] = []

    async def job() -> None:
        await house.get("a", lease=False)
        unload = asyncio.ensure_future(house.pool._unload_engine("a"))
        await asyncio.sleep(0)
        told.append(house.entry("a").in_use)
        await unload
        await house.get("b", lease=False)
        told.append(house.entry("b").in_use)

    request = request_to("/admin/api/bench/start")
    with within(request):
        running = asyncio.ensure_future(job())
    request.end()
    await running
    await settle()
    assert told == [0, 1]
    house.assert_idle()


@pytest.mark.parametrize(
    "method", ["prepare_cluster_reload", "unload_if_idle_unpinned", "request_unload"]
)
async def test_whoever_asks_for_an_unload_is_not_in_its_own_way(
    house: House, method: str
) -> None:
    """Cluster activation that fails: the request unloads what it was handed."""
    unload = getattr(house.pool, method, None)
    if unload is None:
        pytest.skip(f"this oMLX has no {method}")
    request = request_to("/admin/api/cluster/activate")
    with within(request):
        await house.get("a", lease=False)
        assert house.entry("a").in_use == 1
        await unload("a")
    assert house.resident() == set()
    request.end()
    await until(lambda: house.pool._current_model_memory == 0)
    await settle()
    house.assert_idle()


async def test_a_pinned_preload_needs_no_lease(make_house: Make) -> None:
    """It runs in no request. Nothing of it stays leased, and nobody may evict it."""
    house = make_house(max_age_s=0.0, max_wait_s=0.0)
    house.entry("a").is_pinned = True
    await house.pool.preload_pinned_models()
    assert house.resident() == {"a"}
    house.assert_idle()
    with pytest.raises(house.module.InsufficientMemoryError):
        await house.get("b")
    assert house.resident() == {"a"}


async def test_switched_off_nothing_is_held(make_house: Make) -> None:
    house = make_house(leases=False)
    request = request_to(LOAD)
    await house.get("a", lease=False, by=request)
    house.assert_idle()
    request.end()
    house.assert_idle()


class TestTheSameRequestAsksAgain:
    """Embeddings and rerank: validated without a lease, used under one after the 200."""

    @pytest.mark.parametrize("features", [None, {"queue"}])
    @pytest.mark.parametrize("between", ["nothing", "drain", "settings", "admin unload"])
    @pytest.mark.parametrize("budget", [30.0, 0.0])
    async def test_it_is_answered_at_once(
        self,
        make_house: Make,
        mocker: Any,
        between: str,
        budget: float,
        features: set[str] | None,
    ) -> None:
        house = make_house(max_age_s=0.0, max_wait_s=budget, features=features)
        request, others = request_to(USE if budget else LOAD), []
        engine = await house.get("a", lease=False, by=request)
        if between == "drain" and budget:
            others.append(house.ask("b"))
            await until(lambda: house.entry("a").pending_unload_reason is not None)
        elif between == "settings":
            mocker.patch.object(
                house.pool, "_engine_runtime_signature", lambda *_a, **_k: (("ttl", "1"),)
            )
        elif between == "admin unload":
            house.pool._mark_pending_unload_locked("a", "manual admin unload")
        with within(request):
            again = house.ask("a")
            await settle()
            assert again.done()
            assert await again is engine
            assert house.entry("a").in_use == 2
            await house.release("a")
        request.end()
        for other in others:
            await other
            await house.release("b")
        await until(lambda: house.entry("a").pending_unload_reason is None)
        await until(lambda: not state_of(house.pool).unloading)
        house.assert_idle()

    async def test_another_variant_is_another_question(self, house: House, mocker: Any) -> None:
        """The model is loaded anew; what was kept of the first does not keep it from that."""
        by_profile(house, mocker)
        request = request_to(USE)
        with within(request):
            first = await house.get("d", lease=False)
            second = await house.get("d", lease=False, runtime_settings={"mtp": 1})
        assert second is not first
        assert house.events.count("load d") == 2
        request.end()
        house.assert_idle()

    async def test_another_request_waits_for_the_drain(self, house: House) -> None:
        await house.get("a", by=request_to(USE))
        for_b = await house.waits("b")
        other = await house.waits("a", by=request_to(USE))
        await house.release("a")
        await for_b
        await house.release("b")
        await other
        await house.ends_idle("a")


class TestNobodyWaitsForItself:
    """A request that holds one model and asks for another that needs its room."""

    async def test_what_it_uses_leaves_no_room_ever(self, house: House) -> None:
        request = request_to("/v1/chat/completions")
        with within(request):
            await house.get("a")
            for_b = house.ask("b")
            await settle()
            assert for_b.done()
            with pytest.raises(house.module.InsufficientMemoryError, match="itself uses"):
                await for_b
            await house.release("a")
        assert (request.refusal.status, request.refusal.code) == (507, "model_too_large")
        assert house.resident() == {"a"}
        house.assert_idle()

    async def test_what_is_only_kept_for_it_is_handed_back(self, house: House) -> None:
        request = request_to(USE)
        with within(request):
            await house.get("a", lease=False)
            await house.get("b", lease=False)
        assert house.resident() == {"b"}
        assert house.entry("b").in_use == 1
        request.end()
        house.assert_idle()

    async def test_another_victim_is_drained_instead_of_its_own(self, house: House) -> None:
        """A is used longest ago and would leave first, but the asking request uses it."""
        request = request_to("/v1/chat/completions")
        await house.get("a", by=request)
        await house.get("p")
        with within(request):
            for_d = await house.waits("d")
        assert house.entry("a").pending_unload_reason is None
        await house.release("p")
        await for_d
        assert house.resident() == {"a", "d"}
        with within(request):
            await house.release("a")
            await house.release("d")
        house.assert_idle()

    @pytest.mark.parametrize("lease", [True, False])
    async def test_what_it_uses_drains_for_another(self, house: House, lease: bool) -> None:
        """B waits for A, which a request uses that now asks for D: it would wait for B."""
        request = request_to(USE)
        await house.get("p")
        await house.get("a", lease=lease, by=request)
        for_b = house.ask("b")
        await until(lambda: house.entry("a").pending_unload_reason is not None)
        with within(request):
            for_d = house.ask("d")
            await settle()
        if lease:
            assert for_d.done()
            with pytest.raises(admission_refused(), match="'a', which this request"):
                await for_d
            assert request.refusal.status == 503
            assert request.refusal.retry_after is not None
            await house.release("a", by=request)
        await for_b
        await house.release("b")
        await house.release("p")
        if not lease:
            await for_d
            await house.release("d", by=request)
        request.end()
        house.assert_idle()
