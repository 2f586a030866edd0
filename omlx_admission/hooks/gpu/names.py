"""Engines are called by their model's id, in logs, answers and counts.

oMLX gives an engine the path of its files, whose last part may be a hash. The pool knows
both, and a load is where an engine gets its path.
"""

from __future__ import annotations

from typing import Any

from omlx_admission.core import faults
from omlx_admission.gpu_turn import sites
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted

POOL = "omlx.engine_pool"

NEEDS = (
    # Where it is another one, the path has to do.
    Need(POOL, "EnginePool._load_engine", Kind.ASYNC, optional=True),
    *read_if_there(POOL, "EnginePool", "_entries"),
    *read_if_there(POOL, "EngineEntry", "model_path"),
)


def load(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Note what the model is called whose engine is made now."""
    try:
        model = args[0] if args else kwargs["model_id"]
        sites.models[str(pool._entries[model].model_path)] = model
    except Exception as error:  # noqa: BLE001 - then its path has to do
        faults.note("the name of an engine", error)
    return wrapped(*args, **kwargs)


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the pool's loads."""
    ledger.wrap_if_there(module, "EnginePool._load_engine", load)


PART = Part(POOL, apply, optional=True)
