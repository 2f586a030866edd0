"""The mark of a busy model that has to leave for another one."""

from __future__ import annotations

from typing import Any

#: First words of the reason in ``pending_unload_reason`` of a model that drains for
#: the queue.
DRAIN_REASON = "admission drain"


def drains_for_us(entry: Any) -> bool:
    """Whether the entry's pending mark was set by the admission queue."""
    reason = entry.pending_unload_reason
    return isinstance(reason, str) and reason.startswith(DRAIN_REASON)
