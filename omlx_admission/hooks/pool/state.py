"""What the hooks keep per pool: unloads in progress, and the admission queue.

Attached to the pool object itself, so that it goes when the pool goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import weakref
from collections.abc import Collection, Coroutine
from typing import Any, NamedTuple

from omlx_admission.core.pool.admission import PoolAdmission
from omlx_admission.core.pool.marks import DRAIN_REASON
from omlx_admission.core.quiesce import Quiesce
from omlx_admission.hooks.patching.switches import switches

_ATTRIBUTE = "_omlx_admission_state"

#: The reason of a model that drains for an unload that was asked for by hand.
UNLOAD_REASON = "admission unload"


class Verified(NamedTuple):
    """An engine that passed all of stock's checks, and what that depended on.

    Every part is compared by identity, the settings by value too: a change may put a
    new object in place or write into the one that is there. The engine is referenced
    weakly; its weights must go when the pool lets go of it.
    """

    engine: weakref.ref[Any]
    signature: object
    manager: Any
    settings: object
    values: dict[str, Any] | None


class PoolState:
    """Loop thread only.

    Attributes:
        unloading: models whose teardown runs now, with the task-independent event
            that announces its end.
        admission: the queue, None until the first request needs it.
        verified: what was found out about a loaded engine, for the hot path.
        leaving: models that drain for an unload that was asked for by hand.
        dead: engines that died and are being removed, by model: since when, by
            ``time.monotonic``.
        reloading: set at the end of a change of the model folders that goes on now;
            until then no load of ours begins.
        used: when a loaded model was handed out or given back last, by
            ``time.monotonic``: the pool's own times go back with the clock of the wall.
        unnamed: by model, leases on its engine that callers outside of requests took.
        lapsed: by model, such leases whose engine is gone and that are not released yet.
        parked: what was taken out of engines and waits for them.
    """

    __slots__ = (
        "admission",
        "dead",
        "lapsed",
        "leaving",
        "parked",
        "reloading",
        "unloading",
        "unnamed",
        "used",
        "verified",
    )

    def __init__(self) -> None:
        self.unloading: dict[str, asyncio.Event] = {}
        self.admission: PoolAdmission | None = None
        self.verified: dict[str, Verified] = {}
        self.leaving: dict[str, Quiesce] = {}
        self.dead: dict[str, float] = {}
        self.reloading: asyncio.Event | None = None
        self.unnamed: dict[str, int] = {}
        self.used: dict[str, float] = {}
        self.lapsed: dict[str, int] = {}
        self.parked: set[Any] = set()

    def released(self, pool: Any, model: str) -> None:
        """A lease of ``model`` came back: tell what waits for that."""
        entry = pool._entries.get(model)
        if entry is None:
            return
        if entry.engine is not None:
            self.used[model] = time.monotonic()
        if entry.pending_unload_reason and not marked_by_us(entry):
            _unload_pending_soon(pool, model)
        quiesce = self.leaving.get(model)
        if quiesce is not None:
            quiesce.notify()
        if self.admission is not None:
            self.admission.released(model)

    def changed(self) -> None:
        """Tell the queue, if there is one, that the pool changed."""
        if self.admission is not None:
            self.admission.changed()


def state_of(pool: Any) -> PoolState:
    """The state of ``pool``, made at first use."""
    state: PoolState | None = pool.__dict__.get(_ATTRIBUTE)
    if state is None:
        state = PoolState()
        setattr(pool, _ATTRIBUTE, state)
        pools.add(pool)
    return state


#: Pools that have a state.
pools: weakref.WeakSet[Any] = weakref.WeakSet()


def unloading_models(pool: Any) -> Collection[str]:
    """Models whose teardown runs now: by our marks, and by oMLX's own where it has them."""
    ours = state_of(pool).unloading
    theirs = getattr(pool, "_unloading_models", None)
    return {*ours, *theirs} if theirs else ours


def forget(pool: Any) -> None:
    """Remove what was attached to ``pool``."""
    pool.__dict__.pop(_ATTRIBUTE, None)
    pools.discard(pool)


def marked_by_us(entry: Any) -> bool:
    """Whether the entry's pending mark is ours: for a swap, or for an unload by hand."""
    reason = entry.pending_unload_reason
    return isinstance(reason, str) and reason.startswith((DRAIN_REASON, UNLOAD_REASON))


def lock_of(pool: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    """What an unload of an idle model has to hold: nothing, where teardowns are marked.

    It finds the model idle and marks it in one step, and the holder of the lock joins it.
    """
    return contextlib.nullcontext() if switches.marks else pool._lock


def _unload_pending_soon(pool: Any, model: str) -> None:
    """Stock unloads a drained, marked model inside the release; do it in a task."""

    async def unload() -> None:
        async with lock_of(pool):
            await pool._unload_pending_if_idle_locked(model)

    in_background(unload(), f"admission-pending-unload:{model}", contextvars.copy_context())


#: Tasks that go on by themselves: the loop holds no reference to them.
background: set[asyncio.Task[None]] = set()


def in_background(
    work: Coroutine[Any, Any, None], name: str, context: contextvars.Context | None = None
) -> asyncio.Task[None]:
    """Start ``work``, which belongs to no request unless ``context`` says so."""
    task = asyncio.get_running_loop().create_task(
        work, name=name, context=contextvars.Context() if context is None else context
    )
    background.add(task)
    task.add_done_callback(background.discard)
    return task
