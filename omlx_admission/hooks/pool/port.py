"""The pool as the queue sees it, with what only this package knows of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from omlx_admission.core.policy.model import Target
from omlx_admission.core.pool.port import EnginePoolPort, refused_class
from omlx_admission.core.port import ParkedAnswer
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.park import parking
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.pool import ceiling, dead, leases, phantom, resident, stalled
from omlx_admission.hooks.pool.state import state_of, unloading_models

#: What :meth:`OmlxPool.view` reads.
VIEW_NEEDS = (
    *ceiling.NEEDS,
    *phantom.NEEDS,
    *read_if_there(resident.POOL, "EnginePool", "_load_seconds_per_gb_ema"),
    Need(resident.POOL, "EnginePool._current_model_memory", Kind.VALUE),
    Need(resident.POOL, "EnginePool._current_ceiling", Kind.SYNC, (), returns=("int",)),
    Need(
        resident.POOL,
        "EnginePool._fallback_admission_ceiling",
        Kind.SYNC,
        (),
        returns=("int",),
        optional=True,
    ),
    Need(
        resident.POOL,
        "EnginePool._entry_resident_size",
        Kind.SYNC,
        ("entry",),
        returns=("int",),
        optional=True,
    ),
    Need(
        resident.POOL,
        "EnginePool._entry_has_scheduler_work",
        Kind.SYNC,
        ("entry",),
        returns=("bool",),
        optional=True,
    ),
    Need(resident.POOL, "EngineEntry.estimated_size", Kind.VALUE, types=("int",)),
    Need(resident.POOL, "mx", Kind.NAME),
    Need(
        resident.POOL,
        "EnginePool._admission_soft_target",
        Kind.SYNC,
        (),
        returns=("int",),
        optional=True,
    ),
    # Here it may be imported from anywhere; how it is called is seen where it is defined.
    Need(resident.POOL, "get_phys_footprint", Kind.NAME),
    Need("omlx.utils.proc_memory", "get_phys_footprint", Kind.SYNC, (), returns=("int",)),
    Need(
        "omlx.engine.base",
        "BaseEngine.has_active_requests",
        Kind.SYNC,
        (),
        returns=("bool",),
    ),
)


class OmlxPool(EnginePoolPort):
    """One ``EnginePool`` that the hooks have patched."""

    def __init__(self, pool: Any, module: Any, get_engine: Callable[..., Any]) -> None:
        super().__init__(pool, module, _exceptions(), get_engine)

    def unloading(self) -> Collection[str]:
        """Models whose teardown runs now, by marks beside the pool and by its own."""
        return unloading_models(self._pool)

    def works(self, engine: Any) -> bool:
        """An engine that only counts wrongly does not work (P2)."""
        return super().works(engine) and not phantom.is_phantom(engine)

    def is_vision(self, engine: Any) -> bool:
        """The class of vision engines may be missing."""
        return resident.is_vlm(engine)

    def last_used(self, model: str, entry: Any) -> float:
        """By ``time.monotonic``; converted where we were not asked for the model (C18)."""
        used = state_of(self._pool).used.get(model)
        return time.monotonic() - (time.time() - entry.last_access) if used is None else used

    def take(self, target: Target, leases: int) -> Any:
        """Note when, by the clock that does not go back."""
        engine = super().take(target, leases)
        state_of(self._pool).used[target.model] = time.monotonic()
        return engine

    def give_back(self, model: str, engine: Any) -> None:
        """By the book of leases."""
        leases.lower(self._pool, model, lambda: engine)

    def unread(self, model: str, entry: Any) -> int:
        """See :mod:`.stalled`."""
        return stalled.unread(model, entry)

    def sessions(self, model: str, entry: Any) -> int:
        """See :mod:`.stalled`."""
        return stalled.sessions(model, entry)

    def answering(self, model: str, entry: Any) -> float | None:
        """See :mod:`~omlx_admission.hooks.park.parking`, here and below."""
        return parking.answering(model, entry)

    def parked_bytes(self) -> int:
        """What the parked answers of all models hold."""
        return parking.parked_bytes(self._pool)

    def park(self, model: str, most: int | None) -> None:
        """Begin to take out what it runs."""
        parking.park(self._pool, model, most)

    def put_back(self, model: str, engine: Any, answers: Sequence[ParkedAnswer]) -> None:
        """Let parked answers go on."""
        parking.put_back(self._pool, model, engine, answers)

    def let_go_stalled(self, model: str, entry: Any) -> None:
        """See :mod:`.stalled`."""
        stalled.let_go(self._pool, model, entry)

    async def may_load(self) -> None:
        """Wait for the end of a change of the model folders."""
        while (reloading := state_of(self._pool).reloading) is not None:
            await reloading.wait()

    def handed_out_dead(self, model: str) -> None:
        """See :mod:`.dead`."""
        dead.bury(self._pool, model)

    def sees_jobs(self) -> bool:
        """Whether the executor of loads could be wrapped."""
        return process.executors.prepare(sys.modules[gpu_jobs.CORE].get_mlx_executor())


def _exceptions() -> Any:
    import omlx.exceptions

    return omlx.exceptions


def admission_refused() -> type[Exception]:
    """The class of our refusals."""
    return refused_class(_exceptions().SchedulerQueueFullError)
