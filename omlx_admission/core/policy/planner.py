"""Which models must leave so that one target fits: least disturbance, whole set or none."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .model import ModelView, PoolView, Target


class PlanKind(enum.Enum):
    """What has to happen before the target can load."""

    FITS = "fits"  # nothing has to leave
    EVICT = "evict"  # idle models leave
    DRAIN = "drain"  # at least one busy model has to drain first
    SETTLE = "settle"  # room is on its way: a load or unload is under way
    BLOCKED = "blocked"  # what could leave does not suffice now
    ASK = "ask"  # no model is in the way: only the pool can tell
    NEVER = "never"  # larger than what of the ceiling is fixed, less what is pinned


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind and the models that leave, those that are busy last."""

    kind: PlanKind
    victims: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


_FITS = Plan(PlanKind.FITS)
_SETTLE = Plan(PlanKind.SETTLE)
_BLOCKED = Plan(PlanKind.BLOCKED)
_ASK = Plan(PlanKind.ASK)
_NEVER = Plan(PlanKind.NEVER)


def never_fits(target: Target, size: int, view: PoolView) -> bool:
    """Whether no amount of waiting makes room.

    Only pinned models count against it, and only the part of the ceiling that is fixed:
    what the moving part forbids is a shortage that passes.
    """
    pinned = _pinned_beside(target, view)
    if no_place_ever(target, view):
        return True
    group = view.exclusive.get(target)
    if group is not None and any(m.group == group for m in pinned):
        return True
    if view.fixed_ceiling <= 0 or view.never_refuse:
        return False
    return size > view.fixed_ceiling - sum(m.size for m in pinned)


def no_place_ever(target: Target, view: PoolView) -> bool:
    """Whether pinned models hold all places, and ``target`` needs one."""
    if not view.max_models or target.model in view.helpers:
        return False
    holders = [m for m in _pinned_beside(target, view) if m.model not in view.helpers]
    return len(holders) >= view.max_models


def too_large_now(target: Target, size: int, view: PoolView) -> bool:
    """Whether the ceiling of this instant forbids it, whatever leaves."""
    if view.ceiling <= 0 or view.never_refuse:
        return False
    return size > view.ceiling - sum(m.size for m in _pinned_beside(target, view))


def _pinned_beside(target: Target, view: PoolView) -> list[ModelView]:
    return [m for m in view.models.values() if m.pinned and m.model != target.model]


def fits(
    view: PoolView, size: int, leaving: Iterable[ModelView] = (), *, helper: bool = False
) -> bool:
    """Whether ``size`` bytes, and a place if it is no helper, are free without ``leaving``.

    Models count with their full size from the start of their load to the end of
    their unload, whatever the device reports meanwhile. Residue of models that
    left is reclaimed by an eviction, so it counts only where nothing leaves.
    """
    leaving = list(leaving)
    return _places(view, leaving, helper) and _bytes(view, size, leaving)


def _places(view: PoolView, leaving: list[ModelView], helper: bool) -> bool:
    if not view.max_models or helper:
        return True
    held = view.models.keys() - view.helpers
    return len(held - {m.model for m in leaving}) < view.max_models


def _bytes(view: PoolView, size: int, leaving: list[ModelView]) -> bool:
    if view.ceiling <= 0:
        return True
    booked = view.parked + sum(m.size for m in view.models.values())
    if not leaving:
        return max(view.used, booked) + size <= view.ceiling
    gone = sum(m.size for m in leaving)
    return max(0, max(view.committed, booked) - gone) + size <= view.ceiling


