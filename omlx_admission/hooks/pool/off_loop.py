"""Teardown of an engine core off the event loop, which it blocks in stock.

Stock's ``stop`` of a text or vision engine ends the core's loop, which it has to do on
the event loop, and then does only what waits for the engine's own thread: ``close``, up
to 60 s for each of four steps. Here the first part is done where it is; the rest, which
by then has nothing to await, is stock's own ``stop`` run to its end on a thread.

While stock blocks the loop, no other code runs; here it does, and is kept out: no caller
is handed the engine (the mark of `hooks.pool.resident`), it does not start itself again
before it has stopped, and nothing is added to its queue.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import types
from collections.abc import Coroutine, Generator
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core.pool.engines import runs
from omlx_admission.core.uninterrupted import to_its_end
from omlx_admission.gpu_turn import sites as gpu_sites
from omlx_admission.hooks.gpu import engine as gpu_engine
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.hooks.pool import engines, resident

BATCHED = "omlx.engine.batched"
VLM = gpu_engine.VLM
CORE = gpu_engine.CORE

NEEDS = (
    gpu_engine.STOP,
    gpu_engine.CLOSE,
    # They are told by an attribute of ours that they are being stopped.
    Need(CORE, "EngineCore", Kind.CLASS),
    Need(CORE, "EngineCore._closed", Kind.VALUE),
    Need(CORE, "EngineCore.add_request", Kind.ASYNC),
    Need(CORE, "AsyncEngineCore.engine", Kind.VALUE),
    Need(CORE, "AsyncEngineCore.stop", Kind.ASYNC, ()),
    *(
        need
        for module, name in ((BATCHED, "BatchedEngine"), (VLM, "VLMBatchedEngine"))
        for need in (
            Need(module, f"{name}.start", Kind.ASYNC, ()),
            # All that it awaits is the core's stop, which finds nothing to do the
            # second time: what is left never gives the loop back, nor asks for it.
            Need(module, f"{name}.stop", Kind.ASYNC, (), exact=True, run=True),
            Need(module, name, Kind.CLASS),
            Need(module, f"{name}._engine", Kind.VALUE),
            Need(module, f"{name}._loaded", Kind.VALUE),
        )
    ),
    # Without the mark of the resident path the engine would be handed out meanwhile.
    *resident.NEEDS,
)

#: Where upstream has moved the teardown itself.
NATIVE = (Need(CORE, "EngineCore.close", Kind.ASYNC),)

_ATTRIBUTE = "_omlx_admission_stopping"


class EngineClosing(RuntimeError):
    """The model was unloaded before this request had got as far as its engine."""


async def stop(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Stop ``engine``; a second caller waits for the first one's end."""
    while (earlier := vars(engine).get(_ATTRIBUTE)) is not None:
        await asyncio.wait({earlier})
    handle = vars(engine).get("_engine")
    core = getattr(handle, "engine", None)
    if handle is None or getattr(core, "_closed", None) is not False:
        return await wrapped(*args, **kwargs)
    done = asyncio.get_running_loop().create_future()
    setattr(engine, _ATTRIBUTE, done)
    return await to_its_end(
        _stop(wrapped, engine, core, args, kwargs),
        f"admission-stop:{gpu_sites.name_of(core)}",
    )


async def _stop(wrapped: Any, engine: Any, core: Any, args: Any, kwargs: Any) -> Any:
    try:
        await engine._engine.stop()
        return await _close(wrapped, engine, core, args, kwargs)
    finally:
        vars(engine).pop(_ATTRIBUTE).set_result(None)


async def _close(wrapped: Any, engine: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Run stock's ``stop`` on a thread of its own and wait for its end."""
    try:
        # A pool of its own: the loop's own threads may all be taken by long work.
        thread = concurrent.futures.ThreadPoolExecutor(1, "admission-close")
        setattr(core, _ATTRIBUTE, True)
        # A caller that holds the engine and finds it stopped asks for its start, and waits.
        engine._loaded = False
        context = contextvars.copy_context()
        begun = asyncio.get_running_loop().run_in_executor(
            thread, context.run, _begin, wrapped, args, kwargs
        )
        thread.shutdown(wait=False)
    except Exception as error:  # noqa: BLE001 - no thread to be had, for one
        faults.note("closing an engine off the loop", error)
        return await wrapped(*args, **kwargs)
    coroutine, ended, value = await begun
    return value if ended else await _rest(coroutine, value)


def _begin(wrapped: Any, args: Any, kwargs: Any) -> tuple[Coroutine[Any, Any, Any], bool, Any]:
    """Run the coroutine to its end or to what it waits for: (it, whether ended, value)."""
    coroutine = wrapped(*args, **kwargs)
    try:
        return coroutine, False, coroutine.send(None)
    except StopIteration as end:
        return coroutine, True, end.value


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, Any], first: Any) -> Generator[Any, Any, Any]:
    """Go on with a begun coroutine on the loop, should it ever have something to await."""
    waits_for = first
    while True:
        try:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(sent)
        except StopIteration as end:
            return end.value


async def start(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """An engine that is being stopped starts again after that, unless the pool let it go.

    Stock lets a caller that still holds it load its weights once more, counted nowhere.

    A start that fails, or is cancelled, after it has made the core leaves no loop behind:
    it would keep the model in memory, and nothing could stop it.

    Raises:
        EngineClosing: the pool has unloaded the model.
    """
    while (stopping := vars(engine).get(_ATTRIBUTE)) is not None:
        await asyncio.wait({stopping})
    if engines.has_gone(engine):
        raise EngineClosing("the model was unloaded meanwhile")
    try:
        return await wrapped(*args, **kwargs)
    except BaseException:
        if vars(engine).get("_engine") is not None and not engine._loaded:
            await engine.stop()
        raise


async def add_request(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Nothing is queued at a core that ends or has ended: it would never run.

    Raises:
        EngineClosing: it does. In stock the caller finds no core at all, or waits for ever.
    """
    if vars(core).get(_ATTRIBUTE) or not runs(core):
        raise EngineClosing(f"model '{gpu_sites.name_of(core)}' was unloaded meanwhile")
    return await wrapped(*args, **kwargs)


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the queue's entrance."""
    ledger.wrap(module, "EngineCore.add_request", add_request)


def apply_batched(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap text engines."""
    ledger.wrap(module, "BatchedEngine.start", start)
    ledger.wrap(module, "BatchedEngine.stop", stop)


def apply_vlm(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap vision engines."""
    ledger.wrap(module, "VLMBatchedEngine.start", start)
    ledger.wrap(module, "VLMBatchedEngine.stop", stop)


PARTS = (
    Part(CORE, apply_core),
    Part(BATCHED, apply_batched),
    Part(VLM, apply_vlm, optional=True),
)
