# SPDX-License-Identifier: Apache-2.0
"""Two models, memory for one: requests queue, the busy model drains, all are served."""

import asyncio
from types import SimpleNamespace

import pytest

from omlx.admission.config import Config
from omlx.admission.gate import AdmissionRefused, EngineQueue
from omlx.admission.pool.port import planned_victims
from omlx.engine_pool import EngineEntry, EnginePool
from omlx.exceptions import (
    InsufficientMemoryError,
    ModelNotFoundError,
    ModelTooLargeError,
)

CEILING = 10 * 1024**3
SIZE = 6 * 1024**3


class Engine:
    def has_active_requests(self):
        return False


class Machine:
    """A pool whose loads and unloads are steps of the test, in the order of ``log``."""

    def __init__(self, monkeypatch, tmp_path, **settings):
        monkeypatch.setattr("omlx.engine_pool.get_phys_footprint", lambda: 0)
        monkeypatch.setattr("omlx.engine_pool.mx.get_active_memory", lambda: 0)
        self.pool = pool = EnginePool()
        self.log = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.ceiling = CEILING
        pool._get_final_ceiling = lambda: self.ceiling
        pool._process_memory_enforcer = SimpleNamespace(
            _memory_guard_tier="balanced",
            get_ceiling_breakdown=lambda: {
                "static": CEILING,
                "dynamic": self.ceiling,
                "metal_cap": 0,
            },
            wake=lambda **_keywords: None,
            _propagate_memory_limit=lambda: None,
        )
        pool._admission = EngineQueue(pool, Config(linger_s=0, **settings))
        for model, size in (("a", SIZE), ("b", SIZE), ("x", 2 * CEILING)):
            folder = tmp_path / model
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            pool._entries[model] = EngineEntry(
                model_id=model,
                model_path=str(folder),
                model_type="llm",
                engine_type="batched",
                estimated_size=size,
            )
        load, unload = self._load, self._unload
        monkeypatch.setattr(EnginePool, "_load_engine", load)
        monkeypatch.setattr(EnginePool, "_stop_and_unload_engine", unload)

    @property
    def _load(self):
        machine = self

        async def load(pool, model_id, force_lm=False, runtime_settings=None):
            entry = pool._entries[model_id]
            entry.is_loading = True
            try:
                await machine.may_load.wait()
                machine.log.append(f"load {model_id}")
                entry.engine = Engine()
                pool._current_model_memory += entry.estimated_size
            finally:
                entry.is_loading = False

        return load

    @property
    def _unload(self):
        machine = self

        async def unload(pool, model_id):
            entry = pool._entries[model_id]
            assert entry.in_use == 0, "what runs is never cut off"
            machine.log.append(f"unload {model_id}")
            entry.engine = None
            entry.pending_unload_reason = None
            pool._current_model_memory -= entry.estimated_size

        return unload

    def ask(self, model):
        return asyncio.ensure_future(self.pool.get_engine(model, _lease=True))

    async def serve(self, model):
        await asyncio.wait_for(self.pool.get_engine(model, _lease=True), 5)

    async def done(self, model):
        await asyncio.wait_for(self.pool.release_engine(model), 5)


def wait_for_release(pool):
    """An unload that takes as long as a request runs: the waiters cannot wait for it."""

    async def unload(self, model_id):
        while pool._entries[model_id].in_use:
            await asyncio.sleep(0)

    return unload


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_the_busy_model_drains_then_they_swap(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, max_age_s=0)
    await machine.serve("a")
    for_b = machine.ask("b")
    await settle()
    assert not for_b.done()
    assert machine.log == ["load a"]
    newcomer = machine.ask("a")
    await settle()
    assert not newcomer.done(), "a draining model takes no new request"
    await machine.done("a")
    await asyncio.wait_for(for_b, 5)
    assert machine.log == ["load a", "unload a", "load b"]
    await machine.done("b")
    await asyncio.wait_for(newcomer, 5)
    assert machine.log[3:] == ["unload b", "load a"]
    await machine.done("a")
    assert all(entry.in_use == 0 for entry in machine.pool._entries.values())


@pytest.mark.asyncio
async def test_the_loaded_model_serves_until_somebody_is_old(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, max_age_s=1000)
    await machine.serve("a")
    for_b = machine.ask("b")
    await settle()
    await machine.serve("a")
    assert not for_b.done()
    await machine.done("a")
    await machine.done("a")
    await asyncio.wait_for(for_b, 5)