def plan(
    target: Target,
    size: int,
    view: PoolView,
    *,
    rank: Callable[[ModelView], tuple[Any, ...]] = lambda m: (m.last_used, m.model),
    keep: Iterable[str] = (),
) -> Plan:
    """Plan the eviction for ``target`` of ``size`` bytes.

    Args:
        rank: order among idle victims and among busy victims: lowest leaves first.
        keep: models that must not leave for this target now.
    """
    if never_fits(target, size, view):
        return _NEVER
    if too_large_now(target, size, view):
        return _BLOCKED  # nothing leaves for what does not fit even then
    own = view.models.get(target.model)
    # Another variant of the model itself, and another member of its exclusive
    # group, have to leave whatever room there is.
    forced = [own] if own is not None else []
    group = view.exclusive.get(target)
    if group is not None:
        forced += [m for m in view.models.values() if m is not own and m.group == group]
    if any(m.loading or m.unloading for m in forced):
        return _SETTLE
    kept = frozenset(keep)
    if any(m.model in kept or m.sessions for m in forced):
        return _BLOCKED
    # A pinned model may still be reloaded in another variant of itself.
    candidates = sorted(
        (
            m
            for m in view.models.values()
            if m.evictable and m not in forced and m.model not in kept
        ),
        key=lambda m: (m.busy, *rank(m)),
    )
    helper = target.model in view.helpers
    chosen = _smallest(
        forced, candidates, lambda leaving: fits(view, size, leaving, helper=helper)
    )
    if chosen is None:
        in_transit = [m for m in view.models.values() if m.loading or m.unloading]
        everybody = forced + candidates + in_transit
        held = kept or any(m.sessions for m in view.models.values())
        if in_transit and fits(view, size, everybody, helper=helper):
            return _SETTLE
        if view.never_refuse:
            chosen = _as_well_as_possible(view, forced, candidates, helper)
        if chosen is None and in_transit and view.never_refuse:
            return _SETTLE
        held = held or view.parked > 0
        if chosen is None and not everybody and not held and _places(view, [], helper):
            # The memory is held by residue of a failed load, or by another process:
            # asking the pool evicts no model, and its refusal names what is in the way.
            return _ASK
        if chosen is None:
            return _BLOCKED
    return _planned(chosen)


def _planned(chosen: list[ModelView]) -> Plan:
    if not chosen:
        return _FITS
    chosen = sorted(chosen, key=lambda m: m.busy)
    busy = tuple(m.model for m in chosen if m.busy)
    victims = tuple(m.model for m in chosen)
    return Plan(PlanKind.DRAIN if busy else PlanKind.EVICT, victims, busy)


def _smallest(
    forced: list[ModelView],
    candidates: list[ModelView],
    suffices: Callable[[list[ModelView]], bool],
) -> list[ModelView] | None:
    """Candidates in order until they suffice, then without those not needed after all."""
    chosen: list[ModelView] = []
    queue = iter(candidates)
    while not suffices(forced + chosen):
        following = next(queue, None)
        if following is None:
            return None
        chosen.append(following)
    # Most disturbing first: what the larger, earlier ones made superfluous stays.
    for model in reversed(chosen):
        without = [m for m in chosen if m is not model]
        if suffices(forced + without):
            chosen = without
    return forced + chosen


def _as_well_as_possible(
    view: PoolView, forced: list[ModelView], candidates: list[ModelView], helper: bool
) -> list[ModelView] | None:
    """With the guard off all that can leave leaves, then the load is tried anyway.

    The number of models stays a hard limit.
    """
    everyone = forced + candidates
    return everyone if _places(view, everyone, helper) else None


def after(view: PoolView, target: Target, size: int, leaving: Iterable[str] = ()) -> PoolView:
    """The view as it will be when ``target`` has replaced ``leaving`` and is in use."""
    gone = {v for v in leaving if v in view.models}
    models = {k: m for k, m in view.models.items() if k not in gone}
    freed = sum(view.models[v].size for v in gone)
    come = 0 if target.model in models else size
    models[target.model] = ModelView(
        target.model, size, target.variant, busy=True, group=view.exclusive.get(target)
    )
    return replace(
        view,
        models=models,
        ready=frozenset(),
        used=max(0, (view.committed if gone else view.used) - freed) + come,
        committed=max(0, view.committed - freed) + come,
    )
