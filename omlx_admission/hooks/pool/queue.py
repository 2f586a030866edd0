"""The admission queue in front of ``get_engine``: everything that is not simply resident.

``EnginePool.get_engine`` has four of our layers, from the outside to the inside:

1. ``resident.get_engine``: a loaded model with a place is handed out in one step.
2. :meth:`QueueHooks.get_engine`, here: the call waits in the queue (`core.queue`).
3. ``resident.get_engine_past_teardown``: no engine whose teardown has begun.
4. ``errors.get_engine``: what an error of stock's means for the client.

The queue's own load enters below 2, so it meets 3 and 4 and then stock. Where the resident
path is off, 1 and 3 are not there: then stock hands out what is ready, under its lock, and
this module tells the queue of releases and unloads itself.

The wrappers decide nothing. They ask the queue, offer stock the victims that were planned
(``_find_lru_victim``), and tell the queue when something in the pool has changed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.footprint import settled
from omlx_admission.core.pool import holding, ready
from omlx_admission.core.pool.admission import PoolAdmission
from omlx_admission.core.pool.port import load_at_hand
from omlx_admission.core.queue import QueueBroken
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.pool import (
    exceptions,
    leases,
    loads,
    places,
    resident,
    stalled,
)
from omlx_admission.hooks.pool import pending_unloads as pending
from omlx_admission.hooks.pool.port import VIEW_NEEDS, OmlxPool
from omlx_admission.hooks.pool.state import PoolState, state_of
from omlx_admission.hooks.server import errors
from omlx_admission.observation import observe
from omlx_admission.settings import Settings

logger = logging.getLogger("omlx.admission")

POOL = resident.POOL
SERVER = "omlx.server"
UVICORN = "uvicorn.server"

NEEDS = (
    resident.GET_ENGINE,
    resident.UNLOAD,
    resident.CLASS,
    resident.ENTRIES,
    resident.LOCK,
    *VIEW_NEEDS,
    Need(POOL, "EnginePool._settings_manager", Kind.VALUE),
    Need("omlx.model_settings", "ModelSettingsManager.get_settings", Kind.SYNC, ("model_id",)),
    Need(POOL, "EnginePool._find_lru_victim", Kind.SYNC, returns=("str | None",)),
    Need(POOL, "_find_lru_victim", Kind.USED),
    Need(POOL, "EnginePool._load_engine", Kind.ASYNC, ("model_id",)),
    # Whose jobs tell whether a load is at work.
    gpu_jobs.EXECUTOR,
    Need(POOL, "VLMBatchedEngine", Kind.NAME),
    Need(
        POOL,
        "EnginePool._entry_runtime_resident_size",
        Kind.SYNC,
        ("entry", "runtime_settings", "*", "base_size"),
        returns=("int",),
        optional=True,
    ),
    Need(
        POOL,
        "EnginePool._distributed_deployment_for_entry",
        Kind.SYNC,
        ("entry",),
        optional=True,
    ),
    Need(
        POOL,
        "EnginePool._ceiling_binding_and_advice",
        Kind.SYNC,
        ("*", "ceiling", "current", "tail"),
        returns=("tuple[str | None, str | None]", "tuple[str, str]"),
        optional=True,
    ),
    *resident.RELEASE,
    *resident.SERVED,
    Need(POOL, "EnginePool.shutdown", Kind.ASYNC),
    Need(POOL, "EnginePool.discover_models", Kind.SYNC),
    Need(
        POOL,
        "EnginePool._mark_pending_unload_locked",
        Kind.SYNC,
        ("model_id", "reason"),
        returns=("bool",),
    ),
    resident.SIGNATURE,
    resident.VALIDATE,
    *leases.NEEDS,
    *stalled.NEEDS,
    Need(POOL, "EnginePool._raise_if_load_failed", Kind.SYNC, ("model_id", "entry")),
    Need(
        POOL,
        "EnginePool._raise_if_model_path_missing_locked",
        Kind.SYNC,
        ("model_id", "entry"),
    ),
    *resident.ENTRY,
    *pending.NEEDS,
    *loads.NEEDS,
    *places.NEEDS,
    Need(POOL, "EngineEntry.engine_type", Kind.VALUE),
    Need(POOL, "EngineEntry.model_id", Kind.VALUE, types=("str",)),
    Need(POOL, "EngineEntry.text_only_size", Kind.VALUE, types=("int",), optional=True),
    Need(
        POOL,
        "EngineEntry.runtime_estimated_size",
        Kind.VALUE,
        types=("int | None",),
        optional=True,
    ),
    Need(POOL, "EngineEntry.model_path", Kind.VALUE, types=("str",)),
    *exceptions.RAISED,
    # What stock says by these is what the queue waits for.
    Need(POOL, "InsufficientMemoryError", Kind.USED),
    Need(POOL, "ModelBusyError", Kind.USED),
)


#: Present where oMLX has the queue itself.
NATIVE = (
    Need("omlx.admission.queue", "Admission", Kind.CLASS),
    Need(POOL, "EnginePool._admission", Kind.VALUE),
)


class QueueHooks:
    """The wrappers; they share the settings and the pool's module."""

    def __init__(self, module: Any, settings: Settings) -> None:
        self._module = module
        self._settings = settings

    async def get_engine(self, wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """Queue the call unless its model is resident and serves."""
        model_id, force_lm, lease, settings = resident.arguments(*args, **kwargs)
        state = state_of(pool)
        # Only where the resident path is off.
        held = leases.hand_out_again(pool, state, model_id, lease, force_lm, settings)
        if held is not None:
            return held
        admission = self._queue_for(pool, state, wrapped, model_id, force_lm, lease, settings)
        if admission is not None:
            try:
                engine = await admission.get_engine(model_id, force_lm, lease, settings)
            except QueueBroken:
                admission = None
            except Exception as error:
                request = requests.active()
                if request is None or request.refusal is None:
                    self._remember(pool, error)
                raise
        if admission is None:
            engine = await wrapped(*args, **kwargs)
        leased = admission is not None
        leases.note(pool, state, engine, model_id, lease, force_lm, settings, leased=leased)
        return engine

    def _queue_for(
        self,
        pool: Any,
        state: PoolState,
        wrapped: Any,
        model_id: str,
        force_lm: bool,
        lease: bool,
        settings: object | None,
    ) -> PoolAdmission | None:
        """The queue that the call has to go through, None where stock answers at once."""
        try:
            admission = state.admission or self._open(pool, state, wrapped)
            # Only where the resident path is off does stock hand out what is ready, locked.
            if (
                model_id in admission.gated
                or ready.ready_engine(
                    pool, state.unloading, model_id, force_lm, settings, switches.vlm_engine
                )
                is None
                or (lease and places.is_taken(pool, state, model_id))
            ):
                return admission
        except Exception as error:
            if faults.is_omlx(error):
                self._remember(pool, error)
                raise
            faults.note("the admission queue", error)
        return None

    def _remember(self, pool: Any, error: Exception) -> None:
        if self._settings.errors:
            errors.remember(pool, error)

    def _open(self, pool: Any, state: PoolState, wrapped: Any) -> PoolAdmission:
        port = OmlxPool(pool, self._module, wrapped)
        state.admission = PoolAdmission(port, self._settings, events=observe.observer)
        return state.admission

    @staticmethod
    async def release(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """Only where the resident path is off: tell the queue after stock's release."""
        model_id = args[0] if args else kwargs["model_id"]
        held = holding.released_by_route(model_id)
        try:
            if leases.counts(pool, model_id, held):
                return await wrapped(*args, **kwargs)
        finally:
            admission = state_of(pool).admission
            if admission is not None:
                admission.released(model_id)

    @staticmethod
    async def load(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """Note what the load has on its thread, and tell the queue when it ends.

        It may be a load that the queue did not start itself.
        """
        model = args[0] if args else kwargs["model_id"]
        leases.engine_gone(pool, model)
        state = state_of(pool)
        work = None
        try:
            if state.admission is not None:
                work = state.admission.port.work_of(model)
        except Exception as error:  # noqa: BLE001 - then this load is not judged
            faults.note("the watch of a load", error)
        try:
            with work or contextlib.nullcontext():
                return await wrapped(*args, **kwargs)
        finally:
            state.changed()

    @staticmethod
    async def unload(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """Only where the resident path is off or native: tell the queue of an unload."""
        try:
            return await wrapped(*args, **kwargs)
        finally:
            leases.engine_gone(pool, args[0] if args else kwargs["model_id"])
            state_of(pool).changed()

    @staticmethod
    async def evict(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """After an eviction for a load of ours, wait until the footprint shows it (P5).

        Within stock's own call, which believes the committed bytes after an eviction; a
        later call would trust the footprint, and so do the guards of prompts.
        """
        load, before = load_at_hand(), None
        try:
            before = load.read() if load is not None else None
        except Exception as error:  # noqa: BLE001 - the eviction goes on
            faults.note("the reading of the footprint", error)
        answer = await wrapped(*args, **kwargs)
        if load is not None and before is not None:
            try:
                if not await settled(before, load.read):
                    logger.info("admission: the footprint still counts what has left")
            except Exception as error:  # noqa: BLE001 - the load goes on
                faults.note("the reading of the footprint", error)
        return answer

    @staticmethod
    def find_victim(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """Offer the planned victims first; synchronous and free of side effects.

        The enforcer calls this too; its task has no plan, so it gets stock's answer.
        """
        load = load_at_hand()
        if load is not None and not load.has_a_chance():
            return None  # the ceiling fell meanwhile: no model leaves in vain
        admission = state_of(pool).admission
        victim = None if admission is None else admission.port.planned_victim()
        return wrapped(*args, **kwargs) if victim is None else victim

    @staticmethod
    def discover(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """A rescan may remove a model that a request waits for, but not one that loads.

        Until 0.5.2 stock replaces the entry that a load is writing into, and its engine
        is lost with the memory it holds (B19).
        """
        loading = {m: entry for m, entry in pool._entries.items() if entry.is_loading}
        try:
            return wrapped(*args, **kwargs)
        finally:
            pool._entries.update(loading)
            state_of(pool).changed()

    @staticmethod
    async def shutdown(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        """End every wait before the engines go."""
        admission = state_of(pool).admission
        if admission is not None:
            admission.shut_down()
        return await wrapped(*args, **kwargs)


async def server_shutdown(wrapped: Any, server: Any, args: Any, kwargs: Any) -> Any:
    """Refuse waiting requests before the server waits for open connections: theirs are."""
    try:
        pool = getattr(
            getattr(sys.modules.get(SERVER), "_server_state", None), "engine_pool", None
        )
        admission = state_of(pool).admission if pool is not None else None
        if admission is not None:
            admission.shut_down()
    except Exception as error:  # noqa: BLE001 - the server must end whatever we do
        faults.note("the end of the queue", error)
    return await wrapped(*args, **kwargs)


def apply_uvicorn(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the shutdown of the HTTP server that oMLX runs in."""
    if inspect.iscoroutinefunction(getattr(module.Server, "shutdown", None)):
        ledger.wrap(module, "Server.shutdown", server_shutdown)


def apply(module: Any, ledger: Ledger, wanted: Wanted) -> None:
    """Wrap the pool. With the resident path on, release and unload tell the queue already."""
    hooks = QueueHooks(module, wanted.settings)
    switches.pacing = True
    switches.handling.counts_waits = True
    ledger.wrap(module, "EnginePool.get_engine", hooks.get_engine)
    ledger.wrap(module, "EnginePool._load_engine", hooks.load)
    ledger.wrap(module, "EnginePool._unload_engine", hooks.evict)
    ledger.wrap(module, "EnginePool._find_lru_victim", hooks.find_victim)
    ledger.wrap(module, "EnginePool._mark_pending_unload_locked", pending.mark)
    ledger.wrap(module, "EnginePool.discover_models", hooks.discover)
    ledger.wrap(module, "EnginePool.shutdown", hooks.shutdown)
    process.executors.may_prepare(ledger)
    loads.apply(module, ledger)
    if not switches.marks:
        ledger.wrap(module, f"EnginePool.{resident.release_name(module)}", hooks.release)
        ledger.wrap(module, "EnginePool._unload_engine", hooks.unload)
