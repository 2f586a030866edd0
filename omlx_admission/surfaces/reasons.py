"""Why a model is waited for, in a word for machines and a sentence for people."""

from __future__ import annotations

from collections.abc import Iterable

from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import PoolView, Swap, Target
from omlx_admission.core.policy.planner import PlanKind, plan, too_large_now
from omlx_admission.core.refusal_text import ceiling_now

#: Every code, and what it means; the schema lists them too.
CODES = {
    "loading": "its model is being loaded",
    "making_room": "idle models are being unloaded for it",
    "draining": "a busy model finishes its requests first, and then leaves",
    "gate_closed": "its model is loaded, but makes room for one that was waited for longer",
    "full": "its model is loaded, and its engine works for as many as it takes",
    "behind": "another model's turn comes first",
    "resident_busy": "the models in the way are in use and still serve",
    "lingering": "an idle model is kept a moment because its requests keep coming back",
    "settling": "memory of a model that left is not free yet",
    "no_room": "memory is held by what no swap can move",
    "ceiling": "oMLX's memory ceiling is too low for it at the moment",
    "asking": "oMLX is asked again shortly",
}


def order(policy: AdmissionPolicy) -> list[Target]:
    """Targets in the order in which they will be served, as far as it is decided."""
    decided = [s.target for s in (policy.swap, policy.concurrent_load) if s is not None]
    waiting = policy.targets
    first = [t for t in decided if t in waiting]
    return [*first, *(t for t in waiting if t not in first)]


def reason(
    policy: AdmissionPolicy,
    target: Target,
    size: int,
    view: PoolView,
    now: float,
    ahead: Target | None,
) -> tuple[str, str]:
    """Code and sentence for requests that wait for ``target``; ``ahead`` is served first."""
    for swap in (policy.swap, policy.concurrent_load):
        if swap is not None and swap.target == target:
            return _own(swap, view)
    if target in view.ready and target.model not in policy.gated:
        running = view.models[target.model].leases
        return "full", f"it is loaded and works for {running} requests that came before"
    if target in view.ready:
        for_whom = policy.swap.target if policy.swap is not None else ahead
        other = f"'{for_whom.model}'" if for_whom is not None else "another model"
        return "gate_closed", f"it is loaded but makes room for {other}, which waited longer"
    if (swap := policy.swap) is not None:
        other = f"'{swap.target.model}'"
        if swap.loading or not swap.victims:
            return "behind", f"{other} is loaded first"
        return "behind", f"{other} comes first, for which {_names(swap.victims)} drains"
    if ahead is not None:
        return "behind", f"'{ahead.model}' was asked for earlier"
    return _undecided(policy, target, size, view, now)


def _own(swap: Swap, view: PoolView) -> tuple[str, str]:
    if not swap.loading:
        busy = [view.models[v] for v in swap.victims if v in view.models]
        running = sum(m.leases for m in busy)
        many = f"{running} running request{'s' if running != 1 else ''}"
        whom = _names(swap.victims) or "a busy model"
        return "draining", f"{whom} finishes {many} and makes room"
    leaving = [v for v in swap.victims if v in view.models and v != swap.target.model]
    if leaving:
        return "making_room", f"{_names(leaving)} is being unloaded"
    return "loading", "its model is being loaded"


def _undecided(
    policy: AdmissionPolicy, target: Target, size: int, view: PoolView, now: float
) -> tuple[str, str]:
    if too_large_now(target, size, view):
        return "ceiling", ceiling_now(size, view)
    wish = plan(target, size, view)
    if wish.kind is PlanKind.DRAIN:
        since = policy.wanted_since(target)
        age = policy.dials.age_for(policy.estimates.swap(target.model, size))
        left = max(0.0, age - (now - (now if since is None else since)))
        return (
            "resident_busy",
            f"{_names(wish.busy)} is in use; it makes room in {left:.0f} s at the latest",
        )
    if wish.kind is PlanKind.EVICT:
        return (
            "lingering",
            f"{_names(wish.victims)} is idle but kept a moment: its requests keep coming back",
        )
    if wish.kind is PlanKind.SETTLE:
        told = [m.model for m in view.models.values() if m.unloading and m.busy]
        if told:
            return "draining", f"{_names(told)} finishes what runs, and is unloaded"
        return "settling", "memory of a model that left is not free yet"
    if wish.kind is PlanKind.BLOCKED:
        return "no_room", "memory is held by what no swap can move"
    return "asking", "oMLX found no room just now and is asked again shortly"


def _names(models: Iterable[str]) -> str:
    return ", ".join(f"'{m}'" for m in models)
