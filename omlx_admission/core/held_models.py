"""A request that holds one model and asks for another must not wait for itself.

Two things can be in its way that only its own end would remove: the model it holds
leaves no room for the one it asks for, or that model drains for another request while
the request stands in the queue behind. Neither ever ends by waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from . import request as requests
from .policy.model import PoolView, Target
from .policy.planner import never_fits


def _nothing() -> None:
    """Nothing is kept, so nothing is handed back."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldModels:
    """What the asking request holds itself.

    Attributes:
        leased: models that its route leased: in use, it cannot do without them.
        kept: models that are kept for it, though its route took no lease.
        hand_back: gives back what is kept.
    """

    leased: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    hand_back: Callable[[], None] = field(default=_nothing)

    def __bool__(self) -> bool:
        return bool(self.leased or self.kept)


#: The usual case.
NO_MODELS = HeldModels()


def conflicts_with_held(
    target: Target,
    size: int,
    view: PoolView,
    own: Collection[str],
    impossible: Callable[[Target, int, PoolView], bool] = never_fits,
) -> bool:
    """Whether ``target`` can never be loaded while the models in ``own`` are in use.

    ``impossible`` tells, with those as pinned ones.
    """
    held = view.models.keys() & set(own)
    if target.model in held:
        return target not in view.ready
    models = {
        name: replace(model, pinned=True) if name in held else model
        for name, model in view.models.items()
    }
    return bool(held) and impossible(target, size, replace(view, models=models))


def held_by_request(model_id: str) -> HeldModels:
    """What the current request holds while it asks for ``model_id``, for the queue."""
    request = requests.current.get()
    if request is None or not request.handed:
        return NO_MODELS
    leased = frozenset(m for m, h in request.handed.items() if h.leased)
    kept = frozenset(m for m, h in request.handed.items() if h.kept) - leased
    if not leased and not kept:
        return NO_MODELS

    def hand_back() -> None:
        for model in kept:
            for lease in request.handed[model].kept:
                lease.let_go()
            request.handed[model].kept.clear()

    return HeldModels(leased, kept, hand_back)
