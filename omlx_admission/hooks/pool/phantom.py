"""P2: an engine that calls itself active for ever, though nothing of it runs.

Text engines count the answers that were not fetched yet, cluster engines count their
callers; either count can be left behind by a request that ended badly, and the model
would never be idle again. Every route that uses such an engine holds a lease of it, and
what runs is in its scheduler. So with neither, for a moment, it is idle. Speech, embedding
and DFlash engines count what their threads do, which goes on after the lease has gone
(B26, B43): they are believed.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

from omlx_admission.hooks.patching.gate import read_if_there

logger = logging.getLogger("omlx.admission")

#: Without them an engine that calls itself active is believed, or looked at less closely.
NEEDS = (
    # Up to 0.5.3 of the one, then of the other.
    *read_if_there("omlx.engine.base", "BaseNonStreamingEngine", "_active_count"),
    *read_if_there("omlx.engine.base", "ActivityTrackingMixin", "_active_count"),
    *read_if_there("omlx.engine.vlm", "VLMBatchedEngine", "is_diffusion_model"),
    *read_if_there(
        "omlx.scheduler", "Scheduler", "has_requests", "running", "waiting", "prefilling"
    ),
    *read_if_there("omlx.engine_core", "EngineCore", "scheduler"),
)

#: Seconds for which an engine is believed.
AFTER_S = 5.0

#: Looks that lie further apart say nothing about the time between them, in seconds.
_GAP_S = 2.0

#: Since when, and when seen so last: active without a lease and without work.
_seen: weakref.WeakKeyDictionary[Any, tuple[float, float]] = weakref.WeakKeyDictionary()

#: Engines that were found out.
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def is_phantom(engine: Any) -> bool:
    """Whether the activity of an engine without a lease is one of a count only."""
    try:
        if _works(engine):
            _seen.pop(engine, None)
            _known.discard(engine)
            return False
        if engine in _known:
            return True
        now = time.monotonic()
        since, latest = _seen.get(engine, (now, now))
        if now - latest > _GAP_S:
            since = now
        _seen[engine] = (since, now)
        if now - since < AFTER_S:
            return False
        _known.add(engine)
    except Exception:  # noqa: BLE001 - an engine of which nothing is known is believed
        return False
    logger.warning(
        "admission: %s calls itself active, but nothing of it runs, and no request holds it: "
        "it counts as idle",
        type(engine).__name__,
    )
    return True


def _works(engine: Any) -> bool:
    """Whether work is seen, or is such as cannot be seen."""
    if isinstance(getattr(engine, "_active_count", None), int):
        return True
    if getattr(engine, "is_diffusion_model", False) is True:
        return True
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    scheduler = getattr(core, "scheduler", None)
    has_requests = getattr(scheduler, "has_requests", None)
    if callable(has_requests) and has_requests():
        return True
    return any(getattr(scheduler, name, None) for name in ("running", "waiting", "prefilling"))
