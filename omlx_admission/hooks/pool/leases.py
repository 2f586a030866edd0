"""The book of leases: what is handed out, to which caller, and what a release gives back.

Stock counts leases by model; a lease belongs to the engine it was taken on. An engine that
is torn down under its leases leaves them on the entry in stock: the next engine of the
model counts as in use by requests that have never seen it, until the last of their clients
has gone, and each of their releases lowers the count of that engine. So the count of an
engine ends with its teardown, and a release counts only where the engine that was handed
out is still the model's. A request knows what it was handed (`core.pool.holding`); callers
outside of requests are told apart by how many of them there are.

Stock leases some hand-outs and leaves others unprotected. Those are leased here, for as
long as their request runs; outside of requests and of the jobs that they begin nothing is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.pool.state import PoolState, state_of


def hand_out(
    pool: Any,
    state: PoolState,
    model: str,
    lease: bool,
    force_lm: bool,
    settings: object | None,
) -> None:
    """Book the hand-out of a ready engine, in the step that found it ready."""
    entry = pool._entries[model]
    entry.last_access = time.time()
    state.used[model] = time.monotonic()
    if state.admission is not None:
        state.admission.policy.first_use(model)
    if lease:
        entry.in_use += 1
    note(pool, state, entry.engine, model, lease, force_lm, settings)


def note(
    pool: Any,
    state: PoolState,
    engine: Any,
    model: str,
    lease: bool,
    force_lm: bool,
    settings: object | None,
    *,
    leased: bool = False,
) -> None:
    """Remember the caller that was handed ``engine``.

    A caller that took no ``lease`` is given one, unless one was taken for it (``leased``).
    """
    keeps = not lease and switches.keeping and requests.current.get() is not None
    spare = None
    if keeps or (leased and not lease):
        entry = pool._entries[model]
        if not leased:
            entry.in_use += 1
        spare = partial(give_back, pool, model, reference(entry.engine))
    noted = holding.note(engine, model, lease, force_lm, settings, spare if keeps else None)
    if lease and not noted:
        state.unnamed[model] = state.unnamed.get(model, 0) + 1
    if spare is not None and not keeps:
        spare()


def hand_out_again(
    pool: Any,
    state: PoolState,
    model: str,
    lease: bool,
    force_lm: bool,
    settings: object | None,
) -> Any:
    """Hand out the engine that this very request holds and asks for again, or None."""
    engine = holding.held_engine(
        pool._entries.get(model), model, force_lm, settings, model in state.unloading
    )
    if engine is not None:
        hand_out(pool, state, model, lease, force_lm, settings)
    return engine


def reference(engine: Any) -> Callable[[], Any]:
    """The engine that a lease is for, without keeping its weights in memory."""
    try:
        return weakref.ref(engine)
    except TypeError:
        return lambda: engine


def give_back(pool: Any, model: str, held: Callable[[], Any] | None) -> None:
    """Give one lease back without waiting; tell what waits for it.

    ``held`` is what it was taken on, None where that is not known.
    """
    lower(pool, model, held)
    state_of(pool).released(pool, model)


def lower(pool: Any, model: str, held: Callable[[], Any] | None) -> None:
    """Lower the count for one lease, if it still counts; see :func:`counts`."""
    if counts(pool, model, held):
        pool._entries[model].in_use -= 1


def counts(pool: Any, model: str, held: Callable[[], Any] | None) -> bool:
    """Whether a lease that is given back now is still in stock's count.

    Asked once for each release: it notes the release of a caller that is not known.
    """
    entry, state = pool._entries.get(model), state_of(pool)
    if held is not None:
        if entry is None or entry.engine is None or held() is not entry.engine:
            return False
    elif state.lapsed.get(model, 0):
        state.lapsed[model] -= 1
        return False
    elif state.unnamed.get(model, 0):
        state.unnamed[model] -= 1
    return entry is not None and entry.in_use > 0


def lapse(entry: Any, held: holding.Holding) -> None:
    """Count what one request holds no more; it will be given back all the same."""
    while held.kept:
        held.kept.pop().let_go()
    entry.in_use = max(0, entry.in_use - held.leased)
    held.lapsed += held.leased
    held.leased = 0


def engine_gone(pool: Any, model: str) -> None:
    """Begin a new count where the engine of ``model`` has been torn down."""
    entry, state = pool._entries.get(model), state_of(pool)
    if entry is not None and entry.engine is not None:
        return
    if entry is not None:
        entry.in_use = 0
    if unnamed := state.unnamed.pop(model, 0):
        state.lapsed[model] = state.lapsed.get(model, 0) + unnamed


#: Methods of the pool whose caller says by them that a model may go. Stock does
#: not lease the caller's own engine, so to the caller it is not busy.
_UNLOADS = (
    "_unload_engine",
    "prepare_cluster_reload",
    "request_unload",
    "unload_if_idle_unpinned",
)


#: They are wrapped by a coroutine function, on the releases that have them.
NEEDS = tuple(
    Need("omlx.engine_pool", f"EnginePool.{name}", Kind.ASYNC, ("model_id",), optional=True)
    for name in _UNLOADS
    if name != "_unload_engine"
)


async def unload_by_holder(wrapped: Any, _pool: Any, args: Any, kwargs: Any) -> Any:
    """Let go of what is kept for the very caller that wants the model unloaded."""
    try:
        holding.let_go(args[0] if args else kwargs["model_id"])
    except Exception as error:  # noqa: BLE001 - the unload itself is stock's
        faults.note("letting go of a model", error)
    return await wrapped(*args, **kwargs)


def apply(module: Any, ledger: Ledger, wanted: Wanted) -> None:
    """Switch :func:`keep` on; it acts within the resident path and the queue.

    Hand-outs are kept also where oMLX keeps its own (the feature is native).
    """
    if not wanted.settings.leases:
        return
    for name in _UNLOADS:
        method = vars(module.EnginePool).get(name)
        # More than one feature keeps what it hands out.
        if (
            method is not None
            and getattr(method, "_self_wrapper", None) is not unload_by_holder
        ):
            ledger.wrap(module, f"EnginePool.{name}", unload_by_holder)
    switches.keeping = True
