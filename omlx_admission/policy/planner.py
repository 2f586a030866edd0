"""Which models must leave so that one target fits: least disturbance, whole set or none."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omlx_admission.policy.model import ModelView, PoolView, Target


class PlanKind(enum.Enum):
    """What has to happen before the target can load."""

    FITS = "fits"  # nothing has to leave
    EVICT = "evict"  # idle models leave
    DRAIN = "drain"  # at least one busy model has to drain first
    SETTLE = "settle"  # room is on its way: a load or unload is under way
    BLOCKED = "blocked"  # what could leave does not suffice: wait for what is in the way
    ASK = "ask"  # nothing of ours is in the way: only the pool can tell
    NEVER = "never"  # larger than the ceiling less what is pinned


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind and the models that leave, those that are busy last."""

    kind: PlanKind
    victims: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


def never_fits(target: Target, size: int, view: PoolView) -> bool:
    """Whether no amount of waiting makes room: only pinned models count against it."""
    pinned = [m for m in view.models.values() if m.pinned and m.model != target.model]
    if view.max_models and len(pinned) >= view.max_models:
        return True
    if view.ceiling <= 0 or view.never_refuse:
        return False
    return size > view.ceiling - sum(m.size for m in pinned)


def plan(
    target: Target,
    size: int,
    view: PoolView,
    *,
    rank: Callable[[ModelView], tuple[Any, ...]] = lambda m: (m.last_used, m.model),
) -> Plan:
    """Plan the eviction for ``target`` of ``size`` bytes.

    Args:
        rank: order among idle victims and among busy victims: lowest leaves first.
    """
    if never_fits(target, size, view):
        return Plan(PlanKind.NEVER)
    own = view.models.get(target.model)
    # Another variant of the same model holds the place that this one needs.
    forced = [own] if own is not None else []
    if own is not None and (own.loading or own.unloading):
        return Plan(PlanKind.SETTLE)
    # A pinned model may still be reloaded in another variant of itself.
    candidates = sorted(
        (m for m in view.models.values() if m.evictable and m is not own),
        key=lambda m: (m.busy, *rank(m)),
    )

    def fits(victims: list[ModelView]) -> bool:
        if view.max_models:
            count = len(view.models) - len(victims) + 1
            if count > view.max_models:
                return False
        if view.ceiling <= 0:
            return True
        if not victims:
            return view.used + size <= view.ceiling
        left = max(0, view.committed - sum(v.size for v in victims))
        return left + size <= view.ceiling

    chosen = _smallest(forced, candidates, fits)
    if chosen is None:
        return _cannot(view, forced, candidates, fits)
    busy = tuple(m.model for m in chosen if m.busy)
    victims = tuple(m.model for m in chosen)
    if not victims:
        return Plan(PlanKind.FITS)
    return Plan(PlanKind.DRAIN if busy else PlanKind.EVICT, victims, busy)


def _smallest(
    forced: list[ModelView],
    candidates: list[ModelView],
    fits: Callable[[list[ModelView]], bool],
) -> list[ModelView] | None:
    """Candidates in order until they suffice, then without those not needed after all."""
    chosen: list[ModelView] = []
    queue = list(candidates)
    while not fits(forced + chosen):
        if not queue:
            return None
        chosen.append(queue.pop(0))
    # Most disturbing first: what the larger, earlier ones made superfluous stays.
    for model in list(reversed(chosen)):
        without = [m for m in chosen if m is not model]
        if fits(forced + without):
            chosen = without
    return forced + chosen


def _cannot(
    view: PoolView,
    forced: list[ModelView],
    candidates: list[ModelView],
    fits: Callable[[list[ModelView]], bool],
) -> Plan:
    """No set of evictable models suffices: is room on its way, or the guard off?"""
    in_transit = [m for m in view.models.values() if m.loading or m.unloading]
    if in_transit and fits(forced + candidates + in_transit):
        return Plan(PlanKind.SETTLE)
    if view.never_refuse and not view.max_models:
        # The guard is off: all that can leave leaves, then the load is tried.
        everyone = forced + candidates
        busy = tuple(m.model for m in everyone if m.busy)
        victims = tuple(m.model for m in everyone)
        if not victims:
            return Plan(PlanKind.FITS)
        return Plan(PlanKind.DRAIN if busy else PlanKind.EVICT, victims, busy)
    if not candidates and not in_transit and not forced and not view.max_models:
        # The memory is held by something that is no model of ours, residue of a
        # failed load or another process. Asking the pool evicts nobody here.
        return Plan(PlanKind.ASK)
    return Plan(PlanKind.BLOCKED)
