"""Which engines decode right now, as published by each scheduler step."""

from __future__ import annotations

import threading
import time


class DecodeActivityRegistry:
    """Running-decode counts by engine key, each valid for a short time only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[str, tuple[float, int]] = {}

    def publish(self, key: str, running_count: int) -> None:
        """Say that ``key`` runs that many decodes; 0 takes it off."""
        with self._lock:
            if running_count > 0:
                self._active[key] = (time.monotonic(), running_count)
            else:
                self._active.pop(key, None)

    def remove(self, key: str) -> None:
        self.publish(key, 0)

    def others_decoding(self, key: str, ttl_s: float = 2.5) -> bool:
        """Whether another engine published within ``ttl_s`` seconds."""
        oldest = time.monotonic() - ttl_s
        with self._lock:
            return any(
                other != key and stamp > oldest for other, (stamp, _) in self._active.items()
            )

    def clear(self) -> None:
        with self._lock:
            self._active.clear()


_registry = DecodeActivityRegistry()


def get_decode_activity() -> DecodeActivityRegistry:
    return _registry
