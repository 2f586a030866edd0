"""Residents never wait: acquire and release without the pool lock, one teardown at a time.

A loaded model is handed out in one synchronous step exactly when stock would
hand it out at once; everything else goes the stock way. Upstream's 0.7.x does
the same natively (its ``_acquire_loaded_engine``), and there this stands aside.
"""

from __future__ import annotations

import asyncio
import copy
import weakref
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core.pool import holding, ready
from omlx_admission.core.pool.engines import lives
from omlx_admission.core.uninterrupted import to_its_end
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.pool import dead, engines, leases, places, stalled, unlocked
from omlx_admission.hooks.pool.state import PoolState, Verified, state_of

POOL = "omlx.engine_pool"

#: Needs that every feature of the pool shares.
GET_ENGINE = Need(
    POOL,
    "EnginePool.get_engine",
    Kind.ASYNC,
    ("model_id", "force_lm=False", "_lease=False", "runtime_settings=None"),
    exact=True,
)
#: What else it may come to take is passed on by all that wrap it.
UNLOAD = Need(POOL, "EnginePool._unload_engine", Kind.ASYNC, ("model_id",), returns=("None",))
RELEASE = (
    Need(
        POOL,
        "EnginePool.release_engine",
        Kind.ASYNC,
        ("model_id",),
        exact=True,
        returns=("None",),
    ),
    # Not in 0.5.0.
    Need(
        POOL,
        "EnginePool._release_engine_lease",
        Kind.ASYNC,
        ("model_id",),
        exact=True,
        returns=("None",),
        optional=True,
    ),
)
#: What is kept per pool is attached to it.
CLASS = Need(POOL, "EnginePool", Kind.CLASS)
ENTRIES = Need(POOL, "EnginePool._entries", Kind.VALUE, types=("dict[...]", "OrderedDict[...]"))
LOCK = Need(POOL, "EnginePool._lock", Kind.VALUE, types=("asyncio.Lock",))
#: Wrappers meet a request only where the server asks the pool's own class.
SERVED = (
    Need("omlx.server", "EnginePool", Kind.USED),
    Need("omlx.server", "get_engine", Kind.USED),
    Need("omlx.server", "release_engine", Kind.USED),
    Need(POOL, "_load_engine", Kind.USED),
    Need(POOL, "_unload_engine", Kind.USED),
)


def flag(name: str, optional: bool = False) -> Need:
    """A field of the entry that is true or false, and false at first."""
    return Need(
        POOL,
        f"EngineEntry.{name}",
        Kind.VALUE,
        types=("bool",),
        optional=optional,
    )


ENTRY = (
    *(
        Need(POOL, f"EngineEntry.{name}", Kind.VALUE)
        for name in ("engine", "runtime_settings_signature")
    ),
    Need(POOL, "EngineEntry.last_access", Kind.VALUE, types=("float",)),
    flag("is_loading"),
    flag("is_pinned"),
    Need(POOL, "EngineEntry.in_use", Kind.VALUE, types=("int",)),
    Need(
        POOL,
        "EngineEntry.pending_unload_reason",
        Kind.VALUE,
        types=("str | None",),
    ),
)
#: How a settings variant is told, and what stock says of a loaded engine that is broken.
SIGNATURE = Need(
    POOL,
    "EnginePool._engine_runtime_signature",
    Kind.SYNC,
    ("model_id", "runtime_settings"),
)
VALIDATE = Need(
    POOL,
    "EnginePool._validate_llm_engine_ready",
    Kind.SYNC,
    ("model_id", "engine"),
    returns=("None",),
)
#: What frees memory by its own rules; None before a server has one.
ENFORCER = Need(POOL, "EnginePool._process_memory_enforcer", Kind.VALUE)
#: What tells the enforcer's own task, and a model's settings that may have changed.
TOLD_BY = (
    *read_if_there("omlx.process_memory_enforcer", "ProcessMemoryEnforcer", "_task"),
    *read_if_there("omlx.model_settings", "ModelSettingsManager", "_settings"),
)
UNLOAD_PENDING = Need(
    POOL,
    "EnginePool._unload_pending_if_idle_locked",
    Kind.ASYNC,
    ("model_id",),
    returns=("bool",),
)

