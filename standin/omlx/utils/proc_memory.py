"""The process's physical footprint, where a test or the demo puts its own number."""

from __future__ import annotations


def get_phys_footprint(pid: int | None = None) -> int:
    """Bytes; 0 where the kernel does not say, as on Linux."""
    return 0
