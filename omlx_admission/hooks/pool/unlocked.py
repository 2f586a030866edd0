"""What a resident's request meets on its way, and stock does under the pool's lock.

The lock is held over every load. Prefill eviction takes it, and the engine's loop waits
for that: all streams of the engine stand still until the other model is loaded. So does
the end of a request that has read a PDF. `docs/locks.md` has all takers of the lock.

The code that runs is stock's own, on the pool with another lock. What it decides, it
decides in the step in which the teardown is marked, so it needs none.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import wrapt

from omlx_admission.core import faults
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.pool.state import in_background

logger = logging.getLogger("omlx.admission")

POOL = "omlx.engine_pool"

NEEDS = (
    Need(
        POOL,
        "EnginePool._evict_idle_lru_for_prefill",
        Kind.ASYNC,
        ("exclude_model_id", "eviction_request"),
        exact=True,
    ),
    Need(
        POOL,
        "EnginePool._find_lru_prefill_eviction_victim",
        Kind.SYNC,
        ("*", "exclude_model_id"),
        returns=("str | None",),
    ),
    Need(POOL, "EnginePool._current_model_memory", Kind.VALUE),
    *read_if_there("omlx.scheduler", "PrefillEvictionRequest", "request_id"),
    # Not in 0.5.0.
    Need(
        POOL,
        "EnginePool._reclaim_pooled_buffers_for_prefill",
        Kind.ASYNC,
        ("model_id", "request_id"),
        exact=True,
        optional=True,
    ),
)

#: Seconds between two looks at an engine that is being stopped.
_LOOK_S = 0.01


class Unlocked(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A pool with a lock of its own, and whose unloads end when the engine is gone.

    The rest of a teardown runs on the thread on which loads run: it goes on by itself.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._self_lock = asyncio.Lock()

    @property
    def _lock(self) -> asyncio.Lock:
        return self._self_lock

    async def _unload_engine(self, model_id: str) -> None:
        await self._self_let_go(model_id)

    async def _self_let_go(self, model_id: str) -> asyncio.Task[None]:
        """Have the engine of an idle model stopped; returns what remains of its unload."""
        entry = self.__wrapped__._entries[model_id]
        engine = entry.engine
        # No request has asked for this unload.
        task = in_background(self._self_unload(model_id), f"admission-let-go:{model_id}")
        task.add_done_callback(_report)
        while not task.done() and entry.engine is engine:
            await asyncio.wait({task}, timeout=_LOOK_S)
        if task.done():
            task.result()
        return task

    async def _self_unload(self, model_id: str) -> None:
        """Unload a model that is idle still, in the step that looks."""
        if self._self_is_idle(model_id):
            await self.__wrapped__._unload_engine(model_id)

    def _self_is_idle(self, model_id: str) -> bool:
        entry = self.__wrapped__._entries.get(model_id)
        return entry is not None and entry.in_use <= 0


class Evicting(Unlocked):
    """A pool as the prefill of one model evicts from it.

    An engine that has been let go counts as gone, and what it leaves in MLX's cache is
    reclaimed on the thread of the engine that needs it.
    """

    def __init__(self, pool: Any, model: str, request_id: str) -> None:
        super().__init__(pool)
        self._self_model, self._self_request = model, request_id
        #: What remains of unloads, and the bytes that they have to book yet.
        self._self_parting: dict[asyncio.Task[None], int] = {}

    @property
    def _current_model_memory(self) -> int:
        booked = sum(n for task, n in self._self_parting.items() if not task.done())
        return int(self.__wrapped__._current_model_memory) - booked

    async def _unload_engine(self, model_id: str) -> None:
        pool = self.__wrapped__
        size = resident_size(pool, pool._entries[model_id])
        rest = await self._self_let_go(model_id)
        reclaim = getattr(pool, "_reclaim_pooled_buffers_for_prefill", None)
        if reclaim is None:
            while not rest.done() and not any(e.is_loading for e in pool._entries.values()):
                await asyncio.wait({rest}, timeout=_LOOK_S)
        if not rest.done():
            self._self_parting[rest] = size
            if reclaim is not None:
                await reclaim(self._self_model, self._self_request)

    def _self_is_idle(self, model_id: str) -> bool:
        found = self.__wrapped__._find_lru_prefill_eviction_victim
        return bool(found(exclude_model_id=self._self_model) == model_id)


def resident_size(pool: Any, entry: Any) -> int:
    """Bytes by which a loaded model counts in the pool's own sum."""
    size = getattr(pool, "_entry_resident_size", None)
    return int(size(entry) if size else entry.estimated_size)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("admission: an eviction failed: %r", error)


def _arguments(exclude_model_id: str, eviction_request: object) -> tuple[str, str]:
    return exclude_model_id, str(getattr(eviction_request, "request_id", ""))


async def evict(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Evict idle models for a prefill, whatever loads meanwhile."""
    try:
        stock, seen = wrapped.__func__, Evicting(pool, *_arguments(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - stock evicts when the load has ended
        faults.note("the eviction for a prefill", error)
        return await wrapped(*args, **kwargs)
    return await stock(seen, *args, **kwargs)


async def unload_if_idle(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Unload an idle model, whatever loads meanwhile."""
    try:
        stock, seen = wrapped.__func__, Unlocked(pool)
    except Exception as error:  # noqa: BLE001 - as above
        faults.note("the unload of an idle model", error)
        return await wrapped(*args, **kwargs)
    return await stock(seen, *args, **kwargs)


def apply(module: Any, ledger: Ledger) -> None:
    """Wrap both; it takes the marks of `hooks.pool.resident`."""
    ledger.wrap(module, "EnginePool._evict_idle_lru_for_prefill", evict)
    ledger.wrap_if_there(module, "EnginePool.unload_if_idle_unpinned", unload_if_idle)
