"""What of the pool's memory ceiling is fixed, and what moves with the rest of the machine."""

from __future__ import annotations

from typing import Any

from .. import faults

#: The parts of the ceiling by name. Releases before 0.5.7 have the private one only.
BREAKDOWN = ("get_ceiling_breakdown", "_get_ceiling_breakdown")


def fixed(pool: Any) -> int:
    """Bytes of the ceiling that no wait changes; 0 where that cannot be told.

    The memory of the machine less its reserve, what Metal allows, and an operator's own
    value. What other applications leave free changes by the second.
    """
    try:
        enforcer = pool._process_memory_enforcer
        if enforcer is None:
            return max(0, int(pool._current_ceiling()))  # there is nothing that moves it
        parts = next((p for n in BREAKDOWN if (p := getattr(enforcer, n, None))), None)
        if parts is None:
            return 0
        found = parts()
        names = ["static", "metal_cap"]
        if getattr(enforcer, "_memory_guard_tier", None) == "custom":
            names.append("dynamic")
        return min((size for size in (int(found[n]) for n in names) if size > 0), default=0)
    except Exception as error:  # unknown is an answer
        faults.note("the parts of the memory ceiling", error)
        return 0


def may_fit(pool: Any, error: Any) -> bool:
    """Whether what the pool calls too large (``ModelTooLargeError``) may fit another time."""
    limit = fixed(pool)
    return limit <= 0 or int(error.model_size) <= limit
