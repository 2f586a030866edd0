"""Routes on oMLX's own application, behind its own key check; and what the pool does.

Two thin wrappers tell the observer of every load and unload, whatever asked for
it: they are innermost, so that they time oMLX's work and nothing of ours.
"""

from __future__ import annotations

import time
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core.policy.estimates import Estimates
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.hooks.pool import resident
from omlx_admission.hooks.pool.port import VIEW_NEEDS, OmlxPool
from omlx_admission.hooks.pool.state import state_of
from omlx_admission.hooks.server import surface_sections
from omlx_admission.observation import observe
from omlx_admission.observation.pool_snapshot import CacheBudget, Facts, Registered

POOL = resident.POOL
SERVER = "omlx.server"

BUDGET = "omlx.cache.paged_ssd_cache"

NEEDS = (
    resident.UNLOAD,
    *read_if_there(POOL, "EnginePool", "_scheduler_config"),
    *read_if_there(
        "omlx.scheduler", "SchedulerConfig", "hot_cache_budget", "hot_cache_max_size"
    ),
    *read_if_there(BUDGET, "SharedHotCacheBudget", "max_bytes", "_total_bytes"),
    Need(POOL, "EnginePool._load_engine", Kind.ASYNC, ("model_id",), returns=("None",)),
    resident.CLASS,
    resident.ENTRIES,
    *VIEW_NEEDS,
    *resident.ENTRY,
    Need(SERVER, "app", Kind.VALUE),
    Need(SERVER, "security", Kind.VALUE),
    Need(SERVER, "_server_state", Kind.VALUE),
    Need(SERVER, "ServerState.engine_pool", Kind.VALUE),
    Need(SERVER, "init_server", Kind.SYNC),
    Need(SERVER, "verify_api_key", Kind.ASYNC, ("request", "credentials"), exact=True),
)

_guess = Estimates()


async def load(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Time a load. It is resident if the entry has its engine, whatever was returned."""
    model = args[0] if args else kwargs["model_id"]
    observe.observer.load_began(model, _guess.swap(model, _size(pool, model)))
    try:
        return await wrapped(*args, **kwargs)
    finally:
        entry = pool._entries.get(model)
        observe.observer.load_ended(model, entry is not None and entry.engine is not None)


async def unload(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Time a teardown."""
    model = args[0] if args else kwargs["model_id"]
    entry = pool._entries.get(model)
    if entry is None or entry.engine is None:
        return await wrapped(*args, **kwargs)
    observe.observer.unload_began(model, _unused(entry))
    try:
        return await wrapped(*args, **kwargs)
    finally:
        entry = pool._entries.get(model)
        observe.observer.unload_ended(model, entry is not None and entry.engine is not None)


def _size(pool: Any, model: str) -> int:
    return int(getattr(pool._entries.get(model), "estimated_size", 0) or 0)


def _unused(entry: Any) -> float:
    last = entry.last_access
    return time.time() - last if isinstance(last, float) and last > 0 else 0.0


# -- what is shown ------------------------------------------------------------


def facts(module: Any) -> Facts:
    """The pool of the server ``module`` as it is now; takes no lock."""
    pool = module._server_state.engine_pool
    if pool is None:
        return Facts(omlx=_version(), features=features())
    admission = state_of(pool).admission
    if admission is not None:
        view = admission.port.view(admission.policy.targets, admission.config.max_models)
    else:
        view = _port(pool).view((), 0)
    marked = frozenset() if admission is None else admission.policy.marked
    return Facts(
        view=view,
        registered=[
            _registered(m, e, marked, m in state_of(pool).unloading)
            for m, e in list(pool._entries.items())
        ],
        admission=admission,
        cache=_cache(pool),
        omlx=_version(),
        features=features(),
    )


def _port(pool: Any) -> OmlxPool:
    import omlx.engine_pool

    return OmlxPool(pool, omlx.engine_pool, pool.get_engine)


def _registered(model: str, entry: Any, marked: frozenset[str], unloading: bool) -> Registered:
    last = entry.last_access
    return Registered(
        model=model,
        size=int(entry.estimated_size),
        pinned=bool(entry.is_pinned),
        draining=not unloading and (model in marked or bool(entry.pending_unload_reason)),
        last_used=last if isinstance(last, float) and last > 0 else None,
    )


def _cache(pool: Any) -> CacheBudget | None:
    """The hot cache budget, and whether every loaded engine really counts against it."""
    config = getattr(pool, "_scheduler_config", None)
    budget = getattr(config, "hot_cache_budget", None)
    limit = getattr(budget, "max_bytes", None) or getattr(config, "hot_cache_max_size", 0)
    if not isinstance(limit, int) or limit <= 0:
        return None
    budgets = [
        getattr(getattr(scheduler, "config", None), "hot_cache_budget", None)
        for entry in list(pool._entries.values())
        if (scheduler := _scheduler(entry.engine)) is not None
    ]
    # Not the property: it takes a lock that is held over evictions.
    used = getattr(budget, "_total_bytes", None)
    return CacheBudget(
        limit=limit,
        used=used if isinstance(used, int) else None,
        engines=len(budgets),
        shared=sum(b is budget and b is not None for b in budgets),
    )


def _scheduler(engine: Any) -> Any:
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    return getattr(core, "scheduler", None)


def _version() -> str | None:
    import omlx._version

    return str(omlx._version.__version__)


def features() -> list[dict[str, Any]]:
    """The verdicts on this oMLX. An error's own text may name a path: it stays in the log."""
    from omlx_admission.hooks import install

    report = install.current()
    if report is None:
        return []
    return [
        {
            "name": v.feature.name,
            "state": v.state.value,
            "variable": v.feature.variable,
            "reasons": ["see the log"] if v.state is install.State.FAILED else list(v.reasons),
            "hooks": list(v.wrapped),
        }
        for v in report.verdicts
    ]


# -- applying -----------------------------------------------------------------


def init_server(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """A server starts in this process: from now on a thread looks whether it is stuck."""
    result = wrapped(*args, **kwargs)
    observe.observer.start_watch()
    return result


def apply_pool(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap what loads and unloads, innermost."""
    ledger.wrap(module, "EnginePool._load_engine", load)
    ledger.wrap(module, "EnginePool._unload_engine", unload)


def apply_server(module: Any, ledger: Ledger, wanted: Wanted) -> None:
    """Add the routes and begin to watch.

    A fault in here costs the routes, not the other features: nothing depends on them.
    """
    settings = wanted.settings
    observe.observer.stuck_s = settings.stuck_s
    observe.observer.budget_s = settings.max_wait_s or 300.0
    ledger.wrap(module, "init_server", init_server)
    try:
        _add_routes(module, ledger)
        surface_sections.register(observe.observer)
    except Exception as error:  # noqa: BLE001
        faults.note("adding the routes of /admission", error)


def _add_routes(module: Any, ledger: Ledger) -> None:
    # Here and not above: the surfaces stand on the hooks, and this is the one place
    # where a hook needs one.
    from omlx_admission.surfaces import routes

    async def check(request: Any) -> None:
        await module.verify_api_key(request, await module.security(request))

    added = routes.make(check, lambda: facts(module), observe.observer)
    known = module.app.router.routes
    # First, so that no catch-all of oMLX's answers instead; they match nothing else.
    known[:0] = added

    def remove() -> None:
        known[:] = [route for route in known if route not in added]

    paths = ", ".join(route.path for route in added)
    ledger.changed(f"{SERVER}:app.router.routes", paths, remove)


#: They go first, innermost of all.
PARTS = (Part(POOL, apply_pool), Part(SERVER, apply_server))
