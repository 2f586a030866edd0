"""Whether a hand-out without a lease is kept for the request that got it.

What a request holds is :mod:`omlx_admission.core.pool.holding`; the resident path and the
queue note it there. Here is the switch, and an unload by the holder itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.patching.switches import switches


def keeping() -> bool:
    """Whether an unleased hand-out would be kept for the current caller."""
    return switches.keeping and requests.current.get() is not None


def keep(model_id: str, give_back: Callable[[], None]) -> None:
    """:func:`holding.keep` where leases are kept; else the lease is given back."""
    if switches.keeping:
        holding.keep(model_id, give_back)
    else:
        give_back()


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
