"""The turn on an engine's own thread: decode bursts, clean-up, vision, and closing.

``EngineCore.close`` blocks the event loop on the engine's thread and ends the process
after 60 s. So whatever waits for the turn on that thread is told to leave before
``stop`` or ``close`` goes on, and teardown itself never asks for the turn.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
from typing import Any

from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.gpu_turn.turn import TurnAbandoned
from omlx_admission.hooks.gpu.hold import holding as gpu_hold
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted

CORE = "omlx.engine_core"
SCHEDULER = "omlx.scheduler"
VLM = "omlx.engine.vlm"
ACTIVITY = "omlx.decode_activity"

STEP = Need(CORE, "EngineCore._step_burst", Kind.SYNC, (), returns=("list[...]",))
FAIL_ALL = Need(SCHEDULER, "Scheduler.fail_all_requests", Kind.SYNC, ())
VISION = Need(VLM, "VLMBatchedEngine._process_chat_messages", Kind.SYNC, optional=True)
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

_ATTRIBUTE = "_omlx_admission_gpu"


class EngineClosing(RuntimeError):
    """The model is being unloaded; work that had not begun is given up."""


class _EngineState:
    """What is kept per engine, on its scheduler. Loop and engine thread; plain flags."""

    __slots__ = ("closing", "error", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.closing = False
        self.error: BaseException | None = None


def name_of(core: Any) -> str:
    """The model's name as logs and the ledger show it: the last part of its path."""
    name = getattr(getattr(core, "config", None), "model_name", None)
    if not isinstance(name, str) or not name:
        name = str(getattr(core, "_engine_id", "engine"))
    return os.path.basename(name.rstrip("/")) or name


def _state(scheduler: Any, core: Any = None) -> _EngineState:
    state = getattr(scheduler, _ATTRIBUTE, None)
    if not isinstance(state, _EngineState):
        config = getattr(scheduler, "config", None)
        name = name_of(core) if core is not None else str(getattr(config, "model_name", ""))
        state = _EngineState(name or "engine")
        setattr(scheduler, _ATTRIBUTE, state)
    return state


def step_burst(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """One burst of steps is one turn.

    An error of the drain belongs to the requests that are still running; those that the
    burst has finished are delivered first. So it is raised by the next burst.
    """
    turn = gpu_turn.current
    scheduler = core.scheduler
    if turn is None or scheduler is None:
        return wrapped(*args, **kwargs)
    state = _state(scheduler, core)
    error, state.error = state.error, None
    if error is not None:
        raise error

    def drain() -> None:
        gpu_hold.drain(
            scheduler._stream, modules=bool(getattr(scheduler, "_vlm_mtp_active", None))
        )

    outputs: Any = None

    def work() -> None:
        nonlocal outputs
        outputs = wrapped(*args, **kwargs)

    def drain_what_ran() -> None:
        # A step that issued nothing (held, throttled, idle) left nothing in flight.
        if outputs is None or any(getattr(o, "has_work", True) for o in outputs):
            drain()

    try:
        gpu_hold.held(
            state.name,
            "decode burst",
            work,
            drain_what_ran,
            owner=scheduler,
            alive=lambda: _publish(scheduler),
            closing=lambda: state.closing or getattr(core, "_closed", False),
        )
    except TurnAbandoned:
        # The engine's loop ends on this quietly; it has been cancelled anyway.
        raise concurrent.futures.CancelledError from None
    except Exception as failed:
        if outputs is None:
            raise
        if scheduler.has_requests():
            state.error = failed
    return outputs


def _publish(scheduler: Any) -> None:
    """Say that this engine decodes, though it waits: others would take the GPU for
    theirs after 2.5 s and give up their short prefill chunks."""
    activity = sys.modules.get("omlx.decode_activity")
    running = len(scheduler.running)
    key = getattr(scheduler, "_decode_activity_key", None)
    if activity is not None and running and key is not None:
        activity.get_decode_activity().publish(key, running)


def fail_all(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Clean-up after an error must happen: it waits for the turn, though not for long."""
    state = _state(scheduler)
    state.error = None  # every request that it concerned fails now
    return gpu_hold.held(
        state.name,
        "failure clean-up",
        lambda: wrapped(*args, **kwargs),
        lambda: gpu_hold.drain_after_error(
            lambda: gpu_hold.drain(scheduler._stream), state.name
        ),
        optional=True,
        owner=scheduler,
        closing=lambda: state.closing,
    )


def vision(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Images and audio of a chat are encoded in one turn, on the engine's thread."""
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:
        return wrapped(*args, **kwargs)
    state = _state(scheduler, core)
    try:
        return gpu_hold.held(
            state.name,
            "vision encoding",
            lambda: wrapped(*args, **kwargs),
            lambda: gpu_hold.drain(scheduler._stream, modules=True),
            owner=scheduler,
            alive=lambda: _publish(scheduler),
            closing=lambda: state.closing,
        )
    except TurnAbandoned:
        raise EngineClosing(f"model '{state.name}' is being unloaded") from None


def ahead(site: str) -> Any:
    """A wrapper for work ahead of requests on an engine's thread; it yields to closing."""

    def wrapper(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
        scheduler = getattr(core, "scheduler", None)
        if scheduler is None:
            return wrapped(*args, **kwargs)
        state = _state(scheduler, core)
        return gpu_hold.held(
            state.name,
            site,
            lambda: wrapped(*args, **kwargs),
            lambda: gpu_hold.drain(scheduler._stream),
            optional=True,
            owner=scheduler,
            alive=lambda: _publish(scheduler),
            closing=lambda: state.closing,
        )

    return wrapper


async def stop(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """The loop ends: a wait for the turn on its thread ends now."""
    state = _leave(core)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        if state is not None and not getattr(core, "_closed", False):
            state.closing = False  # it may be started again


def close(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Teardown blocks the event loop on the engine's thread: nothing may wait there."""
    _leave(core)
    return wrapped(*args, **kwargs)


def _leave(core: Any) -> _EngineState | None:
    turn = gpu_turn.current
    scheduler = getattr(core, "scheduler", None)
    if turn is None or scheduler is None:
        return None
    state = _state(scheduler, core)
    state.closing = True
    turn.abandon(scheduler)
    return state


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the engine core."""
    ledger.wrap(module, "EngineCore._step_burst", step_burst)
    ledger.wrap(module, "EngineCore.stop", stop)
    ledger.wrap(module, "EngineCore.close", close)
    for name in KEEP_WARM:
        method = getattr(module.EngineCore, name, None)
        if callable(method) and not _is_async(method):
            ledger.wrap(module, f"EngineCore.{name}", ahead("keep-warm"))


def _is_async(method: Any) -> bool:
    import inspect

    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def apply_scheduler(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the scheduler's clean-up."""
    ledger.wrap(module, "Scheduler.fail_all_requests", fail_all)


def apply_vlm(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap vision encoding where this oMLX has it."""
    ledger.wrap_if_there(module, "VLMBatchedEngine._process_chat_messages", vision)
