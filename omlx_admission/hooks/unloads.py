"""Unloads by hand wait for what runs, and all who ask for one share its teardown.

Stock tears an engine down in the middle of its answers when an HTTP request asks
for it: the public unload route, a change of settings, a benchmark (B08, B52). Here
the model first takes no new requests and comes to rest, within the wait budget.

Who ends without an unload, and who does not:

* The unload routes are refused when the budget ends; nothing was cut, the model
  serves on. ``?mode=now`` ends what runs with an error event first.
* A change of settings and a benchmark go on when their unload fails, stock logs it:
  so their budget ends the same way. Later requests want the new settings and
  replace the engine when it is idle.
* A deleted model, and a change of the model folders, must not leave an engine
  behind that no entry knows. There what still runs at the end of the budget is
  ended with an error event.
* Whatever holds the pool's lock has found the model idle in the step before;
  the memory enforcer and the shutdown have their own reasons. They run stock.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from omlx_admission.hooks import faults, holding, resident, unload_modes
from omlx_admission.hooks.gate import Kind, Need
from omlx_admission.hooks.ledger import Ledger
from omlx_admission.hooks.pool_port import OmlxPool
from omlx_admission.hooks.pool_state import UNLOAD_REASON, PoolState, state_of
from omlx_admission.hooks.unload_modes import Mode
from omlx_admission.runtime import request as requests
from omlx_admission.runtime.admission import Admission
from omlx_admission.runtime.leave import Ended, Leave

logger = logging.getLogger("omlx.admission")

POOL = resident.POOL
ADMIN = "omlx.admin.routes"

NEEDS = (
    resident.UNLOAD,
    Need(POOL, "EnginePool.get_entry", Kind.SYNC, ("model_id",)),
    Need(POOL, "EnginePool._entries", Kind.VALUE),
    Need(POOL, "EnginePool.get_loaded_model_ids", Kind.SYNC),
    Need(ADMIN, "_apply_model_dirs_runtime", Kind.ASYNC),
    Need(ADMIN, "_get_engine_pool", Kind.VALUE),
    *resident.ENTRY,
)

#: Seconds that ended requests get to leave their engine: they go at the end of the
#: step that is under way. Then it is torn down, as stock does at once.
_CUT_S = 10.0

#: Set while the model folders change: every unload within has to happen.
_must_happen: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "omlx_admission_unload_must_happen", default=False
)

#: Set while one of us tears down: what stock calls within has waited already.
_waited: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "omlx_admission_unload_waited", default=False
)


@dataclass(slots=True)
class _Errand:
    """One unload that was asked for by hand, of a model that is in use."""

    pool: Any
    admission: Admission
    model: str
    engine: Any
    request: requests.Request | None
    deadline: float
    now: bool
    must_happen: bool

    @property
    def state(self) -> PoolState:
        return state_of(self.pool)


async def unload(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Let a model that is in use come to rest before stock tears it down."""
    model = args[0] if args else kwargs["model_id"]
    try:
        errand = _errand(pool, model)
    except Exception as error:  # noqa: BLE001 - stock unloads whatever we do
        faults.note("the unload by hand", error)
        errand = None
    if errand is None:
        return await wrapped(*args, **kwargs)
    return await _carry_out(errand, lambda: wrapped(*args, **kwargs))


