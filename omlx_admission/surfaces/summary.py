"""One or two sentences on what goes on now, made from a status document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def summary(document: Mapping[str, Any]) -> str:
    """What a person wants to know first: what is being swapped, and what requests wait for."""
    swap, beside = document["swap"], document["beside"]
    parts = []
    if swap is not None:
        parts.append(_swap(swap, document["models"]))
    if beside is not None:
        parts.append(f"Beside that, {beside['target']} loads.")
    under_way = {s["target"] for s in (swap, beside) if s is not None}
    others = [m for m in document["models"] if m["state"] == "loading"]
    if names := [m["model"] for m in others if m["model"] not in under_way]:
        parts.append(f"oMLX loads {listed(names)}.")
    waiting = document["queue"]["waiting"] - sum(
        s["waiting"] for s in (swap, beside) if s is not None
    )
    if waiting > 0:
        models = [m["model"] for m in document["queue"]["models"]]
        wanted = dict.fromkeys(m for m in models if m not in under_way)
        what = listed(list(wanted)) or "a model"
        parts.append(f"{_wait(waiting, ' more' if parts else '')} for {what}.")
    if parts:
        return " ".join(parts)
    loaded = [m["model"] for m in document["models"] if m["state"] == "resident"]
    if not loaded:
        return "No request waits. No model is loaded."
    return f"No request waits. {listed(loaded)} {'is' if len(loaded) == 1 else 'are'} loaded."


def _swap(swap: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> str:
    target, estimate = swap["target"], seconds(swap["estimate_s"])
    waiting = f" {_wait(swap['waiting'])} for it." if swap["waiting"] else ""
    if swap["phase"] == "loading":
        gone = [v for v in swap["victims"] if v != target]
        instead = f" in place of {listed(gone)}" if gone else ""
        return (
            f"Loading {target}{instead}: {seconds(swap['seconds'])} so far, "
            f"about {estimate} expected.{waiting}"
        )
    running = sum(m["leases"] for m in models if m["model"] in swap["victims"])
    leaving = listed(swap["victims"]) or "another model"
    return (
        f"Making room for {target}: {leaving} finishes {running} running "
        f"request{'' if running == 1 else 's'}, {seconds(swap['seconds'])} so far; then "
        f"{target} loads in about {estimate}.{waiting}"
    )


def _wait(count: int, more: str = "") -> str:
    return f"{count}{more} request{' waits' if count == 1 else 's wait'}"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def seconds(value: float | None) -> str:
    """A duration for people; a dash where there is none."""
    if value is None:
        return "–"
    if 0 < value < 0.1:
        return f"{max(1, round(1000 * value))} ms"
    if value < 10:
        return f"{value:.1f} s"
    if value < 100:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if value < 172_800:
        return f"{value / 3600:.0f} h"
    return f"{value / 86_400:.0f} days"
