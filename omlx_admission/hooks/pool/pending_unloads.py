"""A pending unload that others than this package have marked is completed or withdrawn.

The memory enforcer marks a busy model under emergency pressure and ends its
requests. Up to 0.6.3 nothing looks at that mark again unless a lease is released
after the engine's own queues are empty, or the pressure comes back: since 0.6.2
every later request is refused, before it every later request is told to end. From
0.7.x on oMLX follows its mark itself (its change #3547); a second follower does no
harm there: one joins the other's unload.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core.port import PoolPort
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.pool import resident
from omlx_admission.hooks.pool.state import in_background, lock_of, marked_by_us, state_of

logger = logging.getLogger("omlx.admission")

NEEDS = (
    resident.UNLOAD_PENDING,
    resident.ENFORCER,
    resident.flag("abort_requested"),
    resident.flag("pending_unload_allow_pinned", optional=True),
    # What it says is compared with a word.
    Need(
        "omlx.process_memory_enforcer",
        "ProcessMemoryEnforcer.get_pressure_level",
        Kind.SYNC,
        (),
        returns=("str",),
        optional=True,
    ),
)

#: Seconds between two looks at a marked model that is still in use.
_POLL_S = 0.1

#: The reason by which the enforcer marks; what it wants is memory, not this model gone.
_FOR_MEMORY = "hard memory pressure"


def mark(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Follow each mark that is not ours to its end."""
    marked = wrapped(*args, **kwargs)
    if marked:
        try:
            _begin_to_follow(pool, args[0] if args else kwargs["model_id"])
        except Exception as error:  # noqa: BLE001 - the mark stands, as in stock
            faults.note("the follower of pending unloads", error)
    return marked


def _begin_to_follow(pool: Any, model: str) -> None:
    admission = state_of(pool).admission
    if admission is None or not _is_marked(pool, model):
        return
    # A request may have marked it; what follows does not end with that request.
    in_background(_follow(pool, admission.port, model), f"admission-pending:{model}")
    admission.changed()


async def _follow(pool: Any, port: PoolPort, model: str) -> None:
    while _is_marked(pool, model):
        if port.is_quiescent(model):
            entry = pool._entries[model]
            if _pointless(pool, entry):
                _withdraw(pool, model, entry)
                return
            async with lock_of(pool):
                if _is_marked(pool, model) and not await pool._unload_pending_if_idle_locked(
                    model
                ):
                    await _unload_dead(pool, port, model)
        await asyncio.sleep(_POLL_S)


async def _unload_dead(pool: Any, port: PoolPort, model: str) -> None:
    """Stock never calls an engine idle whose loop has died with requests in it."""
    if _is_marked(pool, model) and port.is_quiescent(model):
        await pool._unload_engine(model)


def _is_marked(pool: Any, model: str) -> bool:
    entry = pool._entries.get(model)
    return (
        entry is not None
        and entry.engine is not None
        and bool(entry.pending_unload_reason)
        and not marked_by_us(entry)
    )


def _pointless(pool: Any, entry: Any) -> bool:
    """Whether what the mark was for has come without it, or may not happen any more.

    Memory that has recovered serves the model's next request at once, where completing
    the unload would load it again for that request.
    """
    if entry.is_pinned and not getattr(entry, "pending_unload_allow_pinned", False):
        return True
    if not str(entry.pending_unload_reason).startswith(_FOR_MEMORY):
        return False
    level = getattr(pool._process_memory_enforcer, "get_pressure_level", None)
    return callable(level) and level() == "ok"


def _withdraw(pool: Any, model: str, entry: Any) -> None:
    logger.info(
        "admission: '%s' stays: '%s' is over before it was unloaded",
        model,
        entry.pending_unload_reason,
    )
    entry.pending_unload_reason = None
    entry.abort_requested = False
    if hasattr(entry, "pending_unload_allow_pinned"):
        entry.pending_unload_allow_pinned = False
    state_of(pool).changed()
