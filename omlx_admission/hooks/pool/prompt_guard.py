"""oMLX's guards of prompts answer by what is true, not by what the kernel still counts (P5).

Before a prompt is let in, and while it runs, they add it to the footprint of the process,
which may count a model that has left, and compare with a ceiling that moves with other
applications. What is too large by that alone is no fault of its client, which is told to
shorten its prompt: it waits for a moment, then it is refused for now. What is too large by
what is in use and by the fixed part of the ceiling gets oMLX's own answer at once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

from omlx_admission.core import faults, footprint
from omlx_admission.core import request as requests
from omlx_admission.core.footprint import Reading
from omlx_admission.core.pool import ceiling as ceilings
from omlx_admission.core.refusal import Refusal, retry_after
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.hooks.pool import ceiling
from omlx_admission.hooks.pool.state import pools, state_of
from omlx_admission.settings import Settings

logger = logging.getLogger("omlx.admission")

CORE = "omlx.engine_core"
BATCHED = "omlx.engine.batched"
VLM = "omlx.engine.vlm"
_SCHEDULER = "omlx.scheduler"

#: The engines of prompts by module. Each asks its scheduler, and then raises.
ENGINES = {BATCHED: "BatchedEngine", VLM: "VLMBatchedEngine"}
_CHECK = "_preflight_or_raise_with_eviction"

#: What a request asks after it was handed a model: may it still use it?
SERVER = "omlx.server"
_MARKED = "_raise_if_llm_lease_abort_requested"

NEEDS = (
    *ceiling.NEEDS,
    *(
        Need(
            module,
            f"{name}.{_CHECK}",
            Kind.ASYNC,
            ("scheduler", "*", "num_prompt_tokens", "request_id"),
        )
        for module, name in ENGINES.items()
    ),
    *(Need(module, _CHECK, Kind.USED) for module in ENGINES),
    Need(
        _SCHEDULER,
        "Scheduler.preflight_eviction_request",
        Kind.SYNC,
        ("*", "num_prompt_tokens"),
    ),
    Need(_SCHEDULER, "Scheduler._current_usage_bytes", Kind.SYNC),
    Need(_SCHEDULER, "Scheduler._memory_hard_limit_bytes", Kind.VALUE, types=("int",)),
    *(
        Need(_SCHEDULER, f"Scheduler.{name}", Kind.VALUE, types=("int",), optional=True)
        for name in ("_memory_hard_watermark_bytes", "_memory_hot_cache_reserved_bytes")
    ),
    Need("omlx.exceptions", "PrefillMemoryExceededError", Kind.CLASS),
    Need(SERVER, _MARKED, Kind.ASYNC, ("lease",), optional=True),
    Need(CORE, "_raise_request_output_error", Kind.SYNC, ("output",)),
    Need(CORE, "_raise_request_output_error", Kind.USED),
    Need("omlx.request", "RequestOutput.error", Kind.VALUE),
    Need("omlx.request", "RequestOutput.error_code", Kind.VALUE),
)

#: What the guards give as the code of an error. Until 0.5.6 an abort has none, but words.
_CODES = ("prefill_memory_exceeded", "prefill_memory_aborted")
_WORDS = "Request aborted: process memory limit exceeded"

#: Part of the ceiling that the footprint may be above what is in use without a reason.
_SLACK = 0.05

#: Where it has not fallen for as long, it may take longer still.
_RETRY_S = 5.0

_TEXT = (
    "The memory of the server is short for the moment: what has been unloaded is not free "
    "yet, or other applications use it. The request is not at fault. Try again."
)


def _houses() -> Iterator[tuple[Reading, int, int]]:
    """Memory, ceiling and its fixed part of each pool whose queue has been in use."""
    for pool in list(pools):
        admission = state_of(pool).admission
        if admission is not None:
            now = max(0, int(pool._current_ceiling()))
            yield admission.port.reading(0), now, max(now, ceilings.fixed(pool))


def _fits(scheduler: Any, arguments: dict[str, Any]) -> bool:
    return scheduler.preflight_eviction_request(**arguments) is None


def _should_fit(scheduler: Any, arguments: dict[str, Any]) -> bool:
    """Whether oMLX's own sum comes out right with what is in use, and all of the ceiling."""
    for reading, _now, fixed in _houses():
        fair = copy.copy(scheduler)
        kept = reading.kept
        fair._current_usage_bytes = lambda *_args, kept=kept, **_kwargs: kept
        limit = int(scheduler._memory_hard_limit_bytes)
        full = fixed - int(getattr(scheduler, "_memory_hot_cache_reserved_bytes", 0))
        if 0 < limit < full:
            fair._memory_hard_limit_bytes = full
            watermark = int(getattr(scheduler, "_memory_hard_watermark_bytes", 0))
            fair._memory_hard_watermark_bytes = int(watermark * full / limit)
        if _fits(fair, arguments):
            return True
    return False


