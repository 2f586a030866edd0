"""P2: an engine whose loop has ended tells its callers, goes, and is loaded anew.

Cores and engines are those of this oMLX, or of the stand-in; only the scheduler is ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.core.pool import engines
from omlx_admission.hooks.pool import dead, off_loop, resident
from omlx_admission.hooks.pool.state import state_of
from omlx_admission.observation import observe

from .conftest import SIZES, House, settle, until
from .gpu_rig import Model, cores


def fault() -> None:
    raise RuntimeError("the GPU has gone")


class Works(House):
    """A pool with real engines: their steps and clean-ups do what ``script`` says."""

    def __init__(self, pool: Any, module: Any) -> None:
        super().__init__(pool, module)
        self.made: dict[str, list[Any]] = {}
        self.batched = module.BatchedEngine

    def engine(self, *args: Any, **keywords: Any) -> Any:
        from omlx.engine_core import AsyncEngineCore, EngineConfig

        path = str(keywords.get("model_name") or args[0])
        name = os.path.basename(path)
        engine = self.batched(model_name=path)

        async def start() -> None:
            await self._start(name)
            config = EngineConfig(model_name=path)
            config.decode_burst_budget_s = config.decode_burst_budget_single_s = 0.0
            model = Model()
            model.encode = lambda text: [1]  # type: ignore[attr-defined]
            engine._engine = AsyncEngineCore(model, model, config)
            engine._tokenizer = engine._model = model
            await engine._engine.engine.start()
            engine._loaded = True

        engine.start = start
        self.made.setdefault(name, []).append(engine)
        return engine

    def core(self, model: str) -> Any:
        return self.made[model][-1]._engine.engine

    def asking(self, model: str, tokens: int = 10**9) -> asyncio.Task[Any]:
        """One answer of a loaded model, with its lease, as a route has it."""
        from omlx.request import SamplingParams

        async def answer() -> Any:
            engine = await self.get(model)
            try:
                params = SamplingParams(max_tokens=tokens)
                return await engine._engine.generate([1, 2], params)
            finally:
                await self.release(model)

        return asyncio.get_running_loop().create_task(answer())

    async def runs(self, model: str, requests: int = 1) -> None:
        await until(lambda: model in self.made and len(self.core(model).scheduler.running) >= 1)
        await until(lambda: len(self.core(model).scheduler.running) == requests)


@pytest.fixture
def works(models: Path, mocker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Works]:
    import omlx.engine_pool as module

    with cores(monkeypatch, resident_path=True, queue=True, max_wait_s=20.0):
        pool = module.EnginePool()
        works = Works(pool, module)
        mocker.patch.object(module, "BatchedEngine", works.engine)
        mocker.patch.object(module.mx, "get_active_memory", lambda: 0)
        mocker.patch.object(module, "get_phys_footprint", lambda: 0)
        pool._get_final_ceiling = lambda: works.ceiling
        pool.discover_models([str(models)], [])
        for name, size in SIZES.items():
            pool._entries[name].estimated_size = size
        yield works


async def ends_with_an_error(*asking: asyncio.Task[Any]) -> None:
    for answer in asking:
        with pytest.raises(
            Exception, match=r"engine of model 'a' has failed|memory (limit|pressure)"
        ):
            await answer


def break_down(core: Any) -> None:
    """The next step raises, and so does the clean-up after it."""
    core.scheduler.script.extend([fault, fault])


async def test_p2_a_dead_loop_tells_its_callers_and_the_model_comes_back(
    works: Works, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [works.asking("a") for _ in range(3)]
    await works.runs("a", 3)
    dying, core = works.made["a"][0], works.core("a")
    break_down(core)
    await ends_with_an_error(*answers)
    # Nobody waits for anything, and it goes all the same.
    await until(lambda: works.resident() == set() and not state_of(works.pool).dead)
    assert core._closed and works.pool._current_model_memory == 0
    assert caplog.text.count("the engine of 'a' has died") == 1
    works.assert_idle()
    assert (await works.asking("a", tokens=3)).completion_tokens == 3
    assert works.made["a"][-1] is not dying
    await works.pool._unload_engine("a")


async def test_p2_another_model_is_served_after_it(works: Works) -> None:
    answer = works.asking("a")
    await works.runs("a")
    waiting = works.asking("b", tokens=3)
    await settle()
    assert not waiting.done()
    break_down(works.core("a"))
    await ends_with_an_error(answer)
    assert (await waiting).completion_tokens == 3
    assert works.resident() == {"b"}
    await works.pool._unload_engine("b")
    works.assert_idle()


async def test_p2_nobody_is_handed_a_dead_engine(
    works: Works, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the moment before its removal either."""
    bury = dead.bury
    monkeypatch.setattr(dead, "bury", lambda *_: None)
    answer = works.asking("a")
    await works.runs("a")
    engine, core = works.made["a"][0], works.core("a")
    entry, state = works.entry("a"), state_of(works.pool)
    await works.get("a")  # so that the hot path knows it
    assert resident.verified_engine(works.pool, state, "a") is engine
    break_down(core)
    await until(lambda: core._task.done())
    assert not engines.lives(engine)
    assert resident.verified_engine(works.pool, state, "a") is None
    assert resident.checked_engine(works.pool, state, "a", False, None) is None
    port = works.admission.port
    assert not port.still_serving("a", engine)
    assert not port.in_use("a") and entry.in_use == 2
    target = port.target("a", False, None)
    assert target not in port.view((target,), 0).ready
    monkeypatch.setattr(dead, "bury", bury)
    # Whoever asks finds it dead, and gets a new one.
    later = await works.get("a")
    assert later is not engine and engines.lives(later)
    await ends_with_an_error(answer)
    for _ in range(works.entry("a").in_use):
        await works.release("a")
    await works.pool._unload_engine("a")


