"""How many requests a text engine is given at a time, by what its scheduler takes.

An engine runs so many requests at once and queues the next ones itself; what it cannot
queue it refuses, after the 200 is out. And whatever it has queued has to be sat out by
a request for another model that needs its memory. So requests wait in our queue, and an
engine is given what it runs and a few more.
"""

from __future__ import annotations

from typing import Any

from omlx_admission.core.policy.model import places_for
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.pool.state import PoolState

SCHEDULER = "omlx.scheduler"

#: Without any of them an engine is given whatever comes, as stock has it.
NEEDS = (
    Need(SCHEDULER, "SchedulerConfig.max_num_seqs", Kind.VALUE, types=("int",), optional=True),
    Need(SCHEDULER, "Scheduler.config", Kind.VALUE, optional=True),
    *read_if_there(SCHEDULER, "Scheduler", "_serialize_llama4_requests"),
)

#: Requests that a scheduler queues at least, and for each that it runs.
_QUEUED_AT_LEAST = 32
_QUEUED_PER_SLOT = 4

#: The fewest places that an engine has: fewer leases need no look at the engine.
_FEWEST = places_for(1)

_pacing = False


def slots(engine: Any) -> int | None:
    """How many requests ``engine`` runs at once; None where it has no such scheduler."""
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    scheduler = getattr(core, "scheduler", None)
    count = getattr(getattr(scheduler, "config", None), "max_num_seqs", None)
    if type(count) is not int:
        return None
    if getattr(scheduler, "_serialize_llama4_requests", False) is True:
        return 1
    return max(1, count)


def places(engine: Any) -> int | None:
    """How many leases ``engine`` may have while requests for it wait; None: any number."""
    count = slots(engine)
    return None if count is None else places_for(count)


def most(engine: Any) -> int | None:
    """How many leases ``engine`` may have before it could refuse one of them."""
    count = slots(engine)
    return None if count is None else max(_QUEUED_PER_SLOT * count, _QUEUED_AT_LEAST)


def is_taken(pool: Any, state: PoolState, model_id: str) -> bool:
    """Whether a newcomer for a loaded model has to queue for a place of its engine."""
    if not _pacing:
        return False
    if state.admission is not None and model_id in state.admission.paced:
        return True
    entry = pool._entries[model_id]
    if entry.in_use < _FEWEST:
        return False
    limit = places(entry.engine)
    return limit is not None and entry.in_use >= limit


def apply(ledger: Ledger) -> None:
    """The queue is there: what has no place can wait in it."""
    global _pacing
    _pacing = True

    def off() -> None:
        global _pacing
        _pacing = False

    ledger.on_undo(off)
