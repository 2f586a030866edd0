# SPDX-License-Identifier: Apache-2.0
"""Loaded engines are handed out and given back while the pool lock is held."""

import asyncio

import pytest

from omlx.engine_pool import EngineEntry, EnginePool
from omlx.process_memory_enforcer import ProcessMemoryEnforcer


class FakeEngine:
    """An engine whose teardown waits for a signal."""

    def __init__(self):
        self.may_stop = asyncio.Event()
        self.stopping = asyncio.Event()
        self.stopped = 0

    async def stop(self):
        self.stopping.set()
        await self.may_stop.wait()
        self.stopped += 1

    def has_active_requests(self):
        return False


def make_pool(*models):
    pool = EnginePool()
    for model in models:
        pool._entries[model] = EngineEntry(
            model_id=model,
            model_path=f"/models/{model}",
            model_type="llm",
            engine_type="batched",
            estimated_size=1000,
            engine=FakeEngine(),
        )
    return pool


async def in_time(awaitable):
    return await asyncio.wait_for(awaitable, timeout=5)


@pytest.mark.asyncio
async def test_a_loaded_model_does_not_wait_for_the_lock():
    pool = make_pool("a")
    async with pool._lock:
        engine = await in_time(pool.get_engine("a", _lease=True))
        assert engine is pool._entries["a"].engine
        assert pool._entries["a"].in_use == 1
        await in_time(pool.release_engine("a"))
    assert pool._entries["a"].in_use == 0


@pytest.mark.asyncio
async def test_what_is_not_loaded_still_does(tmp_path, monkeypatch):
    pool = make_pool("b")
    (tmp_path / "config.json").write_text("{}")
    entry = pool._entries["b"]
    entry.engine, entry.model_path = None, str(tmp_path)

    async def load(model_id, **_):
        entry.engine = FakeEngine()

    monkeypatch.setattr(pool, "_load_engine", load)
    async with pool._lock:
        call = asyncio.ensure_future(pool.get_engine("b"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not call.done()
    assert await in_time(call) is entry.engine


@pytest.mark.asyncio
async def test_a_model_that_is_being_unloaded_is_not_handed_out():
    pool = make_pool("a")
    engine = pool._entries["a"].engine
    unload = asyncio.ensure_future(pool._unload_engine("a"))
    await in_time(engine.stopping.wait())
    call = asyncio.ensure_future(pool.get_engine("a"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not call.done()
    call.cancel()
    engine.may_stop.set()
    await asyncio.wait_for(unload, timeout=60)
    assert pool._entries["a"].engine is None
    assert not pool._unloading_models


@pytest.mark.asyncio
async def test_a_second_unload_joins_the_first():
    pool = make_pool("a")
    engine = pool._entries["a"].engine
    first = asyncio.ensure_future(pool._unload_engine("a"))
    second = asyncio.ensure_future(pool._unload_engine("a"))
    await in_time(engine.stopping.wait())
    engine.may_stop.set()
    await asyncio.wait_for(asyncio.gather(first, second), timeout=60)
    assert engine.stopped == 1


@pytest.mark.asyncio
async def test_a_pending_unload_sees_the_release_under_the_lock():
    pool = make_pool("a")
    engine = pool._entries["a"].engine
    engine.may_stop.set()
    await in_time(pool.get_engine("a", _lease=True))
    pool._entries["a"].pending_unload_reason = "memory"
    async with pool._lock:
        release = asyncio.ensure_future(pool.release_engine("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not release.done()
    await asyncio.wait_for(release, timeout=60)
    assert engine.stopped == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("taken", "leaves"), [(True, "b"), (False, "a")])
async def test_a_victim_that_is_handed_out_meanwhile_is_none(monkeypatch, taken, leaves):
    """To stop a victim's requests first may be a suspension."""
    pool = make_pool("a", "b")
    unloaded = []

    async def abort_all_requests():
        await asyncio.sleep(0)
        if taken:
            await in_time(pool.get_engine("a", _lease=True))
        return 0

    async def unload(model_id):
        unloaded.append(model_id)
        pool._entries[model_id].engine = None

    pool._entries["a"].engine.abort_all_requests = abort_all_requests
    pool._entries["b"].last_access = pool._entries["a"].last_access + 1
    monkeypatch.setattr(pool, "_unload_engine", unload)
    enforcer = ProcessMemoryEnforcer(pool, soft_threshold=0.5)
    for name in ("_propagate_memory_limit", "_walk_store_cache_caps"):
        monkeypatch.setattr(enforcer, name, lambda: None)
    monkeypatch.setattr(enforcer, "_get_hard_limit_bytes", lambda: 100)
    monkeypatch.setattr(enforcer, "_current_usage_bytes", lambda: 0 if unloaded else 80)
    await in_time(enforcer._check_and_enforce())
    assert unloaded == [leaves]
    assert pool._entries["a"].in_use == int(taken)