async def test_p2_it_is_a_problem_until_it_is_gone(works: Works) -> None:
    answer = works.asking("a")
    await works.runs("a")
    flushed = asyncio.Event()
    stop = works.made["a"][0].stop

    async def held() -> None:
        await flushed.wait()
        await stop()

    works.made["a"][0].stop = held
    break_down(works.core("a"))
    await ends_with_an_error(answer)
    found = [p for p in observe.observer.problems() if p.kind == "engine"]
    assert [p.model for p in found] == ["a"]
    flushed.set()
    await until(lambda: works.resident() == set())
    await until(lambda: not state_of(works.pool).dead)
    assert not [p for p in observe.observer.problems() if p.kind == "engine"]


async def test_p2_a_loop_that_was_stopped_has_not_died(
    works: Works, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await works.asking("a", tokens=3)).completion_tokens == 3
    await works.pool._unload_engine("a")
    assert "has died" not in caplog.text


async def test_p2_a_step_that_fails_alone_costs_no_engine(works: Works) -> None:
    answer = works.asking("a")
    await works.runs("a")
    engine = works.made["a"][0]
    works.core("a").scheduler.script.append(fault)
    with pytest.raises(RuntimeError, match="the GPU has gone"):
        await answer
    assert await works.get("a") is engine
    await works.release("a")
    await works.pool._unload_engine("a")


@pytest.mark.parametrize("closed", [False, True])
async def test_f1_an_engine_that_somebody_has_stopped_is_never_handed_out(
    works: Works, closed: bool
) -> None:
    await works.get("a")
    engine, core = works.made["a"][0], works.core("a")
    if closed:
        await core.stop()
        core.close()
    else:
        await engine.stop()
    handed = await asyncio.gather(*(works.ask("a") for _ in range(4)))
    assert len(works.made["a"]) == 2
    assert set(handed) == {works.made["a"][1]}
    await works.release("a", 5)
    assert works.pool._current_model_memory == works.tracked() == 600
    await works.pool._unload_engine("a")
    works.assert_idle()


async def test_f1_an_engine_that_the_pool_has_unloaded_does_not_load_itself_again(
    works: Works,
) -> None:
    """Whoever still holds it would load its weights once more, in nobody's books."""
    engine = await works.get("a")
    del engine.start  # the class's own
    await works.pool._unload_engine("a")
    with pytest.raises(off_loop.EngineClosing, match="was unloaded"):
        await engine.start()
    assert engine._engine is None
