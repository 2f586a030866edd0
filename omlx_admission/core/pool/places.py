"""How many requests a text engine is given at a time, by what its scheduler takes.

An engine runs so many requests at once and queues the next ones itself; what it cannot
queue it refuses, after the 200 is out. And whatever it has queued has to be sat out by
a request for another model that needs its memory. So requests wait in the queue, and an
engine is given what it runs and a few more.
"""

from __future__ import annotations

from typing import Any

from ..policy.model import places_for

#: Requests that a scheduler queues at least, and for each that it runs.
_QUEUED_AT_LEAST = 32
_QUEUED_PER_SLOT = 4

#: The fewest places that an engine has: fewer leases need no look at the engine.
_FEWEST = places_for(1)


def slots(engine: Any) -> int | None:
    """How many requests ``engine`` runs at once; None where it has no such scheduler."""
    try:  # on the way of each request, where a default at each step takes twice as long
        core = engine._engine.engine
        scheduler = core.scheduler
        count = scheduler.config.max_num_seqs
    except AttributeError:
        return None
    if type(count) is not int:
        return None
    if getattr(scheduler, "_serialize_llama4_requests", False) is True:
        return 1
    return max(1, count)


def places(engine: Any) -> int | None:
    """How many leases ``engine`` may have while requests for it wait; None: any number."""
    count = slots(engine)
    return None if count is None else places_for(count)


def most(engine: Any) -> int | None:
    """How many leases ``engine`` may have before it could refuse one of them."""
    count = slots(engine)
    return None if count is None else max(_QUEUED_PER_SLOT * count, _QUEUED_AT_LEAST)


def is_full(entry: Any) -> bool:
    """Whether the engine of a loaded model has as many leases as it is given at a time."""
    leases = entry.in_use
    if leases < _FEWEST:
        return False
    count = slots(entry.engine)
    # What runs at once is always given, so most requests need no more than this.
    return count is not None and leases >= count and leases >= places_for(count)