NEEDS = (
    GET_ENGINE,
    UNLOAD,
    CLASS,
    ENTRIES,
    LOCK,
    Need(POOL, "EnginePool._settings_manager", Kind.VALUE),
    # A forced text load replaces a vision engine, and is told by its class.
    Need(POOL, "VLMBatchedEngine", Kind.NAME),
    SIGNATURE,
    VALIDATE,
    *RELEASE,
    UNLOAD_PENDING,
    *TOLD_BY,
    *leases.NEEDS,
    *engines.NEEDS,
    *unlocked.NEEDS,
    *stalled.NEEDS,
    *SERVED,
    *ENTRY,
)

LEASE_NEEDS = (
    *NEEDS,
    Need("omlx.server", "app", Kind.VALUE),
)

#: Present where oMLX does this itself.
NATIVE = (
    Need(POOL, "EnginePool._acquire_loaded_engine", Kind.SYNC),
    Need(POOL, "EnginePool._unloading_models", Kind.VALUE),
)

LEASE_NATIVE = (
    Need("omlx.admission.leases", "leased_for_request", Kind.SYNC),
    Need("omlx.admission.request", "RequestMiddleware", Kind.CLASS),
    Need(POOL, "leased_for_request", Kind.NAME),
    Need("omlx.server", "RequestMiddleware", Kind.NAME),
)

#: Releases from 0.5.3 on give a lease back here; 0.5.0 in ``release_engine``.
RELEASE_TASK = "_release_engine_lease"


def checked_engine(
    pool: Any,
    state: PoolState,
    model_id: str,
    force_lm: bool,
    runtime_settings: object | None,
) -> Any:
    """The engine that stock ``get_engine`` would return at once, or None.

    The conditions are stock's own, plus what stock of 0.5.0 to 0.6.x lacks or
    ignores: a teardown in progress, a pending unload, an engine that is dead.

    Raises:
        ModelLoadingError: the engine is loaded but unusable, as stock says it.
    """
    engine = ready.ready_engine(
        pool, state.unloading, model_id, force_lm, runtime_settings, switches.vlm_engine
    )
    if engine is not None and not force_lm and runtime_settings is None:
        _remember(pool, state, model_id, pool._entries[model_id])
    return engine


def verified_engine(pool: Any, state: PoolState, model_id: str) -> Any:
    """:func:`checked_engine` for the model's own settings, from what it found last time.

    Stock copies all settings and builds their signature for every request; here
    nothing is computed while nothing of it has changed.
    """
    seen = state.verified.get(model_id)
    entry = pool._entries.get(model_id)
    if seen is None or entry is None:
        return None
    engine = entry.engine
    if (
        engine is None
        or engine is not seen.engine()
        or entry.is_loading
        or entry.pending_unload_reason
        or entry.runtime_settings_signature is not seen.signature
        or model_id in state.unloading
        or not lives(engine)
    ):
        return None
    manager = pool._settings_manager
    if manager is not seen.manager:
        return None
    if manager is not None:
        stored = manager._settings.get(model_id)
        if stored is not seen.settings or (stored is not None and vars(stored) != seen.values):
            return None
    return engine


def _remember(pool: Any, state: PoolState, model_id: str, entry: Any) -> None:
    """Keep what :func:`verified_engine` compares, where this oMLX keeps it as known."""
    manager = pool._settings_manager
    stored, values = None, None
    if manager is not None:
        by_model = getattr(manager, "_settings", None)
        if not isinstance(by_model, dict):
            return
        stored = by_model.get(model_id)
    try:
        engine = weakref.ref(entry.engine)
        if stored is not None:
            # Whether a change puts a new object in its place is this oMLX's own affair.
            values = copy.deepcopy(dict(vars(stored)))
    except TypeError:
        return
    state.verified[model_id] = Verified(
        engine, entry.runtime_settings_signature, manager, stored, values
    )


def is_vlm(engine: Any) -> bool:
    """Whether ``engine`` is a vision engine, which a forced text load replaces."""
    vlm = switches.vlm_engine
    return vlm is not None and isinstance(engine, vlm)


def release_name(module: Any) -> str:
    """The method that gives a lease back: its own task's body since 0.5.3."""
    return RELEASE_TASK if hasattr(module.EnginePool, RELEASE_TASK) else "release_engine"


