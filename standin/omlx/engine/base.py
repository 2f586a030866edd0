"""What every engine offers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..engine_core import get_mlx_executor
from ..models.embedding import MLXEmbeddingModel

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
    cached_tokens: int = 0
    generated_at: float | None = None
    generated_until: float | None = None
    first_token_at: float | None = None


class BaseEngine:
    """An engine that generates text."""

    def has_active_requests(self) -> bool:
        """Whether any request is being generated."""
        return False

    async def preflight_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise if the conversation cannot fit in memory."""

    async def preflight_completion(
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


class BaseNonStreamingEngine(ActivityTrackingMixin):
    """An engine whose answers come in one piece (embeddings, reranking, audio)."""


class AudioEngine(BaseNonStreamingEngine):
    """A model that answers one call at a time with something made up.

    The weights are those of a tiny encoder; what matters is where the work runs
    and that it counts as activity only from the call on.
    """

    def __init__(self, model_name: str, **kwargs: Any):
        super().__init__()
        self._model_name = model_name
        self._model: MLXEmbeddingModel | None = None

    @property
    def model_name(self) -> str:
        return self._model_name

    async def start(self) -> None:
        if self._model is None:
            self._model = MLXEmbeddingModel(self._model_name)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(get_mlx_executor(), self._model.load)

    async def stop(self) -> None:
        if self._model is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(get_mlx_executor(), self._model.close)
            self._model = None

    async def run(self, text: str) -> list[float]:
        """A vector for ``text``, computed on the global thread."""
        model = self._model
        if model is None:
            raise RuntimeError("the audio engine is not started")
        activity = self._begin_activity("audio")
        try:
            loop = asyncio.get_running_loop()
            output = await loop.run_in_executor(get_mlx_executor(), model.embed, [text])
            return output.embeddings[0]
        finally:
            await self._finish_activity(activity)
