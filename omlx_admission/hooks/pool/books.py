"""Stock's count of leases is kept by model; a lease belongs to the engine it was taken on.

An engine that is torn down under its leases leaves them on the entry in stock: the next
engine of the model counts as in use by requests that have never seen it, until the last
of their clients has gone, and each of their releases lowers the count of that engine. So
the count of an engine ends with its teardown, and a release counts only where the engine
that was handed out is still the model's. A request knows what it was handed; callers
outside of requests are told apart by how many of them there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from omlx_admission.core.pool import holding
from omlx_admission.hooks.pool.state import PoolState, state_of


def note(
    state: PoolState,
    engine: Any,
    model: str,
    lease: bool,
    force_lm: bool,
    settings: object | None,
) -> None:
    """Remember who was handed ``engine``."""
    if not holding.note(engine, model, lease, force_lm, settings) and lease:
        state.unnamed[model] = state.unnamed.get(model, 0) + 1


def reference(engine: Any) -> Callable[[], Any]:
    """The engine that a lease is for, without keeping its weights in memory."""
    try:
        return weakref.ref(engine)
    except TypeError:
        return lambda: engine


def give_back(pool: Any, model: str, held: Callable[[], Any] | None) -> None:
    """Lower the count for one lease, if it still counts.

    ``held`` is what the lease was taken on, None where the caller is not known.
    """
    if counts(pool, model, held):
        pool._entries[model].in_use -= 1


def counts(pool: Any, model: str, held: Callable[[], Any] | None) -> bool:
    """Whether a lease that is given back now is still in stock's count.

    Asked once for each release: it notes the release of a caller that is not known.
    """
    entry, state = pool._entries.get(model), state_of(pool)
    if held is not None:
        if entry is None or entry.engine is None or held() is not entry.engine:
            return False
    elif state.lapsed.get(model, 0):
        state.lapsed[model] -= 1
        return False
    elif state.unnamed.get(model, 0):
        state.unnamed[model] -= 1
    return entry is not None and entry.in_use > 0


def lapse(entry: Any, held: holding.Holding) -> None:
    """Count what one request holds no more; it will be given back all the same."""
    while held.kept:
        held.kept.pop().let_go()
    entry.in_use = max(0, entry.in_use - held.leased)
    held.lapsed += held.leased
    held.leased = 0


def engine_gone(pool: Any, model: str) -> None:
    """Begin a new count where the engine of ``model`` has been torn down."""
    entry, state = pool._entries.get(model), state_of(pool)
    if entry is not None and entry.engine is not None:
        return
    if entry is not None:
        entry.in_use = 0
    if unnamed := state.unnamed.pop(model, 0):
        state.lapsed[model] = state.lapsed.get(model, 0) + unnamed