def _is_passing(output: Any) -> bool:
    """Whether a request that runs was ended for what is not in use, or for a dip."""
    if output.error_code not in _CODES and not str(output.error).startswith(_WORDS):
        return False
    for reading, now, fixed in _houses():
        residue = reading.footprint - reading.kept
        if reading.kept < fixed and (now < fixed or residue > _SLACK * now):
            return True
    return False


def _refusal() -> Refusal:
    return Refusal(503, "model_busy", _TEXT, retry_after(_RETRY_S))


class PromptGuard:
    """The wrappers; they share the settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def _longest(self, request: requests.Request | None) -> float:
        given = (self._settings.max_wait_s, request.max_wait if request else None)
        return min([footprint.LONGEST_S, *(s for s in given if s is not None and s > 0)])

    async def check(self, wrapped: Any, _engine: Any, args: Any, kwargs: Any) -> Any:
        """Let oMLX judge a prompt; where it would be wrong, once more when that has passed."""
        try:
            return await wrapped(*args, **kwargs)
        except Exception as error:
            request = requests.active()
            if request is None or not _is_exceeded(error) or not _is_wrong(*args, **kwargs):
                raise
            try:
                fits = await footprint.until(_again(*args, **kwargs), self._longest(request))
            except Exception as fault:  # noqa: BLE001 - the caller gets oMLX's error, not ours
                faults.note("the wait of a prompt", fault)
                raise error from None
            if not fits:
                _refuse(request)
                raise
        try:
            return await wrapped(*args, **kwargs)
        except Exception as error:
            if _is_exceeded(error):
                _refuse(request)
            raise


def _is_wrong(scheduler: Any, *_args: Any, **kwargs: Any) -> bool:
    """Whether what oMLX has just refused is to fit in truth."""
    try:
        return _should_fit(scheduler, _asked(kwargs))
    except Exception as error:  # noqa: BLE001 - the caller gets oMLX's error, not ours
        faults.note("the second look at a prompt", error)
        return False


def _again(scheduler: Any, *_args: Any, **kwargs: Any) -> Callable[[], bool]:
    return lambda: _fits(scheduler, _asked(kwargs))


def _asked(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"num_prompt_tokens": kwargs["num_prompt_tokens"]}


def _refuse(request: requests.Request) -> None:
    logger.info("admission: a prompt is refused for memory that is not in use, or comes back")
    request.refusal = _refusal()


def _is_exceeded(error: Exception) -> bool:
    from omlx.exceptions import PrefillMemoryExceededError

    return isinstance(error, PrefillMemoryExceededError)


def ended(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """A request that a guard has ended without its fault gets an answer that says so."""
    try:
        request = requests.active()
        if request is not None and _is_passing(args[0] if args else kwargs["output"]):
            request.cut.end_with(_refusal())
    except Exception as error:  # noqa: BLE001 - the caller gets oMLX's error, not ours
        faults.note("the reading of an abort", error)
    return wrapped(*args, **kwargs)


async def marked(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """A request whose model was marked under it, for want of memory, is refused for now."""
    try:
        return await wrapped(*args, **kwargs)
    except Exception as error:
        request = requests.active()
        if request is not None and getattr(error, "status_code", None) == 507:
            request.cut.end_with(_refusal())
        raise


def apply_engine(module: Any, ledger: Ledger, wanted: Wanted) -> None:
    """Wrap the check of one kind of engine."""
    name = ENGINES[module.__name__]
    ledger.wrap_if_there(module, f"{name}.{_CHECK}", PromptGuard(wanted.settings).check)


def apply_server(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap what ends a request whose model has to leave."""
    ledger.wrap_if_there(module, _MARKED, marked)


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap what makes an error of an output."""
    ledger.wrap(module, "_raise_request_output_error", ended)


PARTS = (
    Part(SERVER, apply_server),
    Part(CORE, apply_core),
    Part(BATCHED, apply_engine),
    Part(VLM, apply_engine, optional=True),
)
