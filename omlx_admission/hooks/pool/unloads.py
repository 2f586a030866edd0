"""Unloads by hand wait for what runs, and all callers of one share its teardown.

Stock tears an engine down in the middle of its answers when an HTTP request asks
for it: the public unload route, a change of settings, a benchmark (B08, B52). Here
the model first takes no new requests and comes to rest, within the wait budget.

What ends without an unload, and what does not:

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

The model is marked in the step that decides, whether it is idle or not, and nothing
here waits for the pool's lock, which a load of another model holds.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.core.queue import Admission
from omlx_admission.core.quiesce import Ended, Quiesce
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.pool import engines, resident, stalled, unload_modes
from omlx_admission.hooks.pool.state import (
    UNLOAD_REASON,
    PoolState,
    state_of,
    unloading_models,
)
from omlx_admission.hooks.pool.unload_modes import Mode
from omlx_admission.hooks.server import requests as requests_hook

logger = logging.getLogger("omlx.admission")

POOL = resident.POOL
ADMIN = "omlx.admin.routes"

NEEDS = (
    # The caller is identified by its HTTP request.
    *requests_hook.NEEDS,
    resident.UNLOAD,
    resident.ENTRIES,
    resident.LOCK,
    resident.ENFORCER,
    Need(POOL, "EnginePool.get_entry", Kind.SYNC, ("model_id",)),
    Need(
        POOL,
        "EnginePool.get_loaded_model_ids",
        Kind.SYNC,
        (),
        returns=("list[str]", "set[str]", "tuple[str, ...]"),
    ),
    Need(
        POOL,
        "EnginePool.request_unload",
        Kind.ASYNC,
        ("model_id",),
        returns=("bool",),
        optional=True,
    ),
    Need(ADMIN, "_apply_model_dirs_runtime", Kind.ASYNC),
    Need(ADMIN, "_get_engine_pool", Kind.VALUE),
    *engines.ABORT,
    *resident.ENTRY,
)

#: Seconds that ended requests get to give their leases back: it takes them no time, but
#: a client that does not read keeps its own for as long as it likes.
_LEAVE_S = 1.0

#: Seconds that the engine gets to put them away: they go at the end of the step that is
#: under way. Then it is torn down, as stock does at once.
ABORT_GRACE_S = 10.0

#: Set while the model folders change: every unload within has to happen.
must_happen_now: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "omlx_admission_unload_must_happen_now", default=False
)

_deadlines: weakref.WeakKeyDictionary[requests.Request, float] = weakref.WeakKeyDictionary()

#: Set while one of us tears down: what stock calls within has waited already.
_waited: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "omlx_admission_unload_waited", default=False
)


@dataclass(slots=True)
class PlannedUnload:
    """One unload that was asked for by hand."""

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
    plan = _plan_logged(pool, args[0] if args else kwargs["model_id"])
    if plan is None:
        return await wrapped(*args, **kwargs)
    return await run_unload(plan, lambda: wrapped(*args, **kwargs))


async def request_unload(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """The admin's unload since 0.6.2: as every other one by hand, without the lock.

    Stock looks at the model, and ends what runs, when it has the pool's lock; until then
    another model may load for minutes, and the model is handed out (F2, C22).
    """
    model = args[0] if args else kwargs["model_id"]
    plan = _plan_logged(pool, model)
    if plan is None:
        return await wrapped(*args, **kwargs)
    await run_unload(plan, lambda: pool._unload_engine(model))
    return True


def _plan_logged(pool: Any, model: str) -> PlannedUnload | None:
    """:func:`plan_unload`; None too where that fails.

    Raises:
        Exception: our refusal (409) of an unload that was wanted only if the model is idle.
    """
    try:
        return plan_unload(pool, model)
    except Exception as error:
        if unload_modes.is_refusal(error):
            raise
        faults.note("the unload by hand", error)
        return None


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
    try:
        if unload_modes.mode_of(request) is Mode.IF_IDLE:
            model = args[0] if args else kwargs["model_id"]
            unload_modes.refuse_unless_idle(pool, request, model)
    except Exception as error:
        if unload_modes.is_refusal(error):
            raise
        faults.note("the mode of an unload", error)
    return entry


def plan_unload(pool: Any, model: str) -> PlannedUnload | None:
    """What has to be done before stock may unload ``model``; None where it may at once.

    Raises:
        Exception: our refusal (409): the model is wanted unloaded only if it is idle. It
            is marked in the step that finds it so.
    """
    state = state_of(pool)
    asked_in, admission = requests.current.get(), state.admission
    if asked_in is None or admission is None or admission.broken or admission.closing:
        return None
    if _waited.get():
        return None
    holding.let_go(model)  # a benchmark that unloads its model does not wait for itself
    port, entry = admission.port, pool._entries.get(model)
    if entry is None or entry.engine is None:
        return None
    # A benchmark outlives the request that began it; no client can leave from it.
    in_request = not asked_in.ended and asyncio.current_task() is asked_in.task
    request = asked_in if in_request else None
    mode = Mode.DRAIN
    if request is not None and unload_modes.is_unload(request):
        # Idle or not: the next request for it waits for the next load.
        mode = unload_modes.mode_of(request)
        if mode is Mode.IF_IDLE:
            unload_modes.refuse_unless_idle(pool, request, model)
    elif (
        model in unloading_models(pool) or not port.in_use(model) or resident.is_enforcer(pool)
    ):
        # The holder of the lock has asked the same a step ago: a drain never waits in it.
        return None
    return PlannedUnload(
        pool,
        admission,
        model,
        entry.engine,
        request,
        _deadline(request, admission),
        now=mode is Mode.NOW,
        must_happen=must_happen_now.get() or asked_in.method == "DELETE",
    )


def _deadline(request: requests.Request | None, admission: Admission) -> float:
    """When this unload gives up: one budget for all that one request unloads."""
    deadline = asyncio.get_running_loop().time() + admission.budget(request)
    return deadline if request is None else _deadlines.setdefault(request, deadline)


async def run_unload(plan: PlannedUnload, teardown: Callable[[], Awaitable[Any]]) -> Any:
    quiesce = _join(plan)
    quiesce.waiters += 1
    try:
        try:
            await _wait_until_idle(plan, quiesce)
        except Exception as error:
            if unload_modes.is_refusal(error):
                raise
            faults.note("the unload by hand", error)
        if _engine_replaced(plan):
            return None
        quiesce.tearing_down = True
        token = _waited.set(True)
        try:
            return await teardown()
        finally:
            _waited.reset(token)
            quiesce.tearing_down = False
    finally:
        quiesce.waiters -= 1
        if quiesce.waiters == 0:
            _withdraw(plan, quiesce)


async def _wait_until_idle(plan: PlannedUnload, quiesce: Quiesce) -> None:
    """Return when the teardown may begin, in the very step.

    Raises:
        Exception: our refusal: the budget has ended, or the client has left.
    """

    def may_go() -> bool:
        return _may_go(plan, quiesce)

    if may_go():
        return
    if plan.now:
        await _cut(plan, quiesce, may_go)
        return
    # A deletion that stops half-way is worse than one whose client has left.
    watched = None if plan.must_happen else plan.request
    ended = await quiesce.wait(may_go, plan.deadline, watched)
    if ended is Ended.EXPIRED and plan.must_happen:
        await _cut(plan, quiesce, may_go)
    elif ended is Ended.LEFT:
        raise unload_modes.client_left()
    elif ended is Ended.EXPIRED:
        raise unload_modes.expired(plan.pool, plan.model, plan.request)


async def _cut(plan: PlannedUnload, quiesce: Quiesce, may_go: Callable[[], bool]) -> None:
    """End what runs, and return when the engine has done with it.

    A client that does not read keeps its lease, and nothing of the engine runs for it.
    """
    loop = asyncio.get_running_loop()

    def all_left() -> bool:
        unload_modes.end_holders(plan.engine, plan.model, plan.request)
        return may_go()

    await quiesce.wait(all_left, loop.time() + _LEAVE_S, None)
    await unload_modes.abort(plan.engine, plan.model)
    await quiesce.wait(may_go, loop.time() + _LEAVE_S, None)
    await quiesce.wait(lambda: not _runs(plan, quiesce), loop.time() + ABORT_GRACE_S, None)


def _runs(plan: PlannedUnload, quiesce: Quiesce) -> bool:
    """Whether the engine works, for any caller, or is being torn down."""
    if quiesce.tearing_down or plan.model in unloading_models(plan.pool):
        return True
    if _engine_replaced(plan):
        return False
    return stalled.works(plan.pool, plan.pool._entries[plan.model])


def _engine_replaced(plan: PlannedUnload) -> bool:
    entry = plan.pool._entries.get(plan.model)
    return entry is None or entry.engine is not plan.engine


def _may_go(plan: PlannedUnload, quiesce: Quiesce) -> bool:
    """Whether the wait is over: the engine has gone, or nothing keeps it from going."""
    if _engine_replaced(plan):
        return plan.model not in unloading_models(plan.pool)
    port = plan.admission.port
    return (
        not quiesce.tearing_down
        and plan.model not in unloading_models(plan.pool)
        and port.is_quiescent(plan.model)
    )


def _join(plan: PlannedUnload) -> Quiesce:
    """Close the model's gate, or join the unload that has closed it already."""
    quiesce = plan.state.leaving.get(plan.model)
    if quiesce is not None and quiesce.engine is plan.engine:
        return quiesce
    quiesce = plan.state.leaving[plan.model] = Quiesce(plan.engine)
    entry = plan.pool._entries[plan.model]
    if not entry.pending_unload_reason or _is_ours_to_set(plan):
        # Not by the pool's own method, which leaves pinned models alone: the
        # operator may unload those, and in stock that holds whatever they run.
        entry.pending_unload_reason = f"{UNLOAD_REASON} by hand"
    if _may_go(plan, quiesce):
        return quiesce  # it is idle: its teardown follows in this very step
    quiesce.drains = True
    logger.info("admission: '%s' drains, to be unloaded by hand", plan.model)
    plan.admission.events.drain_began((plan.model,), "an unload by hand")
    plan.admission.changed()
    return quiesce