async def request_unload(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """The admin's unload since 0.6.2, which ends what runs: only where that is wanted."""
    model = args[0] if args else kwargs["model_id"]
    try:
        errand = _errand(pool, model)
    except Exception as error:  # noqa: BLE001 - as above
        faults.note("the unload by hand", error)
        errand = None
    if errand is None or errand.now:
        return await wrapped(*args, **kwargs)
    unloaded = await _carry_out(errand, lambda: wrapped(*args, **kwargs))
    return True if unloaded is None else unloaded


def get_entry(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Both unload routes ask for the entry after they have checked the key, then unload.

    Raises:
        Exception: our refusal of a mode that does not exist (400), or of an unload that
            was wanted only if the model is idle (409).
    """
    entry = wrapped(*args, **kwargs)
    request = requests.current.get()
    if request is None or entry is None or not unload_modes.is_unload(request):
        return entry
    mode = unload_modes.mode_of(request)
    if mode is Mode.IF_IDLE:
        unload_modes.refuse_unless_idle(pool, request, args[0] if args else kwargs["model_id"])
    return entry


def _errand(pool: Any, model: str) -> _Errand | None:
    """What has to be done before stock may unload ``model``; None where it may at once."""
    state = state_of(pool)
    asked_in, admission = requests.current.get(), state.admission
    if asked_in is None or admission is None or admission.broken or admission.closing:
        return None
    if _waited.get():
        return None
    holding.let_go(model)  # a benchmark that unloads its model does not wait for itself
    port, entry = admission.port, pool._entries.get(model)
    assert isinstance(port, OmlxPool)
    if entry is None or entry.engine is None or model in state.unloading:
        return None
    # Whoever holds the lock has asked the same a step ago: a drain never waits in it.
    if not port.in_use(model) or _is_enforcer(pool):
        return None
    # A benchmark outlives the request that began it, and nobody leaves from it.
    in_request = not asked_in.ended and asyncio.current_task() is asked_in.task
    request = asked_in if in_request else None
    mode = unload_modes.mode_of(request) if request is not None else Mode.DRAIN
    return _Errand(
        pool,
        admission,
        model,
        entry.engine,
        request,
        asyncio.get_running_loop().time() + admission.budget(request),
        now=mode is Mode.NOW,
        must_happen=_must_happen.get() or asked_in.method == "DELETE",
    )


def _is_enforcer(pool: Any) -> bool:
    task = getattr(pool._process_memory_enforcer, "_task", None)
    return task is not None and task is asyncio.current_task()


async def _carry_out(errand: _Errand, teardown: Callable[[], Awaitable[Any]]) -> Any:
    leave = _join(errand)
    leave.askers += 1
    loop = asyncio.get_running_loop()
    try:
        if errand.now:
            await _end_requests(errand)
            ended = await leave.wait(
                lambda: _may_go(errand, leave), loop.time() + _CUT_S, errand.request
            )
        else:
            # A deletion that stops half-way is worse than one that nobody waits for.
            watched = None if errand.must_happen else errand.request
            ended = await leave.wait(lambda: _may_go(errand, leave), errand.deadline, watched)
        if ended is Ended.EXPIRED and errand.must_happen:
            await _end_requests(errand)
            await leave.wait(lambda: _may_go(errand, leave), loop.time() + _CUT_S, None)
        elif ended is Ended.LEFT and not errand.now:
            raise unload_modes.client_left(errand.admission)
        elif ended is Ended.EXPIRED and not errand.now:
            raise unload_modes.expired(errand.pool, errand.model, errand.request)
        if _gone(errand):
            return None
        leave.tearing_down = True
        token = _waited.set(True)
        try:
            return await teardown()
        finally:
            _waited.reset(token)
            leave.tearing_down = False
    finally:
        leave.askers -= 1
        if leave.askers == 0:
            _withdraw(errand, leave)


def _gone(errand: _Errand) -> bool:
    entry = errand.pool._entries.get(errand.model)
    return entry is None or entry.engine is not errand.engine


def _may_go(errand: _Errand, leave: Leave) -> bool:
    """Whether the wait is over: the engine has gone, or nothing keeps it from going."""
    if _gone(errand):
        return errand.model not in errand.state.unloading
    port = errand.admission.port
    assert isinstance(port, OmlxPool)
    return (
        not leave.tearing_down
        and errand.model not in errand.state.unloading
        and port.at_rest(errand.model)
    )


def _join(errand: _Errand) -> Leave:
    """Close the model's gate, or join who has closed it already."""
    leave = errand.state.leaving.get(errand.model)
    if leave is not None and leave.engine is errand.engine:
        return leave
    leave = errand.state.leaving[errand.model] = Leave(errand.engine)
    entry = errand.pool._entries[errand.model]
    if not entry.pending_unload_reason or _is_ours_to_set(errand):
        # Not by the pool's own method, which leaves pinned models alone: the
        # operator may unload those, and in stock that holds whatever they run.
        entry.pending_unload_reason = f"{UNLOAD_REASON} by hand"
    logger.info("admission: '%s' drains, to be unloaded by hand", errand.model)
    errand.admission.observer.drain_began((errand.model,), "an unload by hand")
    errand.admission.changed()
    return leave


def _is_ours_to_set(errand: _Errand) -> bool:
    return errand.model in errand.admission.policy.marked


def _withdraw(errand: _Errand, leave: Leave) -> None:
    """Nobody asks any more. A model that is still there serves on."""
    state, admission = errand.state, errand.admission
    if state.leaving.get(errand.model) is leave:
        del state.leaving[errand.model]
    entry = errand.pool._entries.get(errand.model)
    reason = entry.pending_unload_reason if entry is not None else None
    if _gone(errand) or not isinstance(reason, str) or not reason.startswith(UNLOAD_REASON):
        return
    entry.pending_unload_reason = None
    logger.info("admission: the unload of '%s' is withdrawn", errand.model)
    swap = admission.policy.swap
    if swap is not None and errand.model in admission.policy.marked:
        # It drained for a swap as well, and does so still.
        admission.port.mark(errand.model, swap.target)
    else:
        admission.observer.drain_withdrawn((errand.model,))
    admission.changed()


async def _end_requests(errand: _Errand) -> None:
    """End what runs with an error event: stock leaves streams waiting for ever."""
    abort = getattr(errand.engine, "abort_all_requests", None)
    if not callable(abort):
        return
    logger.info("admission: requests of '%s' are ended for its unload", errand.model)
    arguments: dict[str, str] = {}
    if "reason" in inspect.signature(abort).parameters:
        arguments = {
            "reason": f"Model '{errand.model}' was unloaded by hand",
            "error_code": "model_unloading",
        }
    try:
        await abort(**arguments)
    except Exception:
        logger.warning("admission: ending requests of '%s' failed", errand.model, exc_info=True)


async def change_model_dirs(wrapped: Any, _module: Any, args: Any, kwargs: Any) -> Any:
    """Unload everything, and load nothing until stock has forgotten its old entries.

    Stock unloads one model after another and then drops all entries: an engine that
    was loaded in between would hold its memory for good.
    """
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
    token = _must_happen.set(True)
    try:
        await _clear(pool, state)
        return await wrapped(*args, **kwargs)
    finally:
        _must_happen.reset(token)
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
    errands = [e for m in pool.get_loaded_model_ids() if (e := _errand(pool, m)) is not None]

    def teardown(model: str) -> Callable[[], Awaitable[Any]]:
        return lambda: pool._unload_engine(model)

    results = await asyncio.gather(
        *(_carry_out(e, teardown(e.model)) for e in errands), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _admin_pool() -> Any:
    import omlx.admin.routes as routes

    return routes._get_engine_pool() if routes._get_engine_pool else None


def apply(module: Any, ledger: Ledger) -> None:
    """Wrap the pool, outside of the wrappers that mark a teardown and join it."""
    ledger.wrap(module, "EnginePool._unload_engine", unload)
    ledger.wrap(module, "EnginePool.get_entry", get_entry)
    if hasattr(module.EnginePool, "request_unload"):
        ledger.wrap(module, "EnginePool.request_unload", request_unload)


def apply_admin(module: Any, ledger: Ledger) -> None:
    """Wrap the change of model folders."""
    ledger.wrap(module, "_apply_model_dirs_runtime", change_model_dirs)
