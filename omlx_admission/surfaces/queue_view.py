"""The queue as the status document shows it: who waits, where, why, how long still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omlx_admission.policy.admission import AdmissionPolicy
from omlx_admission.policy.model import Target, Waiter
from omlx_admission.runtime.facts import Facts
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
            "models": [],
            "waiters": [],
            "omitted": 0,
        }
    policy, now = admission.policy, admission.now()
    models: list[dict[str, Any]] = []
    waiters: list[dict[str, Any]] = []
    order = reasons.order(policy)
    position = 0
    ahead: Target | None = None
    for turn, target in enumerate(order[:MOST_MODELS], start=1):
        line = policy.waiters(target)
        row = _model(policy, target, line, facts, now, turn, ahead)
        models.append(row)
        room = MOST_WAITERS - len(waiters)
        for at, waiter in enumerate(line[:room], start=1):
            request = getattr(waiter.context, "request", None)
            waiters.append(
                {
                    "request": None if request is None else request.id,
                    "model": target.model,
                    "age_s": _seconds(now - waiter.enqueued),
                    "budget_left_s": _seconds(waiter.deadline - now),
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
        "limit": admission.settings.max_queue,
        "budget_s": admission.settings.max_wait_s,
        "closed": sorted(admission.gated),
        "models": models,
        "waiters": waiters,
        "omitted": policy.waiting - len(waiters),
    }


def _model(
    policy: AdmissionPolicy,
    target: Target,
    line: Sequence[Waiter],
    facts: Facts,
    now: float,
    turn: int,
    ahead: Target | None,
) -> dict[str, Any]:
    head = line[0]
    code, text = reasons.reason(policy, target, head.size, facts.view, now, ahead)
    return {
        "model": target.model,
        "waiting": len(line),
        "turn": turn,
        "oldest_s": _seconds(now - head.enqueued),
        "estimate_s": _seconds(policy.estimate(target, head.size, facts.view, now)),
        "reason": code,
        "text": text,
    }


def _seconds(value: float) -> float:
    return round(max(0.0, value), 3)