@pytest.mark.asyncio
async def test_one_load_serves_all_who_wait_for_it(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    machine.may_load.clear()
    asked = [machine.ask("b") for _ in range(5)]
    await settle()
    machine.may_load.set()
    await asyncio.wait_for(asyncio.gather(*asked), 5)
    assert machine.log == ["load b"]
    assert machine.pool._entries["b"].in_use == 5


@pytest.mark.asyncio
async def test_the_budget_ends_in_a_refusal_that_says_when(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, max_wait_s=0.05)
    await machine.serve("a")
    with pytest.raises(AdmissionRefused) as caught:
        await machine.serve("b")
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code) == (503, "model_swap_timeout")
    assert 1 <= refusal.retry_after <= 60
    assert machine.pool._entries["a"].in_use == 1
    assert machine.log == ["load a"]


@pytest.mark.asyncio
async def test_a_model_that_never_fits_costs_nobody_anything(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    await machine.serve("a")
    await machine.done("a")
    with pytest.raises(ModelTooLargeError):
        await machine.serve("x")
    assert machine.log == ["load a"]


@pytest.mark.asyncio
async def test_what_only_the_moving_ceiling_forbids_is_waited_for(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    await machine.serve("a")
    await machine.done("a")
    machine.ceiling = SIZE - 1
    for_b = machine.ask("b")
    await settle()
    assert not for_b.done()
    assert machine.log == ["load a"]
    machine.ceiling = CEILING
    await for_b
    await machine.done("b")
    assert machine.log == ["load a", "unload a", "load b"]


@pytest.mark.asyncio
async def test_who_leaves_leaves_nothing(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, max_age_s=0)
    await machine.serve("a")
    for_b = machine.ask("b")
    await settle()
    for_b.cancel()
    await settle()
    await machine.serve("a")
    assert machine.log == ["load a"]


@pytest.mark.asyncio
async def test_an_unknown_model_is_said_at_once(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFoundError):
        await machine.serve("nobody")


@pytest.mark.asyncio
async def test_shutdown_refuses_who_waits(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    await machine.serve("a")
    for_b = machine.ask("b")
    await settle()
    monkeypatch.setattr(EnginePool, "_unload_engine", wait_for_release(machine.pool))
    shutdown = asyncio.ensure_future(machine.pool.shutdown())
    with pytest.raises(AdmissionRefused) as caught:
        await asyncio.wait_for(for_b, 5)
    assert caught.value.refusal.code == "shutting_down"
    await machine.done("a")
    await asyncio.wait_for(shutdown, 5)


@pytest.mark.asyncio
async def test_switched_off_the_pool_decides_alone(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, queue=False)
    await machine.serve("a")
    with pytest.raises(InsufficientMemoryError):
        await machine.serve("b")
    await machine.done("a")
    await machine.serve("b")
    assert machine.log == ["load a", "unload a", "load b"]


def broken(*_, **__):
    raise ZeroDivisionError


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("where", "name"),
    [("policy", "retry_in"), ("policy", "enqueue"), ("port", "target")],
)
async def test_a_fault_of_the_queue_leaves_it_to_the_pool(monkeypatch, tmp_path, where, name):
    machine = Machine(monkeypatch, tmp_path, max_wait_s=0.05)
    admission = machine.pool._admission
    await machine.serve("a")
    monkeypatch.setattr(getattr(admission, where), name, broken)
    with pytest.raises(InsufficientMemoryError):
        await machine.serve("b")
    assert machine.pool._entries["a"].in_use == 1
    await machine.done("a")
    await machine.serve("b")


@pytest.mark.asyncio
async def test_a_model_whose_gate_is_closed_is_not_handed_out(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    await machine.serve("a")
    assert machine.pool._acquire_loaded_engine("a", False, False, None) is not None
    machine.pool._admission.gated = frozenset({"a"})
    assert machine.pool._acquire_loaded_engine("a", False, False, None) is None


@pytest.mark.asyncio
async def test_the_planned_victim_goes_first(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    pool = machine.pool
    for used, model in enumerate(("a", "b")):
        pool._entries[model].engine = Engine()
        pool._entries[model].last_access = used
    assert pool._find_lru_victim() == "a"
    planned_victims.set(("b",))
    assert pool._find_lru_victim() == "b"
    pool._entries["b"].in_use = 1
    assert pool._find_lru_victim() == "a", "a plan does not outlive what it was made on"


@pytest.mark.asyncio
async def test_who_wants_no_lease_leaves_none(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    await asyncio.wait_for(machine.pool.get_engine("a"), 5)
    assert machine.pool._entries["a"].in_use == 0
