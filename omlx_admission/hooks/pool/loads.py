"""Loads by hand: both load routes look at the entry first, and answer by what they see.

An engine that is there is "already loaded" to them, also while it drains or is torn down
for another model; a load in progress is a 409 to the admin's. What they are shown here is
a model that is not loaded wherever it does not serve, so that they ask for it, as every
request does: in turn, within the budget, joined to a load that goes on (C6, C24).
"""

from __future__ import annotations

import copy
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.pool import resident
from omlx_admission.hooks.pool.state import state_of, unloading_models

NEEDS = (
    Need(resident.POOL, "EnginePool.get_entry", Kind.SYNC, ("model_id",)),
    *resident.ENTRY,
)


def get_entry(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Show the load routes what they may answer by."""
    entry = wrapped(*args, **kwargs)
    request = requests.current.get()
    if request is None or entry is None or not request.explicit_load:
        return entry
    try:
        return _as_it_serves(pool, args[0] if args else kwargs["model_id"], entry)
    except Exception as error:  # noqa: BLE001 - then the route answers as it always did
        faults.note("a load by hand", error)
        return entry


def _as_it_serves(pool: Any, model: str, entry: Any) -> Any:
    admission = state_of(pool).admission
    if admission is None or admission.broken:
        return entry
    if entry.engine is None and not entry.is_loading:
        return entry
    if not (
        entry.is_loading
        or entry.pending_unload_reason
        or model in admission.gated
        or model in unloading_models(pool)
    ):
        admission.loaded_by_hand(model)
        return entry
    shown = copy.copy(entry)
    shown.engine, shown.is_loading = None, False
    return shown


def apply(module: Any, ledger: Ledger) -> None:
    """Wrap the pool."""
    ledger.wrap(module, "EnginePool.get_entry", get_entry)
