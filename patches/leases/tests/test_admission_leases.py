# SPDX-License-Identifier: Apache-2.0
"""A model that was handed out within a request stays until the request ends."""

import asyncio

import pytest

from omlx.admission import request as requests
from omlx.engine_pool import EngineEntry, EnginePool


class Engine:
    def has_active_requests(self):
        return False

    async def stop(self):
        pass


def make_pool(path="/models/a"):
    pool = EnginePool()
    pool._entries["a"] = EngineEntry(
        model_id="a",
        model_path=str(path),
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


# --- to its holder a model is not busy ---------------------------------------------


@pytest.fixture
def teardowns(monkeypatch):
    """How many leases there were at each teardown, which is none of this test's."""
    leases = []
    body = "_stop_and_unload_engine"  # where the resident path has split it off
    if not hasattr(EnginePool, body):
        body = "_unload_engine"

    async def unload(pool, model_id):
        entry = pool._entries[model_id]
        leases.append(entry.in_use)
        entry.engine = None

    monkeypatch.setattr(EnginePool, body, unload)
    return leases


async def _reload(pool):
    await pool.prepare_cluster_reload("a")


async def _unload_if_idle(pool):
    assert await pool.unload_if_idle_unpinned("a") is True


async def _request_unload(pool):
    assert await pool.request_unload("a", reason="by hand") is True


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "unload"),
    [
        ("prepare_cluster_reload", _reload),
        ("unload_if_idle_unpinned", _unload_if_idle),
        ("request_unload", _request_unload),
    ],
)
async def test_an_unload_by_its_holder_finds_no_lease(teardowns, name, unload):
    if not hasattr(EnginePool, name):
        pytest.skip("not in this release")
    pool = make_pool()

    async def action():
        await pool.get_engine("a")
        assert pool._entries["a"].in_use == 1
        await unload(pool)
        assert teardowns == [0]

    await within_request(action)
    assert pool._entries["a"].in_use == 0


@pytest.mark.asyncio
async def test_an_immediate_unload_by_its_holder_gives_the_lease_back():
    pool = make_pool()
    entry = pool._entries["a"]

    async def action():
        await pool.get_engine("a")
        unload = asyncio.ensure_future(pool._unload_engine("a"))
        await asyncio.sleep(0)
        assert entry.in_use == 0
        await asyncio.wait_for(unload, timeout=60)

    await within_request(action)
    assert entry.engine is None
    assert entry.in_use == 0


@pytest.mark.asyncio
async def test_another_variant_for_its_holder_is_loaded(teardowns, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    pool = make_pool(tmp_path)
    entry = pool._entries["a"]

    class Vision(Engine):
        pass

    async def load(self, model_id, *_, **__):
        entry.engine = Engine()

    monkeypatch.setattr("omlx.engine_pool.VLMBatchedEngine", Vision)
    monkeypatch.setattr(EnginePool, "_load_engine", load)
    monkeypatch.setattr(EnginePool, "_validate_llm_engine_ready", lambda *_: None)
    if hasattr(pool, "_admission"):
        pool._admission.enabled = False
    entry.engine = Vision()

    async def action():
        await pool.get_engine("a")
        engine = await asyncio.wait_for(pool.get_engine("a", force_lm=True), 5)
        assert type(engine) is Engine
        assert teardowns == [0]
        assert entry.in_use == 1

    await within_request(action)
    assert entry.in_use == 0


@pytest.mark.asyncio
async def test_a_pending_unload_sees_the_end_of_the_request(teardowns):
    pool = make_pool()
    entry = pool._entries["a"]

    async def action():
        await pool.get_engine("a")
        entry.pending_unload_reason = "somebody else needs the room"

    await within_request(action)
    assert teardowns == [0]
