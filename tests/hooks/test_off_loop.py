"""Teardown off the event loop: the loop goes on, nobody gets in between, all else as stock.

On the stand-in, and with ``--omlx-src`` on a real oMLX: engines, cores and their teardown
are theirs, only the scheduler is ours, and it stops in its shutdown when a test says so.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks.pool import off_loop

from .conftest import settle, until
from .gpu_rig import Gate, Model, cores

ON = {"off_loop_close": True, "resident_path": True}


class Bench:
    """Loaded engines whose schedulers are fakes."""

    def __init__(self) -> None:
        self.closed_on: list[str] = []
        self.loop_ended_on: list[str] = []

    def engine(self, kind: Any = None, name: str = "a", flush: Gate | None = None) -> Any:
        """An engine with a core; its scheduler's shutdown stops at ``flush``."""
        from omlx.engine.batched import BatchedEngine
        from omlx.engine_core import AsyncEngineCore, EngineConfig

        config = EngineConfig(model_name=f"/models/{name}")
        config.decode_burst_budget_s = config.decode_burst_budget_single_s = 0.0
        engine = (kind or BatchedEngine)(model_name=f"/models/{name}")
        engine._engine = AsyncEngineCore(Model(), Model(), config)
        engine._loaded = True
        core = engine._engine.engine
        stock = core.close

        def close() -> None:
            self.closed_on.append(threading.current_thread().name)
            stock()

        ends = core.stop

        async def stop() -> None:
            self.loop_ended_on.append(threading.current_thread().name)
            await ends()

        core.close, core.stop = close, stop
        if flush is not None:
            core.scheduler.shutdown = flush
        return engine

    async def stopping(self, kind: Any = None, name: str = "a") -> tuple[Any, Any, Gate, Any]:
        """An engine that is being stopped, its handle, the gate where it stands, the stop."""
        flush = Gate()
        engine = self.engine(kind, name, flush)
        handle = engine._engine
        stop = task(engine.stop())
        await flush.until_reached()
        return engine, handle, flush, stop


@pytest.fixture(params=["batched:BatchedEngine", "vlm:VLMBatchedEngine"])
def kind(request: pytest.FixtureRequest) -> Any:
    module, _, name = request.param.partition(":")
    return getattr(importlib.import_module(f"omlx.engine.{module}"), name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bench]:
    with cores(monkeypatch, **getattr(request, "param", ON)):
        yield Bench()


