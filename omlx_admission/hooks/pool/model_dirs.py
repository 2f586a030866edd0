"""A change of the model folders: nothing is cut, and no engine is left behind.

Stock unloads one model after another and then drops all entries: an engine that was
loaded in between, or that an unload has spared, would hold its memory for good, and a
load in progress would be forgotten with its bytes (B19, P3, P4). Here changes take
turns, each has the pool's lock, behind which stock loads, and what lives all the same
keeps its entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.quiesce import Quiesce
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.pool import unloads, unlocked
from omlx_admission.hooks.pool.state import PoolState, state_of, unloading_models

logger = logging.getLogger("omlx.admission")

#: Seconds that a change whose budget is spent still waits for the pool's lock and for
#: teardowns.
_LOCK_S = 1.0


async def change_model_dirs(wrapped: Any, _module: Any, args: Any, kwargs: Any) -> Any:
    """Unload everything, and load nothing until stock has forgotten its old entries."""
    pool: Any = None
    state: PoolState | None = None
    try:
        pool = _admin_pool()
        admission = None if pool is None else state_of(pool).admission
        if admission is not None and not admission.broken:
            state = state_of(pool)
    except Exception as error:  # noqa: BLE001 - stock does it in its own way
        faults.note("the change of model folders", error)
    if state is None:
        return await wrapped(*args, **kwargs)
    while (earlier := state.reloading) is not None:
        await earlier.wait()
    over = state.reloading = asyncio.Event()
    token = unloads.must_happen_now.set(True)
    try:
        async with _cleared(pool, state):
            before = dict(pool._entries)
            try:
                return await wrapped(*args, **kwargs)
            finally:
                # In the step in which stock dropped them.
                _keep_what_lives(pool, before)
    finally:
        unloads.must_happen_now.reset(token)
        state.reloading = None
        over.set()
        state.changed()


@contextlib.asynccontextmanager
async def _cleared(pool: Any, state: PoolState) -> AsyncIterator[None]:
    """Nothing is in use or on its way, as far as the budget allows; the lock is ours."""
    locked = False
    try:
        try:
            assert state.admission is not None
            loop = asyncio.get_running_loop()
            deadline = loop.time() + state.admission.budget(requests.current.get())
            await _clear(pool, deadline)
            deadline = max(deadline, loop.time() + _LOCK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    locked = await pool._lock.acquire()
            # Stock sets the count to nothing, and joins only teardowns of what it finds
            # loaded.
            await Quiesce(None).wait(lambda: not unloading_models(pool), deadline, None)
        except Exception as error:  # noqa: BLE001 - stock does it in its own way
            faults.note("the change of model folders", error)
        yield
    finally:
        if locked:
            pool._lock.release()


async def _clear(pool: Any, deadline: float) -> None:
    """Let loads end, then unload side by side what is in use, each when it is at rest.

    What is idle serves on until stock unloads it: that takes no time.
    """
    await Quiesce(None).wait(
        lambda: not any(e.is_loading for e in pool._entries.values()), deadline, None
    )
    plans = [
        e
        for m in pool.get_loaded_model_ids()
        if (e := unloads.plan_unload(pool, m)) is not None
    ]
    results = await asyncio.gather(
        *(unloads.run_unload(e, partial(pool._unload_engine, e.model)) for e in plans),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _keep_what_lives(pool: Any, before: Mapping[str, Any]) -> None:
    """Put back the entries of models that load or are loaded, with their bytes."""
    try:
        for model, entry in before.items():
            found = pool._entries.get(model)
            if found is entry or not (entry.is_loading or entry.engine is not None):
                continue
            if found is not None:
                entry.is_pinned = found.is_pinned
            pool._entries[model] = entry
            # A load counts its bytes in the step that sets the engine.
            if entry.engine is not None:
                pool._current_model_memory += unlocked.resident_size(pool, entry)
            logger.info("admission: '%s' outlives the change of model folders", model)
    except Exception as error:  # noqa: BLE001 - stock has changed them
        faults.note("what outlives a change of model folders", error)


def _admin_pool() -> Any:
    import omlx.admin.routes as routes

    return routes._get_engine_pool() if routes._get_engine_pool else None


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the change of model folders."""
    ledger.wrap(module, "_apply_model_dirs_runtime", change_model_dirs)
