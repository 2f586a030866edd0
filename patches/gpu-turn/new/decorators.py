"""The turn as oMLX uses it: switching it on, its status, and decorators for its sites.

Without a turn each decorator calls straight through.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from . import sites
from . import turn as turns

logger = logging.getLogger(__name__)

ENV = "OMLX_SERIALIZE_ENGINE_GPU"
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def configure(settings: Any) -> bool:
    """Make the turn of this process, or none. Returns whether engines take turns.

    ``OMLX_SERIALIZE_ENGINE_GPU`` goes before ``settings.scheduler.serialize_engine_gpu``.
    """
    scheduler = getattr(settings, "scheduler", None)
    wanted = getattr(scheduler, "serialize_engine_gpu", False) is True
    word = os.environ.get(ENV, "").strip().lower()
    if word in _ON or word in _OFF:
        wanted = word in _ON
    elif word:
        logger.warning("%s=%r is neither on nor off; ignored", ENV, word)
    if not wanted:
        turns.current = None
    elif turns.current is None:
        turns.current = turns.GpuTurn()
        logger.info("Engines take turns on the GPU")
    return wanted


def status() -> dict[str, Any] | None:
    """Who has the GPU, who waits, and counts per model; None where no turns are taken."""
    if turns.current is None:
        return None
    snapshot = turns.current.snapshot()
    recent = [span._asdict() for span in snapshot.recent[-16:]]
    return {**asdict(snapshot), "recent": recent}


def _decorator(wrapper: Callable[[Any, Any, Any, Any], Any]) -> Decorator:
    """A decorator for methods, of one of the wrappers of `sites`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if turns.current is None:
                return method(instance, *args, **kwargs)
            wrapped = functools.partial(method, instance)
            return wrapper(wrapped, instance, args, kwargs)

        return call

    return decorate


burst = _decorator(sites.burst)
progress = _decorator(sites.progress)
clean_up = _decorator(sites.clean_up)
poll = _decorator(sites.poll)
vision = _decorator(sites.vision)
ahead = _decorator(sites.ahead)
embedding = _decorator(sites.of_model(sites.EMBEDDING))
reranker = _decorator(sites.of_model(sites.RERANKER))


def one_turn(site: sites.Site, name: str | None = None, model: Any = None) -> Decorator:
    """For work on the shared MLX thread: one call is one turn.

    ``name`` is its model's in logs; ``model`` is given where the work pauses between the
    steps of its model.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def work(*args: Any, **kwargs: Any) -> Any:
            if turns.current is None:
                return function(*args, **kwargs)
            who = sites.short(name or site.name)
            return sites.shared(site, who, functools.partial(function, *args, **kwargs), model)

        return work

    return decorate