def _is_ours_to_set(plan: PlannedUnload) -> bool:
    return plan.model in plan.admission.policy.marked


def _withdraw(plan: PlannedUnload, quiesce: Quiesce) -> None:
    """No caller is left. A model that is still there serves on."""
    state, admission = plan.state, plan.admission
    if state.leaving.get(plan.model) is quiesce:
        del state.leaving[plan.model]
    entry = plan.pool._entries.get(plan.model)
    reason = entry.pending_unload_reason if entry is not None else None
    if (
        _engine_replaced(plan)
        or not isinstance(reason, str)
        or not reason.startswith(UNLOAD_REASON)
    ):
        return
    entry.pending_unload_reason = None
    if quiesce.drains:
        logger.info("admission: the unload of '%s' is withdrawn", plan.model)
    swap = admission.policy.swap
    if swap is not None and plan.model in admission.policy.marked:
        # It drained for a swap as well, and does so still.
        admission.port.mark(plan.model, swap.target)
    elif quiesce.drains:
        admission.events.drain_withdrawn((plan.model,))
    admission.changed()


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the pool, outside of the wrappers that mark a teardown and join it."""
    ledger.wrap(module, "EnginePool._unload_engine", unload)
    ledger.wrap(module, "EnginePool.get_entry", get_entry)
    if hasattr(module.EnginePool, "request_unload"):
        ledger.wrap(module, "EnginePool.request_unload", request_unload)
