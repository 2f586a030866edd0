# SPDX-License-Identifier: Apache-2.0
"""A model that was handed out within a request stays until the request ends."""

import asyncio

import pytest

from omlx.admission import request as requests
from omlx.engine_pool import EngineEntry, EnginePool


class Engine:
    def has_active_requests(self):
        return False


def make_pool():
    pool = EnginePool()
    pool._entries["a"] = EngineEntry(
        model_id="a",
        model_path="/models/a",
        model_type="llm",
        engine_type="batched",
        estimated_size=1000,
        engine=Engine(),
    )
    return pool


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def within_request(action):
    async def app(scope, receive, send):
        await action()

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/audio", "headers": []}
    await requests.RequestMiddleware(app)(scope, receive, send)
    await settle()


@pytest.mark.asyncio
async def test_it_is_no_victim_before_the_request_ends():
    pool = make_pool()
    entry = pool._entries["a"]
    assert pool._find_lru_victim() == "a"

    async def action():
        assert await pool.get_engine("a") is entry.engine
        await settle()
        assert entry.in_use == 1
        assert pool._find_lru_victim() is None

    await within_request(action)
    assert entry.in_use == 0
    assert pool._find_lru_victim() == "a"


@pytest.mark.asyncio
async def test_a_request_that_fails_gives_it_back_too():
    pool = make_pool()

    async def action():
        await pool.get_engine("a")
        raise RuntimeError("the route failed")

    with pytest.raises(RuntimeError):
        await within_request(action)
    await settle()
    assert pool._entries["a"].in_use == 0


@pytest.mark.asyncio
async def test_a_caller_with_a_lease_gives_it_back_itself():
    pool = make_pool()

    async def action():
        async with pool.acquire("a"):
            assert pool._entries["a"].in_use == 1
        assert pool._entries["a"].in_use == 0

    await within_request(action)
    assert pool._entries["a"].in_use == 0


@pytest.mark.asyncio
async def test_outside_of_a_request_nothing_is_kept():
    pool = make_pool()
    await pool.get_engine("a")
    assert pool._entries["a"].in_use == 0


@pytest.mark.asyncio
async def test_a_failed_call_leaves_no_lease(monkeypatch):
    pool = make_pool()
    entry = pool._entries["a"]

    def not_ready(model_id, engine):
        raise ValueError(model_id)

    monkeypatch.setattr(pool, "_validate_llm_engine_ready", not_ready)
    entry.in_use = 1

    async def action():
        with pytest.raises(ValueError, match="a"):
            await pool.get_engine("a")

    await within_request(action)
    assert entry.in_use == 1


@pytest.mark.asyncio
async def test_who_asks_again_for_what_it_holds_does_not_wait_for_itself():
    pool = make_pool()
    entry = pool._entries["a"]

    async def action():
        await pool.get_engine("a")
        entry.pending_unload_reason = "somebody else needs the room"
        again = asyncio.wait_for(pool.get_engine("a", _lease=True), 5)
        assert await again is entry.engine
        assert entry.in_use == 2
        entry.pending_unload_reason = None
        await pool.release_engine("a")

    await within_request(action)
    assert entry.in_use == 0


@pytest.mark.asyncio
async def test_a_job_that_outlives_its_request_keeps_its_model():
    pool = make_pool()
    entry = pool._entries["a"]
    may_end = asyncio.Event()
    jobs = []

    async def job():
        await pool.get_engine("a")
        await may_end.wait()

    async def action():
        jobs.append(asyncio.ensure_future(job()))
        await settle()

    await within_request(action)
    assert entry.in_use == 1
    may_end.set()
    await asyncio.gather(*jobs)
    await settle()
    assert entry.in_use == 0
