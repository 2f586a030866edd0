"""What is read of a scheduler to tell how many requests its engine is given at a time."""

from __future__ import annotations

from typing import Any

from omlx_admission.core.pool.places import is_full
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.pool.state import PoolState

SCHEDULER = "omlx.scheduler"

#: Without any of them an engine is given whatever comes, as stock has it.
NEEDS = (
    Need(SCHEDULER, "SchedulerConfig.max_num_seqs", Kind.VALUE, types=("int",), optional=True),
    Need(SCHEDULER, "Scheduler.config", Kind.VALUE, optional=True),
    *read_if_there(SCHEDULER, "Scheduler", "_serialize_llama4_requests"),
)


def is_taken(pool: Any, state: PoolState, model_id: str) -> bool:
    """Whether a newcomer for a loaded model has to queue for a place of its engine."""
    if not switches.pacing:
        return False
    if state.admission is not None and model_id in state.admission.paced:
        return True
    return is_full(pool._entries[model_id])
