"""What every engine offers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..engine_core import get_mlx_executor

_PREFLIGHT_CLEANUP_WAIT_TIMEOUT_S = 4.0
_PREFLIGHT_CLEANUP_POLL_INTERVAL_S = 0.05


async def _run_scheduler_preflight_with_cleanup_retry(
    scheduler: Any,
    *,
    num_prompt_tokens: int,
    request_id: str | None,
    eviction_callback: Any | None,
    executor: Any | None = None,
) -> None:
    """Check a prompt against the memory limit before any byte is sent.

    Waits up to four seconds for memory of finished requests, then asks the pool
    to evict, then raises if the prompt still does not fit.
    """
    deadline = time.monotonic() + _PREFLIGHT_CLEANUP_WAIT_TIMEOUT_S
    while True:
        needed = scheduler.preflight_eviction_request(
            num_prompt_tokens=num_prompt_tokens, request_id=request_id
        )
        pending = scheduler.has_pending_route_preflight_cleanup()
        if needed is None or not pending or time.monotonic() >= deadline:
            break
        await asyncio.sleep(_PREFLIGHT_CLEANUP_POLL_INTERVAL_S)
    if needed is not None and eviction_callback is not None:
        await eviction_callback(needed)
    scheduler.preflight_or_raise(num_prompt_tokens=num_prompt_tokens, request_id=request_id)


@dataclass
class GenerationOutput:
    """Text so far (``text``) and since the last output (``new_text``)."""

    text: str
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = "stop"
    new_text: str = ""
    finished: bool = True
    tool_calls: list[dict[str, Any]] | None = None
    cached_tokens: int = 0
    generated_at: float | None = None
    generated_until: float | None = None
    first_token_at: float | None = None


class BaseEngine(ABC):
    """An engine that generates text."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Path of the model."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's tokenizer; None while not loaded."""

    @property
    @abstractmethod
    def model_type(self) -> str | None:
        """``model_type`` of the model's config."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model."""

    @abstractmethod
    async def stop(self) -> None:
        """Drop the model."""

    @abstractmethod
    async def generate(self, prompt: str | list[int], **kwargs: Any) -> GenerationOutput:
        """Run a prompt to its end."""

    @abstractmethod
    def stream_generate(
        self, prompt: str | list[int], **kwargs: Any
    ) -> AsyncIterator[GenerationOutput]:
        """Run a prompt, yielding as tokens come."""

    @abstractmethod
    async def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> GenerationOutput:
        """Run a conversation to its end."""

    @abstractmethod
    def stream_chat(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> AsyncIterator[GenerationOutput]:
        """Run a conversation, yielding as tokens come."""

    @abstractmethod
    def get_stats(self) -> dict[str, Any]:
        """Counters."""

    @abstractmethod
    def get_cache_stats(self) -> dict[str, Any] | None:
        """Counters of a prefix cache, if there is one."""

    def has_active_requests(self) -> bool:
        """Whether any request is being generated."""
        return False

    async def preflight_chat(  # noqa: B027 - optional
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise if the conversation cannot fit in memory."""

    async def preflight_completion(  # noqa: B027 - optional
        self, prompt: str, request_id: str | None = None, **kwargs: Any
    ) -> None:
        """Raise if the prompt cannot fit in memory."""


class ActivityTrackingMixin:
    """Counts operations of an engine that has no scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self._active_count = 0
        self._active_lock = threading.Lock()
        self._activities: dict[str, dict[str, Any]] = {}

    def has_active_requests(self) -> bool:
        """Whether any operation is in progress."""
        with self._active_lock:
            return self._active_count > 0

    def _reset_activity_tracking(self) -> None:
        with self._active_lock:
            self._active_count = 0
            self._activities.clear()

    def _begin_activity(
        self,
        kind: str,
        detail: str | None = None,
        total_items: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str:
        activity_id = str(uuid.uuid4())
        with self._active_lock:
            self._active_count += 1
            self._activities[activity_id] = {
                "kind": kind,
                "detail": detail or kind,
                "total_items": total_items,
                "started_at": time.monotonic(),
                **(metadata or {}),
            }
        return activity_id

    def _end_activity(self, activity_id: str) -> None:
        with self._active_lock:
            if self._activities.pop(activity_id, None) is None:
                raise RuntimeError(f"activity {activity_id} is not in progress")
            self._active_count -= 1

    async def _finish_activity(self, activity_id: str) -> None:
        """End an operation and clear MLX's cache on the global thread."""
        self._end_activity(activity_id)
        await asyncio.get_running_loop().run_in_executor(
            get_mlx_executor(), lambda: (mx.synchronize(), mx.clear_cache())
        )

    def get_activity_snapshot(self) -> dict[str, Any]:
        """Operations in progress, with their age in seconds."""
        now = time.monotonic()
        with self._active_lock:
            activities = [
                {**activity, "request_id": key, "elapsed_seconds": now - activity["started_at"]}
                for key, activity in self._activities.items()
            ]
            return {"active_requests": self._active_count, "activities": activities}


class BaseNonStreamingEngine(ActivityTrackingMixin, ABC):
    """An engine whose answers come in one piece (embeddings, reranking, audio)."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Path of the model."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model."""

    @abstractmethod
    async def stop(self) -> None:
        """Drop the model."""

    @abstractmethod
    def get_stats(self) -> dict[str, Any]:
        """Counters."""
