"""The queue as the status document shows it: requests that wait, where, why, how long still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import Swap, Target, Waiter
from omlx_admission.observation.pool_snapshot import Facts
from omlx_admission.surfaces import reasons

#: Waiters and models listed one by one; the others are counted.
MOST_WAITERS = 100
MOST_MODELS = 50


def queue(facts: Facts) -> dict[str, Any]:
    """The document's ``queue``. ``active`` is false where this process has no queue (yet)."""
    admission = facts.admission
    if admission is None:
        return {
            "active": False,
            "waiting": 0,
            "limit": None,
            "budget_s": None,
            "closed": [],
            "parked": _parked(None, facts, 0.0),
            "models": [],
            "waiters": [],
            "omitted": 0,
        }
    policy, now = admission.policy, admission.now()
    models: list[dict[str, Any]] = []
    waiters: list[dict[str, Any]] = []
    order = reasons.order(policy)
    position, left = 0, 0.0
    ahead: Target | None = None
    for turn, target in enumerate(order[:MOST_MODELS], start=1):
        line = policy.waiters(target)
        left += _until_served(policy, target, line[0].size, facts, now)
        row = _model(policy, target, line, facts, now, turn, ahead, left)
        models.append(row)
        room = MOST_WAITERS - len(waiters)
        for at, waiter in enumerate(line[:room], start=1):
            context = waiter.context
            request = getattr(context, "request", None)
            if waiter.parked:
                request = getattr(getattr(context, "answer", None), "request", None)
            waiters.append(
                {
                    "request": None if request is None else request.id,
                    "model": target.model,
                    "age_s": _seconds(now - waiter.enqueued),
                    # A parked answer has no deadline.
                    "budget_left_s": None if waiter.parked else _seconds(waiter.deadline - now),
                    "position": position + at,
                    "reason": row["reason"],
                    "text": row["text"],
                }
            )
        position += len(line)
        ahead = target
    return {
        "active": not admission.broken,
        "waiting": policy.waiting,
        "limit": admission.config.max_queue,
        "budget_s": admission.config.max_wait_s,
        "closed": sorted(admission.gated),
        "parked": _parked(policy, facts, now),
        "models": models,
        "waiters": waiters,
        "omitted": policy.waiting - len(waiters),
    }


def _parked(policy: AdmissionPolicy | None, facts: Facts, now: float) -> dict[str, Any]:
    """Answers that were taken out of their engines for other models."""
    waiters: list[Waiter] = []
    if policy is not None and policy.parked:
        for target in policy.targets:
            waiters += [waiter for waiter in policy.waiters(target) if waiter.parked]
    since = min((waiter.enqueued for waiter in waiters), default=None)
    return {
        "answers": len(waiters),
        "bytes": facts.view.parked,
        "oldest_s": None if since is None else _seconds(now - since),
    }


def _model(
    policy: AdmissionPolicy,
    target: Target,
    line: Sequence[Waiter],
    facts: Facts,
    now: float,
    turn: int,
    ahead: Target | None,
    left: float,
) -> dict[str, Any]:
    head = line[0]
    code, text = reasons.reason(policy, target, head.size, facts.view, now, ahead)
    return {
        "model": target.model,
        "waiting": len(line),
        "turn": turn,
        "oldest_s": _seconds(now - head.enqueued),
        "estimate_s": _seconds(left),
        "reason": code,
        "text": text,
    }


def left_of(policy: AdmissionPolicy, swap: Swap, now: float) -> float:
    """Seconds until the target of a swap under way serves, by what was observed so far."""
    estimate = policy.estimates.swap(swap.target.model, swap.size)
    if swap.loading:
        return max(0.0, estimate - (now - swap.load_started))
    drain = max((policy.estimates.drain(v) for v in swap.victims), default=0.0)
    return max(0.0, drain - (now - swap.started)) + estimate


def _until_served(
    policy: AdmissionPolicy, target: Target, size: int, facts: Facts, now: float
) -> float:
    """Seconds between the service of the one before ``target`` and its own.

    Not the policy's own estimate, which tells one refused request when to come back
    and looks at every other model for that.
    """
    for swap in (policy.swap, policy.concurrent_load):
        if swap is not None and swap.target == target:
            return left_of(policy, swap, now)
    if target in facts.view.ready and target.model not in policy.gated:
        return 0.0
    # What is served before it will have to drain.
    return policy.estimates.swap(target.model, size) + policy.estimates.drain(target.model)


def _seconds(value: float) -> float:
    return round(max(0.0, value), 3)
