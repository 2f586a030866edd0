"""What a request holds: leases that its route took, and those that are kept for it.

Routes lease some hand-outs and leave others unprotected: speech, load routes and
benchmarks are handed an engine that any load may evict before its first use.
Such a hand-out is leased here until its request ends; a job that a request began
(a benchmark) keeps its own until its task ends.

A request that holds a model must not wait for itself. So a second question of the same
request for the same engine is answered at once, even while that model drains
(``/v1/embeddings`` asks again after its 200 is out), and the queue is told which models
are in use by the very request that asks (``held_models.held_by_request``).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import request as requests
from .engines import lives


class Kept:
    """A lease that the caller did not ask for; given back once, however often it is let go."""

    __slots__ = ("_give_back", "_task")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._task = asyncio.current_task()

    def __bool__(self) -> bool:
        return self._give_back is not None

    def let_go(self, *_: object) -> None:
        """Give the lease back, if that has not happened yet."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def moved(self, give_back: Callable[[], None]) -> None:
        """The lease is another one now, which is given back by ``give_back``."""
        if self._give_back is not None:
            self._give_back = give_back

    def request_ended(self) -> None:
        """Let go, unless a task that outlives the request was handed the engine."""
        task = self._task
        if task is None or task.done() or task is asyncio.current_task():
            self.let_go()
        else:
            task.add_done_callback(self.let_go)

    def job_began(self) -> None:
        """The request has ended already: its job holds the engine as long as it runs."""
        if self._task is None:
            self.let_go()
        else:
            self._task.add_done_callback(self.let_go)


@dataclass(slots=True)
class Holding:
    """One model as it was handed to its holder.

    Attributes:
        engine: a weak reference; an engine that the pool lets go must not live on here.
        leased: leases that the route took and has not released yet.
        kept: leases that are kept for it.
        lapsed: leases that the route took on an engine that the model has no more.
    """

    engine: Callable[[], Any]
    force_lm: bool
    settings: object | None
    leased: int = 0
    kept: list[Kept] = field(default_factory=list)
    lapsed: int = 0


def no_engine() -> None:
    """The engine of a lease that does not count any more."""


def note(
    engine: Any,
    model_id: str,
    lease: bool,
    force_lm: bool,
    settings: object | None,
    give_back: Callable[[], None] | None = None,
) -> bool:
    """Remember what the current request was handed, and whether it leased it itself.

    A lease that it did not ask for is passed to it by what gives it back. False where
    there is no request to remember it; then the lease is given back at once.
    """
    request = requests.current.get()
    if request is None:
        if give_back is not None:
            give_back()
        return False
    # Whatever was refused before, this is what the route goes on with.
    request.refusal = None
    holding = request.handed.get(model_id)
    if holding is None or holding.engine() is not engine:
        holding = _begin(request, holding, engine, model_id, force_lm, settings)
    if give_back is not None:
        _keep(request, holding, Kept(give_back))
    if holding is None:
        return False
    if lease:
        holding.leased += 1
    return True


def _begin(
    request: requests.Request,
    before: Holding | None,
    engine: Any,
    model_id: str,
    force_lm: bool,
    settings: object | None,
) -> Holding | None:
    """Another engine than ``before``; None for an object that cannot be referenced weakly."""
    try:
        reference: Callable[[], Any] = weakref.ref(engine)
    except TypeError:
        return None
    holding = request.handed[model_id] = Holding(reference, force_lm, settings)
    if before is not None:
        holding.kept, holding.lapsed = before.kept, before.leased + before.lapsed
    return holding


def _keep(request: requests.Request, holding: Holding | None, kept: Kept) -> None:
    if holding is not None:
        holding.kept.append(kept)
    if request.ended:
        kept.job_began()
    else:
        request.at_end(kept.request_ended)


def released_by_route(model_id: str) -> Callable[[], Any] | None:
    """The current request released a lease that its route had taken.

    Returns a reference to the engine that it was taken on, None where nothing is known.
    """
    request = requests.current.get()
    holding = request.handed.get(model_id) if request is not None else None
    if holding is not None and holding.lapsed:
        holding.lapsed -= 1
        return no_engine
    if holding is None or holding.leased <= 0:
        return None
    holding.leased -= 1
    held: Callable[[], Any] = holding.engine
    return held


def let_go(model_id: str) -> None:
    """Give back what is kept for the current request of this model.

    Called where the holder itself says that it needs the model no more: it unloads it,
    or wants it in another variant.
    """
    request = requests.current.get()
    holding = request.handed.get(model_id) if request is not None else None
    if holding is not None:
        while holding.kept:
            holding.kept.pop().let_go()


def held_engine(
    entry: Any, model_id: str, force_lm: bool, settings: object | None, unloading: bool
) -> Any:
    """The engine that the current request holds and asks for again, or None.

    It is in use until this request ends, whatever is decided about it meanwhile: to
    wait for its drain would be to wait for oneself.
    """
    request = requests.current.get()
    holding = request.handed.get(model_id) if request is not None else None
    if holding is None or not (holding.leased or holding.kept) or unloading:
        return None
    if entry is None or entry.engine is None or entry.is_loading or entry.in_use <= 0:
        return None
    if not lives(entry.engine):
        return None
    same = holding.force_lm == force_lm and holding.settings == settings
    return entry.engine if same and holding.engine() is entry.engine else None


def holds(request: requests.Request, model_id: str, engine: Any) -> bool:
    """Whether ``request`` was handed ``engine`` and has not given it back."""
    held: Holding | None = request.handed.get(model_id)
    return held is not None and held.engine() is engine and bool(held.leased or held.kept)


def leases(holding: Holding) -> int:
    """How many leases on its engine one request holds."""
    return holding.leased + sum(1 for lease in holding.kept if lease)
