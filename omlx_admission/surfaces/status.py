"""The status document: one reading of pool, queue, history and sections as plain data.

``status.schema.json`` beside this file documents every field. The number in
``schema`` grows when a field is removed or changes its meaning; new fields may
appear without. Everything is read without a lock and in one step of the event
loop, and it costs the same with ten waiters as with ten thousand.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from importlib import resources
from typing import Any

from omlx_admission import __version__
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import PoolView
from omlx_admission.core.policy.model import Swap as Transition
from omlx_admission.observation.observe import Observer, Progress
from omlx_admission.observation.pool_snapshot import CacheBudget, Facts, Registered
from omlx_admission.surfaces import queue_view
from omlx_admission.surfaces.summary import summary

SCHEMA = 1


@cache
def schema_text() -> bytes:
    """The JSON schema of :func:`build`'s result (draft 2020-12)."""
    return resources.files(__package__).joinpath("status.schema.json").read_bytes()


def schema() -> dict[str, Any]:
    """The same, read."""
    content: dict[str, Any] = json.loads(schema_text())
    return content


def build(facts: Facts, observer: Observer, *, timeline: bool = False) -> dict[str, Any]:
    """The document. ``timeline`` adds the last ten minutes."""
    problems = [
        {
            "kind": p.kind,
            "model": p.model,
            "seconds": _seconds(p.seconds),
            "limit_s": None if p.limit_s is None else _seconds(p.limit_s),
            "text": p.text,
        }
        for p in observer.problems()
    ]
    if facts.admission is not None and facts.admission.broken:
        text = "the queue failed by a fault of its own; oMLX's own admission serves"
        problems.append(
            {"kind": "queue", "model": None, "seconds": 0.0, "limit_s": None, "text": text}
        )
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "omlx_admission": __version__,
        "omlx": facts.omlx,
        "at": round(observer.wall(), 3),
        "uptime_s": _seconds(observer.clock() - observer.began),
        "health": {"ok": not problems, "problems": problems},
        "memory": _memory(facts.view),
        "models": _models(facts, observer),
        "queue": queue_view.queue(facts),
        "swap": None,
        "beside": None,
        "swaps": [
            {
                "at": round(s.at, 3),
                "target": s.target,
                "victims": list(s.victims),
                "reason": s.reason,
                "drain_s": _seconds(s.drain_s),
                "load_s": None if s.load_s is None else _seconds(s.load_s),
                "estimate_s": _seconds(s.estimate_s),
                "result": s.result,
                "served": s.served,
            }
            for s in reversed(observer.swaps)
        ],
        "refusals": [
            {
                "at": round(r.at, 3),
                "model": r.model,
                "code": r.code,
                "text": r.text,
                "waited_s": _seconds(r.waited_s),
                "request": r.request,
            }
            for r in reversed(observer.refusals)
        ],
        "totals": {
            "swaps": sum(observer.swap_counts.values()),
            "refusals": observer.refusal_counts.total(),
            "load_failures": observer.load_failures.total(),
            "waits": _waits(observer),
        },
        "features": list(facts.features),
        "cache": _cache(facts.cache),
        "gpu_turn": None,
        "exposure": None,
    }
    if facts.admission is not None:
        policy, now = facts.admission.policy, facts.admission.now()
        document["swap"] = _transition(policy, policy.swap, now)
        document["beside"] = _transition(policy, policy.concurrent_load, now)
    document["summary"] = summary(document)
    document |= observer.sections()
    if timeline:
        document["timeline"] = observer.timeline()
    return document


def _memory(view: PoolView) -> dict[str, Any]:
    loading = sum(m.size for m in view.models.values() if m.loading)
    return {
        "ceiling_bytes": view.ceiling if view.ceiling > 0 and not view.never_refuse else None,
        "used_bytes": view.used,
        "resident_bytes": sum(m.size for m in view.models.values()) - loading,
        "reserved_bytes": loading,
        "max_models": view.max_models or None,
    }


def _models(facts: Facts, observer: Observer) -> list[dict[str, Any]]:
    waiting: Counter[str] = Counter()
    if facts.admission is not None:
        policy = facts.admission.policy
        for target in policy.targets:
            waiting[target.model] += len(policy.waiters(target))
    rows = [_model(r, facts, observer, waiting[r.model]) for r in facts.registered]
    # What holds memory comes first, then what is waited for.
    rows.sort(key=lambda m: (m["state"] in ("absent", "queued"), -m["waiting"], m["model"]))
    return rows


def _model(model: Registered, facts: Facts, observer: Observer, waiting: int) -> dict[str, Any]:
    view = facts.view.models.get(model.model)
    state = "absent"
    if view is None:
        state = "queued" if waiting else "absent"
    elif view.unloading and not model.draining:
        state = "unloading"
    elif view.loading:
        state = "loading"
    else:
        state = "draining" if model.draining else "resident"
    kind = {"loading": "load", "unloading": "unload", "draining": "drain"}.get(state, "")
    return {
        "model": model.model,
        "state": state,
        "bytes": view.size if view is not None else model.size,
        "leases": view.leases if view is not None else 0,
        "busy": view is not None and view.busy,
        "pinned": model.pinned,
        "since": _rounded(observer.since(model.model)) if view is not None else None,
        "last_used": _rounded(model.last_used),
        "waiting": waiting,
        "progress": _progress(observer.progress.get((kind, model.model)), observer.clock()),
    }


def _progress(progress: Progress | None, now: float) -> dict[str, Any] | None:
    if progress is None:
        return None
    return {
        "seconds": _seconds(now - progress.began),
        "estimate_s": (None if progress.estimate_s is None else _seconds(progress.estimate_s)),
        "limit_s": _seconds(progress.limit_s),
        "for": progress.detail or None,
    }


def _transition(
    policy: AdmissionPolicy, swap: Transition | None, now: float
) -> dict[str, Any] | None:
    if swap is None:
        return None
    estimate = policy.estimates.swap(swap.target.model, swap.size)
    began = swap.load_started if swap.loading else swap.started
    return {
        "target": swap.target.model,
        "victims": list(swap.victims),
        "phase": "loading" if swap.loading else "draining",
        "reason": swap.reason,
        "seconds": _seconds(now - began),
        "estimate_s": _seconds(estimate),
        "left_s": _seconds(queue_view.left_of(policy, swap, now)),
        "waiting": len(policy.waiters(swap.target)),
    }


def _waits(observer: Observer) -> dict[str, dict[str, Any]]:
    sums: dict[str, dict[str, Any]] = {}
    for (_model, outcome), waits in list(observer.waits.items()):
        row = sums.setdefault(outcome, {"count": 0, "seconds": 0.0, "longest_s": 0.0})
        row["count"] += waits.count
        row["seconds"] = _seconds(row["seconds"] + waits.total)
        row["longest_s"] = max(row["longest_s"], _seconds(waits.longest))
    return sums


def _cache(budget: CacheBudget | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    return {
        "limit_bytes": budget.limit,
        "used_bytes": budget.used,
        "engines": budget.engines,
        "shared": budget.shared,
        "one_budget": budget.shared == budget.engines,
    }


def _seconds(value: float) -> float:
    return round(max(0.0, value), 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
