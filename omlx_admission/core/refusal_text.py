"""The sentences of refusals: which model is in the way, how long, what to do.

They never mention a prompt or a context: agents that read "reduce context" in a
memory error delete their chat history.
"""

from __future__ import annotations

from collections.abc import Iterable

from .policy.admission import AdmissionPolicy
from .policy.model import ModelView, PoolView, Swap, Waiter
from .policy.planner import no_place_ever, too_large_now
from .policy.retry import part_read
from .port import Ask


def explain(
    policy: AdmissionPolicy,
    view: PoolView,
    ask: Ask,
    code: str,
    waited: float,
    hint: int,
    now: float,
    waiter: Waiter | None = None,
) -> str:
    """One text for a 503; ``waited`` and ``hint`` are seconds."""
    model = ask.target.model
    if code == "admission_queue_full":
        state = _state(policy, view, ask)
        first = f"Model '{model}' {state} and {policy.waiting} requests wait already"
    elif code == "model_busy":
        first = f"Model '{model}' {_state(policy, view, ask)} and this request allows no wait"
    else:
        first = f"Model '{model}' did not become available within {waited:.1f} s"
    parts = [first, in_the_way(policy, view, ask, now)]
    if waiter is not None and (ahead := policy.ahead_of(waiter)):
        parts.append(f"{ahead} other model{'s' if ahead > 1 else ''} come first")
    text = "; ".join(part for part in parts if part)
    return f"{text}. Try again in about {hint} s."


def _state(policy: AdmissionPolicy, view: PoolView, ask: Ask) -> str:
    """Why ``ask`` is not served at once, after the name of its model."""
    model = ask.target.model
    if ask.target not in view.ready:
        return "is not loaded"
    if model not in policy.gated:
        return "is fully in use"
    for swap in (policy.swap, policy.concurrent_load):
        if swap is not None and model in swap.victims:
            return f"leaves for '{swap.target.model}'"
    return "leaves for another model"


def in_the_way(policy: AdmissionPolicy, view: PoolView, ask: Ask, now: float) -> str:
    """What holds the memory that ``ask`` needs, in one clause; may be empty."""
    if too_large_now(ask.target, ask.size, view):
        return ceiling_now(ask.size, view)
    late = {
        load.target.model: _late(load, view, now)
        for load in policy.loads
        if policy.is_late(load, now)
    }
    loading = [m.model for m in view.models.values() if m.loading]
    if ask.target.model in loading:
        return f"it is loading now{late.get(ask.target.model, '')}"
    if ask.target in view.ready and ask.target.model not in policy.gated:
        return f"{view.models[ask.target.model].leases} requests run on it"
    busy = [m for m in view.models.values() if m.busy and m.model != ask.target.model]
    clauses = []
    if busy:
        clauses.append(f"{', '.join(map(_in_use, busy))} in use")
    if loading:
        names = ", ".join(f"'{m}'{late.get(m, '')}" for m in loading)
        clauses.append(f"{names} loading")
    return " and ".join(clauses)


def _late(load: Swap, view: PoolView, now: float) -> str:
    """How long a load has taken that should have ended, and how far it is if that shows."""
    part = part_read(load, view)
    read = "" if part is None else f", {part:.0%} read"
    return f" (for {now - load.load_started:.0f} s already{read})"


def _in_use(model: ModelView) -> str:
    """A model that is in use, and by how many; what may last without running is named."""
    if not model.leases:
        return f"'{model.model}'"
    parts = [f"{model.leases} running"]
    if model.unread:
        parts.append(f"{model.unread} of them for a client that does not read")
    if model.sessions:
        open_ = "an open realtime session" if model.sessions == 1 else "open realtime sessions"
        parts.append(f"{model.sessions} of them {open_}")
    return f"'{model.model}' ({', '.join(parts)})"


def ceiling_now(size: int, view: PoolView) -> str:
    """The clause about a ceiling that is too low at this instant for ``size`` bytes."""
    text = f"its {_gb(size)} are above the memory ceiling, {_gb(view.ceiling)} at the moment"
    pinned = sum(m.size for m in view.models.values() if m.pinned)
    if pinned:
        text += f" with {_gb(pinned)} of it pinned"
    if view.fixed_ceiling > view.ceiling:
        return f"{text} and {_gb(view.fixed_ceiling)} at most: other applications use the rest"
    return text


def too_large_text(ask: Ask, view: PoolView) -> str:
    """The text of a 507: sizes in GB, and the pinned models that count against it."""
    pinned = [m for m in view.models.values() if m.pinned and m.model != ask.target.model]
    text = (
        f"Model '{ask.target.model}' ({_gb(ask.size)}) does not fit under the memory "
        f"ceiling of {_gb(view.fixed_ceiling)}"
    )
    if no_place_ever(ask.target, view):
        names = ", ".join(f"'{m.model}'" for m in pinned if m.model not in view.helpers)
        return (
            f"Model '{ask.target.model}' cannot be loaded: OMLX_ADMISSION_MAX_MODELS allows "
            f"{view.max_models}, and {names} stays loaded because it is pinned. No wait can "
            f"change that: unpin a model, or raise OMLX_ADMISSION_MAX_MODELS."
        )
    group = view.exclusive.get(ask.target)
    rivals = [m.model for m in pinned if group and m.group == group]
    if rivals:
        return (
            f"Model '{ask.target.model}' cannot be loaded beside '{rivals[0]}', which is "
            f"pinned: of models with {group} on, only one can be loaded. No wait can change "
            f"that: unpin '{rivals[0]}', or switch {group} off for one of them."
        )
    if pinned:
        names = ", ".join(f"'{m.model}' ({_gb(m.size)})" for m in pinned)
        text += f", of which pinned models hold {names}"
    return (
        f"{text}. No wait can change that: unpin a model, raise the ceiling, "
        f"or use a smaller model."
    )


def in_use_text(ask: Ask, view: PoolView, own: Iterable[str]) -> str:
    """The text of a 507: the request itself uses what would have to leave."""
    sizes = [
        f"'{name}' ({_gb(view.models[name].size)})"
        for name in sorted(own)
        if name in view.models
    ]
    return (
        f"Model '{ask.target.model}' ({_gb(ask.size)}) cannot be loaded while this request "
        f"itself uses {' and '.join(sizes)}: there is no room for both under the memory "
        f"ceiling of {_gb(view.fixed_ceiling)}. No wait can change that: use smaller models, "
        f"or ask for one after the other."
    )


def leaves_text(ask: Ask, own: Iterable[str], hint: int) -> str:
    """The text of a 503: what the request itself uses is about to leave for others."""
    names = " and ".join(f"'{name}'" for name in sorted(own))
    return (
        f"Model '{ask.target.model}' is not loaded, and {names}, which this request itself "
        f"uses, has to leave for another model first. Try again in about {hint} s."
    )


def _gb(size: int) -> str:
    return f"{size / 1024**3:.2f} GB"