async def get_engine(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Return a loaded engine at once; otherwise go the stock way."""
    state = state_of(pool)
    admission = state.admission
    model_id, force_lm, lease, runtime_settings = arguments(*args, **kwargs)
    engine = None
    if admission is None or model_id not in admission.gated:
        try:
            if not force_lm and runtime_settings is None:
                engine = verified_engine(pool, state, model_id)
            if engine is None:
                engine = checked_engine(pool, state, model_id, force_lm, runtime_settings)
            if engine is not None and lease and places.is_taken(pool, state, model_id):
                engine = None
        except Exception as error:  # noqa: BLE001 - stock decides what this call gets
            faults.note("resident path", error)
            engine = None
    if engine is not None:
        leases.hand_out(pool, state, model_id, lease, force_lm, runtime_settings)
    else:
        engine = leases.hand_out_again(pool, state, model_id, lease, force_lm, runtime_settings)
    if engine is not None:
        return engine
    dead.bury(pool, model_id)
    engine = await wrapped(*args, **kwargs)
    if state.admission is None:
        # Loaded by stock itself, the queue is off: no await lies between its hand-out
        # and here.
        leases.note(pool, state, engine, model_id, lease, force_lm, runtime_settings)
    return engine


def arguments(
    model_id: str,
    force_lm: bool = False,
    _lease: bool = False,
    runtime_settings: object | None = None,
) -> tuple[str, bool, bool, object | None]:
    """Bind the arguments of ``get_engine`` (the gate has checked its signature)."""
    return model_id, force_lm, _lease, runtime_settings


async def get_engine_past_teardown(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Keep stock from handing out an engine whose teardown has begun (B08), or a dead one.

    Stock looks at the engine only after it got the lock; an unload that takes
    no lock may have begun by then.
    """
    model_id, _force_lm, lease, _settings = arguments(*args, **kwargs)

    async def give_one_back(engine: Any) -> None:
        if lease:
            leases.give_back(pool, model_id, leases.reference(engine))

    return await ready.engine_past_teardown(
        pool,
        state_of(pool).unloading,
        model_id,
        lambda: wrapped(*args, **kwargs),
        give_one_back,
    )


async def release(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Give a lease back without the lock, also where oMLX wants the model unloaded.

    Stock's own release unloads it then, and the answer that has ended waits for the lock.
    """
    model_id = args[0] if args else kwargs["model_id"]
    leases.give_back(pool, model_id, holding.released_by_route(model_id))


async def unload(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Mark the model before the first await of its teardown; join one in progress.

    Nothing interrupts a teardown, and the mark stays until it has ended.
    """
    model_id = args[0] if args else kwargs["model_id"]
    state = state_of(pool)
    while (teardown := state.unloading.get(model_id)) is not None:
        await teardown.wait()
    entry = pool._entries.get(model_id)
    if entry is None or entry.engine is None:
        return await wrapped(*args, **kwargs)
    if entry.in_use > 0 and is_enforcer(pool) and lives(entry.engine):
        # Handed out since the enforcer found it idle: it looks for another one (F11).
        return None
    state.unloading[model_id] = asyncio.Event()
    return await to_its_end(
        _tear_down(wrapped, pool, model_id, entry, args, kwargs),
        f"admission-unload:{model_id}",
    )


def is_enforcer(pool: Any) -> bool:
    """Whether the memory enforcer runs now; it unloads only what it has found idle."""
    enforcer = getattr(pool, "_process_memory_enforcer", None)
    task = getattr(enforcer, "_task", None)
    return task is not None and task is asyncio.current_task()


async def _tear_down(
    wrapped: Any, pool: Any, model_id: str, entry: Any, args: Any, kwargs: Any
) -> Any:
    """Run stock's teardown; a cancel half-way would leave a dead engine, or its bytes."""
    engines.note_gone(entry.engine, True)
    stalled.keep_what_is_made(entry.engine)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        if entry.engine is not None:
            engines.note_gone(entry.engine, False)
        state = state_of(pool)
        if entry.engine is None:
            state.used.pop(model_id, None)
        leases.engine_gone(pool, model_id)
        state.unloading.pop(model_id).set()
        state.changed()


def apply_inner(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap what lies below the queue: teardown, release, and the check against both."""
    vlm = getattr(module, "VLMBatchedEngine", None)
    switches.vlm_engine = vlm if isinstance(vlm, type) else None
    ledger.wrap(module, "EnginePool._unload_engine", unload)
    switches.marks = True
    unlocked.apply(module, ledger)
    ledger.wrap(module, f"EnginePool.{release_name(module)}", release)
    ledger.wrap(module, "EnginePool.get_engine", get_engine_past_teardown)


def apply_outer(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap ``get_engine`` outermost: a resident model meets nothing else on its way."""
    ledger.wrap(module, "EnginePool.get_engine", get_engine, seldom=True)
