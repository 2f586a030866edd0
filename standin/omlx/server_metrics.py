"""Counters since the server started."""

from __future__ import annotations

import threading
import time
from typing import Any


class ServerMetrics:
    """Requests and tokens served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.time()
        self._requests = self._prompt = self._completion = self._cached = 0
        self._prefill_s = self._generation_s = 0.0

    def record_request_complete(
        self,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        cached_tokens: int = 0,
        prefill_duration: float = 0.0,
        generation_duration: float = 0.0,
        model_id: str = "",
    ) -> None:
        """Count one answered request; durations in seconds."""
        with self._lock:
            self._requests += 1
            self._prompt += prompt_tokens
            self._completion += completion_tokens
            self._cached += cached_tokens
            self._prefill_s += prefill_duration
            self._generation_s += generation_duration

    def get_snapshot(self) -> dict[str, Any]:
        """All counters."""
        with self._lock:
            return {
                "uptime_seconds": round(time.time() - self._started, 1),
                "total_requests": self._requests,
                "total_prompt_tokens": self._prompt,
                "total_completion_tokens": self._completion,
                "total_cached_tokens": self._cached,
                "cache_efficiency": 0.0,
                "avg_prefill_tps": _rate(self._prompt, self._prefill_s),
                "avg_generation_tps": _rate(self._completion, self._generation_s),
            }


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if seconds > 0 else 0.0


_metrics = ServerMetrics()


def get_server_metrics() -> ServerMetrics:
    """The counters of this process."""
    return _metrics


def reset_server_metrics() -> None:
    """Start counting anew."""
    global _metrics
    _metrics = ServerMetrics()