def task(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


def ours(kind: type) -> set[str]:
    """Methods of ``kind`` that are wrapped by us now."""
    wrappers = (off_loop.start, off_loop.stop)
    return {n for n, v in vars(kind).items() if getattr(v, "_self_wrapper", None) in wrappers}


async def test_the_loop_goes_on_while_a_core_is_closed(bench: Bench, kind: Any) -> None:
    engine, handle, flush, stopping = await bench.stopping(kind)
    core = handle.engine
    await settle()
    assert not stopping.done()
    flush.open()
    await stopping
    assert (engine._engine, engine._loaded, core._closed) == (None, False, True)
    # The core's loop is a task: it ends where it runs, and before anything else.
    assert bench.loop_ended_on[0] == "MainThread"
    assert [name.partition("_")[0] for name in bench.closed_on] == ["admission-close"]
    assert vars(engine).get(off_loop._ATTRIBUTE) is None


async def test_a_cancel_waits_for_the_end_of_the_teardown(bench: Bench, kind: Any) -> None:
    engine, handle, flush, stopping = await bench.stopping(kind)
    core = handle.engine
    for _ in range(2):
        stopping.cancel()
        await settle()
        assert not stopping.done()
    flush.open()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert (engine._engine, core._closed, core.scheduler) == (None, True, None)
    await engine.stop()  # a closed engine stops as it does in stock


async def test_a_second_stop_waits_for_the_first(bench: Bench, kind: Any) -> None:
    engine, _, flush, first = await bench.stopping(kind)
    second = task(engine.stop())
    await settle()
    assert not second.done()
    flush.open()
    await asyncio.gather(first, second)
    assert len(bench.closed_on) == 1


async def test_a_start_waits_for_the_stop(bench: Bench, kind: Any) -> None:
    """Whoever still holds the engine finds it stopped and starts it: after, not amid."""
    engine, handle, flush, stopping = await bench.stopping(kind)
    core = handle.engine
    assert engine._loaded is False
    started: list[bool] = []

    async def stock() -> None:
        started.append(core._closed and engine._engine is None)

    starting = task(off_loop.start(stock, engine, (), {}))
    assert ours(kind) == {"start", "stop"}
    await settle()
    assert not started
    flush.open()
    await asyncio.gather(starting, stopping)
    assert started == [True]


async def test_f1_a_start_that_is_cancelled_leaves_no_loop_behind(
    bench: Bench, kind: Any
) -> None:
    """The loop holds the model, and an engine that nobody knows is never stopped."""
    engine = bench.engine(kind)
    core = engine._engine.engine
    engine._loaded = False
    waits = asyncio.Event()

    async def stock() -> None:
        await core.start()
        waits.set()
        await asyncio.sleep(3600)  # a draft model, for one

    starting = task(off_loop.start(stock, engine, (), {}))
    await waits.wait()
    loop = core._task
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert loop.done() and core._closed and engine._engine is None


async def test_nothing_is_queued_at_a_core_that_closes(bench: Bench) -> None:
    _, handle, flush, stopping = await bench.stopping(None, "late")
    with pytest.raises(off_loop.EngineClosing, match="'late' was unloaded"):
        await handle.add_request(prompt=[1, 2])
    flush.open()
    await stopping


async def test_an_error_of_the_cores_stop_is_raised_and_stock_is_not_run_again(
    bench: Bench,
) -> None:
    engine = bench.engine()

    async def broken() -> None:
        raise ValueError("of the loop")

    engine._engine.stop = broken
    with pytest.raises(ValueError, match="of the loop"):
        await engine.stop()
    assert not bench.closed_on
    # As in stock: it still has its core, and another stop tries again.
    del engine._engine.stop
    assert engine._loaded
    await engine.stop()
    assert len(bench.closed_on) == 1


async def test_an_error_on_the_thread_is_raised_as_it_is(bench: Bench) -> None:
    engine = bench.engine()

    async def stock() -> None:
        raise KeyError(threading.current_thread().name)

    with pytest.raises(KeyError, match="admission-close"):
        await off_loop.stop(stock, engine, (), {})
    assert vars(engine).get(off_loop._ATTRIBUTE) is None
    await engine.stop()


async def test_no_thread_to_be_had_means_stock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    engine = bench.engine()
    noted: list[str] = []
    monkeypatch.setattr(off_loop.faults, "note", lambda place, _e: noted.append(place))
    monkeypatch.setattr(off_loop.concurrent.futures, "ThreadPoolExecutor", none)
    core = engine._engine.engine
    await engine.stop()
    assert noted and core._closed
    assert bench.closed_on == ["MainThread"]


async def test_a_stop_that_gives_the_loop_back_goes_on_there(bench: Bench) -> None:
    """No release that the gate lets in does; were it so, nothing is run twice or lost."""
    seen: list[str] = []
    go_on = asyncio.Event()

    async def stock() -> None:
        seen.append(threading.current_thread().name)
        await asyncio.sleep(0)
        seen.append(threading.current_thread().name)
        await go_on.wait()
        seen.append("ended")

    engine = bench.engine()
    stopping = task(off_loop.stop(stock, engine, (), {}))
    await until(lambda: len(seen) == 2)
    await settle()
    stopping.cancel()
    await settle()
    assert not stopping.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert seen == ["admission-close_0", "MainThread", "ended"]
    await engine.stop()


@pytest.mark.parametrize("bench", [{**ON, "serialize_engine_gpu": True}], indirect=True)
async def test_whoever_waits_for_the_turn_on_the_engines_thread_leaves_first(
    bench: Bench,
) -> None:
    """Else the close would wait for a turn, and end the process after 60 s."""
    from omlx.request import SamplingParams

    turn = gpu_turn.current
    assert turn is not None
    engine = bench.engine()
    core = engine._engine.engine
    await core.start()
    hold = turn.acquire("other", "test")
    try:
        asking = task(core.generate([1, 2], SamplingParams(max_tokens=3)))
        await until(lambda: bool(turn.snapshot().waiting))
        await engine.stop()
        assert core._closed
    finally:
        hold.release()
    asking.cancel()
    await asyncio.wait({asking})


@pytest.mark.parametrize("bench", [{"resident_path": False}], indirect=True)
async def test_without_the_resident_path_stock_closes_on_the_loop(bench: Bench) -> None:
    engine = bench.engine()
    await engine.stop()
    assert bench.closed_on == ["MainThread"]
