"""Is it worth keeping an idle model? Only where models have shown that they come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .model import ModelView, PoolView, Target

_T = TypeVar("_T")

#: Ping-pong of any model in the last so many seconds gives every model one linger
#: to prove itself: clients that take turns on several models arrive together.
_SHARED_S = 600.0

#: Models given up that are remembered.
_MOST = 256


class Linger:
    """Idle times of models, and which targets come back soon after they were given up.

    ``length`` tells h in seconds for a model: waiting up to one switch cost before
    switching is the ski-rental rule, never more than twice the clairvoyant's cost.
    """

    def __init__(self, length: Callable[[str], float]) -> None:
        self._length = length
        self._idle_since: dict[str, float] = {}
        self._given_up: dict[Target, float] = {}
        self._comes_back: dict[Target, bool] = {}
        self._ping_pong_until = float("-inf")

    def observe(self, view: PoolView, now: float) -> None:
        """Note which models are idle, and since when."""
        for model in view.models.values():
            if model.busy or model.loading:
                self._idle_since.pop(model.model, None)
            else:
                self._idle_since.setdefault(model.model, now)
        for gone in self._idle_since.keys() - view.models.keys():
            del self._idle_since[gone]

    def idle(self, model: str, now: float) -> None:
        """A request of ``model`` ended, or it was loaded: it is idle since now, if at all."""
        self._idle_since[model] = now

    def idle_since(self, model: str) -> float:
        """Since when ``model`` is idle; as far as is known, it never was in use."""
        return self._idle_since.get(model, float("-inf"))

    def gave_up(self, target: Target, now: float) -> None:
        """``target`` leaves memory for another one."""
        idle_since = self._idle_since.get(target.model, now)
        _put(self._given_up, target, idle_since)
        if now >= idle_since + self._length(target.model):
            # It had its chance to come back and did not take it.
            _put(self._comes_back, target, False)

    def wanted(self, target: Target, now: float) -> None:
        """A request asks for ``target``, which does not serve."""
        given_up = self._given_up.pop(target, None)
        if given_up is not None and now <= given_up + self._length(target.model):
            # It was wanted again sooner than its swap was worth: ping-pong.
            _put(self._comes_back, target, True)
            self._ping_pong_until = now + _SHARED_S

    def until(self, model: ModelView, now: float) -> float | None:
        """When the linger of an idle model ends; None if it need not be kept."""
        since = self._idle_since.get(model.model)
        if since is None:
            return None
        if not self._comes_back.get(model.target, now < self._ping_pong_until):
            return None
        end = since + self._length(model.model)
        return end if end > now else None


def _put(store: dict[Target, _T], key: Target, value: _T) -> None:
    """Store as newest; forget the oldest where there are many (variants have no bound)."""
    store.pop(key, None)
    store[key] = value
    if len(store) > _MOST:
        del store[next(iter(store))]
