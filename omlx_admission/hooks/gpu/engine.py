"""The turn on an engine's own thread: decode bursts, clean-up, vision, and closing.

What is done there is in `gpu_turn.sites`; here is what it needs of oMLX, and the wrapping.
"""

from __future__ import annotations

import inspect
from typing import Any

from omlx_admission.gpu_turn import sites
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted

CORE = "omlx.engine_core"
SCHEDULER = "omlx.scheduler"
VLM = "omlx.engine.vlm"
ACTIVITY = "omlx.decode_activity"
STT = "omlx.engine.stt"
TRACKER = "omlx.prefill_progress"

STEP = Need(CORE, "EngineCore._step_burst", Kind.SYNC, (), returns=("list[...]",))
FAIL_ALL = Need(SCHEDULER, "Scheduler.fail_all_requests", Kind.SYNC, ())
VISION = Need(VLM, "VLMBatchedEngine._process_chat_messages", Kind.SYNC, optional=True)
PROGRESS = Need(
    SCHEDULER, "Scheduler._on_prompt_progress", Kind.SYNC, ("updates",), optional=True
)
DRAFT_PROGRESS = Need(
    TRACKER,
    "PrefillProgressTracker.update",
    Kind.SYNC,
    ("request_id", "processed", "total", "model_id", "phase", "detail", "extra"),
    optional=True,
)
STOP = Need(CORE, "EngineCore.stop", Kind.ASYNC, ())
CLOSE = Need(CORE, "EngineCore.close", Kind.SYNC, ())
SCHEDULER_VALUE = Need(CORE, "EngineCore.scheduler", Kind.VALUE, types=("Scheduler",))
#: The engine's loop still goes through what is wrapped.
CALLED = (
    Need(CORE, "_step_burst", Kind.USED),
    Need(CORE, "fail_all_requests", Kind.USED),
)
#: What an engine is called by in logs.
NAMED = (
    *read_if_there(CORE, "EngineCore", "_engine_id"),
    *read_if_there(CORE, "EngineConfig", "model_name"),
    *read_if_there(SCHEDULER, "SchedulerConfig", "model_name"),
)

#: Methods of later releases that work ahead on the engine's thread, if they are there.
KEEP_WARM = ("_keepwarm", "_run_prompt_tail_prewarm")

NEEDS = (
    STEP,
    FAIL_ALL,
    VISION,
    *read_if_there(
        CORE,
        "EngineConfig",
        "decode_burst_budget_s",
        "decode_burst_budget_single_s",
        "decode_burst_max_steps",
    ),
    *read_if_there(VLM, "VLMBatchedEngine", "_compute_vision_features", "_vlm_model"),
    *read_if_there(STT, "_WhisperRealtimeBackend", "_decode"),
    *read_if_there(STT, "_VoxtralRealtimeBackend", "_session"),
    PROGRESS,
    DRAFT_PROGRESS,
    STOP,
    CLOSE,
    SCHEDULER_VALUE,
    Need(CORE, "EngineCore.config", Kind.VALUE),
    Need(CORE, "EngineCore._closed", Kind.VALUE),
    *CALLED,
    *NAMED,
    *read_if_there(SCHEDULER, "Scheduler", "_vlm_mtp_active"),
    *read_if_there(SCHEDULER, "SchedulerOutput", "has_work"),
    Need(SCHEDULER, "Scheduler", Kind.CLASS),
    Need(SCHEDULER, "Scheduler.running", Kind.VALUE, types=("dict[...]", "OrderedDict[...]")),
    Need(SCHEDULER, "Scheduler._stream", Kind.VALUE),
    Need(SCHEDULER, "Scheduler.has_requests", Kind.SYNC, (), returns=("bool",)),
    # Since 0.6.0 engines tell each other that they decode.
    Need(ACTIVITY, "get_decode_activity", Kind.SYNC, (), optional=True),
    *read_if_there(SCHEDULER, "Scheduler", "_decode_activity_key"),
    *read_if_there(CORE, "EngineCore", *KEEP_WARM),
    Need(
        ACTIVITY,
        "DecodeActivityRegistry.publish",
        Kind.SYNC,
        ("key", "running_count"),
        optional=True,
    ),
)


async def stop(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """The loop ends: a wait for the turn on its thread ends now."""
    sites.leave(core)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        if not getattr(core, "_closed", False):
            sites.enter(core)  # it may be started again


def close(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Teardown blocks the event loop on the engine's thread: nothing may wait there."""
    sites.leave(core)
    return wrapped(*args, **kwargs)


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the engine core."""
    ledger.wrap(module, "EngineCore._step_burst", sites.burst)
    ledger.wrap(module, "EngineCore.stop", stop)
    ledger.wrap(module, "EngineCore.close", close)
    for name in KEEP_WARM:
        method = getattr(module.EngineCore, name, None)
        if callable(method) and not _is_async(method):
            ledger.wrap(module, f"EngineCore.{name}", sites.ahead)


def _is_async(method: Any) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def apply_scheduler(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the scheduler's clean-up, and where it is between two chunks of a prompt."""
    ledger.wrap(module, "Scheduler.fail_all_requests", sites.clean_up)
    ledger.wrap_if_there(module, "Scheduler._on_prompt_progress", sites.progress)


def apply_tracker(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap what a draft model's scoring tells between two of its chunks."""
    ledger.wrap_if_there(module, "PrefillProgressTracker.update", sites.draft_progress)


def apply_vlm(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap vision encoding where this oMLX has it."""
    ledger.wrap_if_there(module, "VLMBatchedEngine._process_chat_messages", sites.vision)
