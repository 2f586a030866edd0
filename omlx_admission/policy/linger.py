"""Is it worth keeping an idle model a while? Only if it has shown that it comes back."""

from __future__ import annotations

from collections.abc import Callable

from omlx_admission.policy.model import ModelView, PoolView, Target

#: Evidence older than this many seconds is forgotten.
_MEMORY_S = 600.0


class Linger:
    """Idle times of models, and which targets came back soon after they were given up.

    ``length`` tells h in seconds for a model: waiting up to one switch cost before
    switching is the ski-rental rule, never more than twice the clairvoyant's cost.
    """

    def __init__(self, length: Callable[[str], float]) -> None:
        self._length = length
        self._idle_since: dict[str, float] = {}
        self._given_up: dict[Target, float] = {}
        self._comes_back: dict[Target, float] = {}

    def observe(self, view: PoolView, now: float) -> None:
        """Note who is idle since when."""
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

    def gave_up(self, target: Target, now: float) -> None:
        """``target`` leaves memory for another one."""
        idle_since = self._idle_since.get(target.model, now)
        self._given_up[target] = idle_since
        if now - idle_since >= self._length(target.model):
            # It had its chance to come back and did not take it.
            self._comes_back.pop(target, None)
        if len(self._given_up) > 256:
            old = [t for t, then in self._given_up.items() if now - then > _MEMORY_S]
            for target in old:
                del self._given_up[target]

    def wanted(self, target: Target, now: float) -> None:
        """Somebody asks for ``target``, which does not serve."""
        given_up = self._given_up.pop(target, None)
        if given_up is not None and now - given_up <= self._length(target.model):
            # It was wanted again sooner than its swap was worth: ping-pong.
            self._comes_back[target] = now

    def until(self, model: ModelView, now: float) -> float | None:
        """When the linger of an idle model ends; None if it need not be kept."""
        if model.target not in self._comes_back:
            return None
        since = self._idle_since.get(model.model)
        if since is None:
            return None
        end = since + self._length(model.model)
        return end if end > now else None
