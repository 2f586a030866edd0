"""Switching the GPU turn on: the process's turn, and the wrappers at its sites."""

from __future__ import annotations

import logging
from typing import Any

from omlx_admission.hooks.gpu import engine as gpu_engine
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import shared as gpu_shared
from omlx_admission.hooks.gpu import watch as gpu_watch
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.settings import Settings

logger = logging.getLogger("omlx.admission")

#: A waiter gives up after this many times the limit at which a holder is reported: long
#: enough for work of minutes that offers no step between.
GIVE_UP_TIMES = 10.0
GIVE_UP_AT_LEAST_S = 300.0


def apply_turn(_module: Any, _ledger: Ledger, wanted: Wanted) -> None:
    """Make the turn of this process, before anything can ask for it."""
    stuck_s = wanted.settings.gpu_stuck_s
    # Where nothing is reported, a waiter is as patient as by default.
    patience_s = GIVE_UP_TIMES * (stuck_s or Settings.gpu_stuck_s)
    mode = wanted.settings.serialize_engine_gpu
    if mode == "auto" and not wanted.features & {"exposure", "gpu_lockout"}:
        logger.warning(
            "admission: with serialize_engine_gpu auto a GPU hang switches turns on, and hangs "
            "are seen with OMLX_ADMISSION_EXPOSURE or OMLX_ADMISSION_EXIT_ON_GPU_LOCKOUT only"
        )
    process.take_turns(
        mode, stuck_s=stuck_s or float("inf"), limit_s=max(GIVE_UP_AT_LEAST_S, patience_s)
    )


def apply_exit(_module: Any, _ledger: Ledger, _wanted: Wanted) -> None:
    """End a process whose turn is stuck, the way oMLX ends itself."""
    process.exit_on_stuck = gpu_watch.leave


PARTS = (
    Part(gpu_engine.SCHEDULER, gpu_engine.apply_scheduler),
    Part(gpu_engine.CORE, apply_turn),
    Part(gpu_engine.CORE, gpu_engine.apply_core),
    Part(gpu_engine.CORE, gpu_shared.apply_core),
    Part(gpu_engine.TRACKER, gpu_engine.apply_tracker, optional=True),
    Part(gpu_engine.VLM, gpu_engine.apply_vlm, optional=True),
    Part(gpu_jobs.EMBEDDING, gpu_shared.apply_embedding, optional=True),
    Part(gpu_jobs.RERANKER, gpu_shared.apply_reranker, optional=True),
    Part(gpu_jobs.DFLASH, gpu_shared.apply_dflash, optional=True),
    Part(gpu_jobs.DIFFUSION, gpu_shared.apply_diffusion, optional=True),
)
EXIT_NEEDS = (gpu_watch.FATAL_EXIT,)
EXIT_PARTS = (Part(gpu_engine.CORE, apply_exit),)
