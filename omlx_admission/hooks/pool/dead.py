"""An engine whose loop has ended is removed, and its callers are told.

A step that fails, and then the clean-up after it, end the loop of a text engine: a GPU
fault does both. Stock does not look at it again. Its callers wait indefinitely, it is handed
out to more of them, and its memory is never given up, since they hold leases of it.

Here all of them get one error in the turn in which the loop ends, and the model is
unloaded; the next request for it loads it anew.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterable
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.core.pool.engines import lives
from omlx_admission.core.refusal import Refusal
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.pool.engines import ABORT
from omlx_admission.hooks.pool.state import in_background, pools, state_of
from omlx_admission.observation import observe

logger = logging.getLogger("omlx.admission")

CORE = "omlx.engine_core"

NEEDS = (
    Need(CORE, "EngineCore._engine_loop", Kind.ASYNC, ()),
    Need(CORE, "_engine_loop", Kind.USED),
    Need(CORE, "EngineCore._running", Kind.VALUE, types=("bool",)),
    Need(CORE, "EngineCore._task", Kind.VALUE),
    Need(CORE, "EngineCore._closed", Kind.VALUE),
    Need(CORE, "AsyncEngineCore.engine", Kind.VALUE),
    Need("omlx.engine.batched", "BatchedEngine._engine", Kind.VALUE),
    *ABORT,
)


async def engine_loop(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Notice the end of a loop that was not stopped.

    Its error ends all of its requests; stock's stop would raise it once more, and
    leave the engine's thread and weights where they are.
    """
    try:
        value, cause = await wrapped(*args, **kwargs), "its loop has ended"
    except (Exception, asyncio.CancelledError) as error:
        if _is_stopped(core):
            raise
        value, cause = None, repr(error)
    if not _is_stopped(core):
        try:
            _died(core, cause)
        except Exception as fault:  # noqa: BLE001 - the loop has ended whatever we do
            faults.note("the removal of a dead engine", fault)
    return value


def _is_stopped(core: Any) -> bool:
    task = asyncio.current_task()
    return not core._running or core._closed or (task is not None and task.cancelling() > 0)


def _died(core: Any, cause: str) -> None:
    for pool in list(pools):
        for model, entry in list(pool._entries.items()):
            if getattr(getattr(entry.engine, "_engine", None), "engine", None) is core:
                # It counts as dead once this task has ended.
                asyncio.get_running_loop().call_soon(bury, pool, model, cause)


def bury(pool: Any, model: str, cause: str = "it was stopped") -> None:
    """Remove the engine of ``model`` if it is dead: end its requests, then unload it."""
    state, entry = state_of(pool), pool._entries.get(model)
    engine = None if entry is None else entry.engine
    if engine is None or lives(engine) or model in state.unloading or model in state.dead:
        return
    state.dead[model] = time.monotonic()
    logger.error(
        "admission: the engine of '%s' has died (%s): its requests end, and it is unloaded",
        model,
        cause,
    )
    # A request may have found it; what follows does not end with that request.
    in_background(_remove(pool, model, engine), f"admission-dead:{model}")


async def _remove(pool: Any, model: str, engine: Any) -> None:
    try:
        await _end_requests(engine, model)
        entry = pool._entries.get(model)
        if entry is not None and entry.engine is engine:
            await pool._unload_engine(model)
    except Exception:
        logger.exception("admission: the removal of the dead engine of '%s' failed", model)
    finally:
        state = state_of(pool)
        state.dead.pop(model, None)
        state.changed()


async def _end_requests(engine: Any, model: str) -> None:
    """Requests get a whole error in the shape of their route, jobs one of the engine's."""
    reason = f"The engine of model '{model}' has failed; the next request loads it anew"
    refusal = Refusal(503, "engine_failed", f"{reason}. Try again.", 1)
    for request in tuple(requests.live):
        if holding.holds(request, model, engine):
            request.cut.end_with(refusal)
    abort = getattr(engine, "abort_all_requests", None)
    if not callable(abort):
        return
    arguments: dict[str, str] = {}
    try:
        if "reason" in inspect.signature(abort).parameters:
            arguments = {"reason": reason, "error_code": "engine_failed"}
    except (TypeError, ValueError) as error:
        # Not every callable has a signature; it is called all the same.
        faults.note("the look at an engine's abort", error)
    try:
        await abort(**arguments)
    except Exception:
        logger.warning("admission: ending the work of '%s' failed", model, exc_info=True)


def problems() -> Iterable[observe.Problem]:
    """Dead engines that are not gone yet, for status and page."""
    now = time.monotonic()
    for pool in list(pools):
        for model, since in list(state_of(pool).dead.items()):
            text = f"the engine of '{model}' has died and is being unloaded"
            yield observe.Problem("engine", model, now - since, None, text, logged=True)


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the loop of text and vision engines."""
    ledger.wrap(module, "EngineCore._engine_loop", engine_loop)
    observe.observer.register_check(problems)
