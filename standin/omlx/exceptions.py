"""Errors raised across the server; the classes and attributes match oMLX's."""

from __future__ import annotations

from typing import Any


class OMLXError(Exception):
    """Root of all errors of this package."""

    def __init__(self, message: str = "", details: dict[str, Any] | None = None):
        super().__init__(message)
        self.message = message
        self.details = details or {}


class InvalidRequestError(OMLXError, ValueError):
    """A request field that cannot be served; mapped to 400."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class SchedulerError(OMLXError):
    """Root of scheduler errors."""


class SchedulerQueueFullError(SchedulerError):
    """One engine's own waiting queue is full; mapped to 503 with ``Retry-After: 1``."""

    def __init__(
        self, current_depth: int, max_depth: int, details: dict[str, Any] | None = None
    ):
        super().__init__(f"{current_depth} requests wait, {max_depth} may", details)
        self.current_depth = current_depth
        self.max_depth = max_depth


class OMLXMemoryError(OMLXError):
    """Root of memory errors of single requests."""


class PrefillMemoryExceededError(OMLXMemoryError):
    """A prompt whose prefill would pass the memory ceiling; mapped to 400."""

    def __init__(
        self,
        message: str,
        request_id: str | None = None,
        estimated_bytes: int | None = None,
        limit_bytes: int | None = None,
        details: dict[str, Any] | None = None,
    ):
        super().__init__(message, details)
        self.request_id = request_id
        self.estimated_bytes = estimated_bytes
        self.limit_bytes = limit_bytes


class PrefillMemoryAbortedError(PrefillMemoryExceededError):
    """An admitted request that the memory enforcer ended; also mapped to 400."""


class EnginePoolError(OMLXError):
    """Root of the pool's refusals."""


class ModelNotFoundError(EnginePoolError):
    """No such model; mapped to 404."""

    def __init__(self, model_id: str, available_models: list[str]):
        self.model_id = model_id
        self.available_models = available_models
        known = ", ".join(available_models) or "none"
        super().__init__(f"No model named '{model_id}' (known: {known})")


class ModelTooLargeError(EnginePoolError):
    """The model alone is above the ceiling; mapped to 507."""

    def __init__(
        self,
        model_id: str,
        model_size: int,
        ceiling: int,
        *,
        binding: str | None = None,
        advice: str | None = None,
    ):
        from .model_discovery import format_size

        self.model_id = model_id
        self.model_size = model_size
        self.ceiling = ceiling
        self.binding = binding
        super().__init__(
            f"'{model_id}' needs {format_size(model_size)}, more than the "
            f"{(binding + ' ') if binding else ''}ceiling of {format_size(ceiling)}"
            f"{('; ' + advice) if advice else ''}"
        )


class InsufficientMemoryError(EnginePoolError):
    """No room now, with nothing idle left to evict; mapped to 507 all the same."""

    def __init__(self, required: int, current: int, message: str):
        self.required = required
        self.current = current
        super().__init__(message)


class ModelLoadingError(EnginePoolError):
    """A load that is under way, was aborted, or gave no usable engine; mapped to 409."""

    def __init__(self, model_id: str, message: str | None = None):
        self.model_id = model_id
        super().__init__(message or f"'{model_id}' is loading already")


class ModelUnavailableError(EnginePoolError):
    """A load that failed, remembered until the next rescan; mapped to 409."""

    def __init__(self, model_id: str, message: str | None = None):
        self.model_id = model_id
        super().__init__(message or f"'{model_id}' cannot be loaded")


class ModelBusyError(EnginePoolError):
    """An operation that would need a busy model gone; mapped to 409."""

    def __init__(self, model_id: str, operation: str):
        self.model_id = model_id
        self.operation = operation
        super().__init__(f"'{model_id}' is busy and cannot {operation}")
