"""What the hooks rely on of oMLX's exceptions: their kinds, and how they are made."""

from __future__ import annotations

from omlx_admission.hooks.patching.gate import Kind, Need

MODULE = "omlx.exceptions"

_POOL = ("EnginePoolError",)


def _kind(name: str, base: tuple[str, ...] = _POOL) -> Need:
    """One class. Its base decides which of oMLX's own handlers takes it."""
    return Need(MODULE, name, Kind.CLASS, bases=base)


def _made(name: str, *params: str) -> Need:
    """How one is made where we raise it ourselves."""
    return Need(MODULE, f"{name}.__init__", Kind.SYNC, params)


INSUFFICIENT = _kind("InsufficientMemoryError")
BUSY = _kind("ModelBusyError")
LOADING = _kind("ModelLoadingError")
TOO_LARGE = _kind("ModelTooLargeError")
UNAVAILABLE = _kind("ModelUnavailableError")
#: Our refusals are of this kind: no error of the pool, which the server would rewrite.
QUEUE_FULL = _kind("SchedulerQueueFullError", ("SchedulerError",))

#: What the answers are made from.
TOLD_APART = (INSUFFICIENT, BUSY, LOADING, TOO_LARGE, UNAVAILABLE, QUEUE_FULL)

#: What the queue raises in stock's place.
RAISED = (
    *TOLD_APART,
    _kind("ModelNotFoundError"),
    _made("InsufficientMemoryError", "required", "current", "message"),
    _made("ModelBusyError", "model_id", "operation"),
    _made("ModelLoadingError", "model_id", "message"),
    _made("ModelNotFoundError", "model_id", "available_models"),
    _made("ModelTooLargeError", "model_id", "model_size", "ceiling"),
)
