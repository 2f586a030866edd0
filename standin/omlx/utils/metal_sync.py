"""Draining a stream before MLX's buffer cache is cleared."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx

#: Held by whoever clears the cache or reads raw buffers. Lock order: an outer
#: turn first, this lock second.
_mx_buffer_access_lock = threading.RLock()


def _sync_and_clear_cache(stream: Any = None) -> None:
    """Wait for ``stream`` and the calling thread's default stream, then clear."""
    with _mx_buffer_access_lock:
        if stream is not None:
            try:
                mx.synchronize(stream)
            except RuntimeError:
                # This thread never used the stream, so nothing is in flight on it.
                pass
        mx.synchronize()
        mx.clear_cache()
