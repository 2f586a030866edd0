"""The pool as it is shown to people; ``hooks`` fills it in, ``surfaces`` reads it.

Taken without the pool lock, on the event loop's thread, in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omlx_admission.core.policy.model import EMPTY_VIEW, PoolView
from omlx_admission.core.queue import Admission


@dataclass(frozen=True, slots=True)
class Registered:
    """One model that oMLX knows, loaded or not.

    Attributes:
        size: bytes that oMLX counts for it.
        draining: it takes no new requests and leaves once it is idle.
        last_used: time of day of its last use, None if it was never used.
    """

    model: str
    size: int
    pinned: bool = False
    draining: bool = False
    last_used: float | None = None


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The hot cache of the process: one budget for all engines, or not.

    Attributes:
        limit: bytes that all engines' caches may hold together.
        used: bytes that they hold, None where oMLX does not say.
        engines: loaded engines that have such a cache.
        shared: how many of them count against this one budget.
    """

    limit: int
    used: int | None
    engines: int
    shared: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What one reading found. ``admission`` is None before its first request."""

    view: PoolView = EMPTY_VIEW
    registered: Sequence[Registered] = ()
    admission: Admission | None = None
    cache: CacheBudget | None = None
    omlx: str | None = None
    features: Sequence[Mapping[str, Any]] = field(default=())
