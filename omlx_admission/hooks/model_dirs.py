"""A change of the model folders: nothing is cut, and no engine is left behind.

Stock unloads one model after another and then drops all entries: an engine that was
loaded in between, or that an unload has spared, would hold its memory for good (B19).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from omlx_admission.hooks import faults, unloads
from omlx_admission.hooks.ledger import Ledger
from omlx_admission.hooks.pool_state import PoolState, state_of
from omlx_admission.runtime import request as requests
from omlx_admission.runtime.leave import Leave


async def change_model_dirs(wrapped: Any, _module: Any, args: Any, kwargs: Any) -> Any:
    """Unload everything, and load nothing until stock has forgotten its old entries."""
    state: PoolState | None = None
    try:
        pool = _admin_pool()
        admission = None if pool is None else state_of(pool).admission
        if pool is not None and admission is not None and not admission.broken:
            state = state_of(pool)
    except Exception as error:  # noqa: BLE001 - stock does it in its own way
        faults.note("the change of model folders", error)
    if state is None or state.reloading is not None:
        return await wrapped(*args, **kwargs)
    state.reloading = asyncio.Event()
    token = unloads.must_happen_now.set(True)
    try:
        try:
            await _clear(pool, state)
        except Exception as error:  # noqa: BLE001 - stock does it in its own way
            faults.note("the change of model folders", error)
        return await wrapped(*args, **kwargs)
    finally:
        unloads.must_happen_now.reset(token)
        state.reloading.set()
        state.reloading = None
        state.changed()


async def _clear(pool: Any, state: PoolState) -> None:
    """Let loads end, then unload side by side what is in use, each when it is at rest.

    What is idle serves on until stock unloads it: that takes no time.
    """
    assert state.admission is not None
    request = requests.current.get()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + state.admission.budget(request)
    await Leave(None).wait(
        lambda: not any(e.is_loading for e in pool._entries.values()), deadline, None
    )
    errands = [
        e for m in pool.get_loaded_model_ids() if (e := unloads.errand_of(pool, m)) is not None
    ]
    results = await asyncio.gather(
        *(unloads.carry_out(e, partial(pool._unload_engine, e.model)) for e in errands),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _admin_pool() -> Any:
    import omlx.admin.routes as routes

    return routes._get_engine_pool() if routes._get_engine_pool else None


def apply(module: Any, ledger: Ledger) -> None:
    """Wrap the change of model folders."""
    ledger.wrap(module, "_apply_model_dirs_runtime", change_model_dirs)
