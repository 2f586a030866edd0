"""Where oMLX takes the GPU turn. Without a turn, every function here calls straight through.

Teardown never asks for the turn. ``EngineCore.close`` blocks the event loop on the
engine's thread and ends the process after a minute, so whoever waits for the turn on
that thread is told to leave first (`leave`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from ..decode_activity import get_decode_activity
from . import turn as turns
from .holding import YieldingIterator, drain, drain_after_error, holding, yield_turn
from .turn import TurnAbandoned

logger = logging.getLogger(__name__)

ENV = "OMLX_SERIALIZE_ENGINE_GPU"
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")

#: Methods of speech-to-text models that decode one window of a file.
_SPEECH_WINDOWS = ("decode", "_generate_single_chunk", "decode_chunk")


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


# --- engines with a scheduler ---------------------------------------------------------


class _Engine:
    """What is kept per engine, on its scheduler. Plain flags: loop and engine thread."""

    __slots__ = ("closing", "error", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.closing = False
        self.error: BaseException | None = None


def _engine(scheduler: Any, core: Any = None) -> _Engine:
    engine = getattr(scheduler, "_gpu_turn_engine", None)
    if not isinstance(engine, _Engine):
        config = getattr(core or scheduler, "config", None)
        name = str(getattr(config, "model_name", "") or "engine").rstrip("/")
        engine = scheduler._gpu_turn_engine = _Engine(os.path.basename(name))
    return engine


def enter(core: Any) -> None:
    """The engine starts: it may wait for the turn."""
    scheduler = getattr(core, "scheduler", None)
    if turns.current is not None and scheduler is not None:
        _engine(scheduler, core).closing = False


def leave(core: Any) -> None:
    """The engine stops or closes: nothing on its thread waits for the turn any more."""
    scheduler = getattr(core, "scheduler", None)
    if turns.current is not None and scheduler is not None:
        _engine(scheduler, core).closing = True
        turns.current.abandon(scheduler)


def _engine_turn(
    scheduler: Any, site: str, drain_now: Callable[[], None], *, optional: bool = False
) -> AbstractContextManager[None]:
    engine = _engine(scheduler)
    return holding(
        engine.name,
        site,
        drain_now,
        optional=optional,
        owner=scheduler,
        alive=lambda: _say_decoding(scheduler),
        closing=lambda: engine.closing,
    )


def _say_decoding(scheduler: Any) -> None:
    """An engine that waits outside a step still decodes: without this the others would
    drop their short prefill chunks after the registry's TTL."""
    running = len(scheduler.running)
    if running:
        get_decode_activity().publish(scheduler._decode_activity_key, running)


def burst(method: Callable[..., Any]) -> Callable[..., Any]:
    """For ``EngineCore._step_burst``: one burst of steps is one turn.

    An error of the drain belongs to the requests that are still running; those that the
    burst has finished are delivered first. So it is raised by the next burst.
    """

    @functools.wraps(method)
    def step_burst(core: Any) -> Any:
        scheduler = core.scheduler
        if turns.current is None or scheduler is None:
            return method(core)
        engine = _engine(scheduler, core)
        error, engine.error = engine.error, None
        if error is not None:
            raise error
        outputs: Any = None

        def drain_what_ran() -> None:
            # A burst that issued nothing (held, throttled, idle) left nothing in flight.
            if outputs is None or any(output.has_work for output in outputs):
                drain(
                    scheduler._stream,
                    modules=bool(getattr(scheduler, "_vlm_mtp_active", None)),
                )

        try:
            with _engine_turn(scheduler, "decode burst", drain_what_ran):
                outputs = method(core)
        except TurnAbandoned:
            # The loop has been cancelled: it ends on this without a word.
            raise concurrent.futures.CancelledError from None
        except Exception as failed:
            if outputs is None:
                raise
            if scheduler.has_requests():
                engine.error = failed
            else:
                # Nobody is left to be told.
                logger.warning("Draining '%s' failed: %s", engine.name, failed)
        return outputs

    return step_burst


def clean_up(method: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Scheduler.fail_all_requests``: it must happen, with the turn or without."""

    @functools.wraps(method)
    def fail_all_requests(scheduler: Any) -> Any:
        if turns.current is None:
            return method(scheduler)
        engine = _engine(scheduler)
        engine.error = None  # everybody whom it concerned fails now
        with _engine_turn(
            scheduler,
            "failure clean-up",
            lambda: drain_after_error(lambda: drain(scheduler._stream), engine.name),
            optional=True,
        ):
            return method(scheduler)

    return fail_all_requests


def vision(method: Callable[..., Any]) -> Callable[..., Any]:
    """For the encoding of one chat's images and audio, on the engine's thread."""

    @functools.wraps(method)
    def process(engine: Any, *args: Any, **kwargs: Any) -> Any:
        core = getattr(getattr(engine, "_engine", None), "engine", None)
        scheduler = getattr(core, "scheduler", None)
        if turns.current is None or scheduler is None:
            return method(engine, *args, **kwargs)
        try:
            with _engine_turn(
                scheduler,
                "vision encoding",
                lambda: drain(scheduler._stream, modules=True),
            ):
                return method(engine, *args, **kwargs)
        except TurnAbandoned:
            raise RuntimeError("The model is being unloaded") from None

    return process


def ahead(method: Callable[..., Any]) -> Callable[..., Any]:
    """For work ahead of requests on an engine's thread (keep-warm)."""

    @functools.wraps(method)
    def work(core: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = getattr(core, "scheduler", None)
        if turns.current is None or scheduler is None:
            return method(core, *args, **kwargs)
        with _engine_turn(
            scheduler,
            "keep-warm",
            lambda: drain(scheduler._stream),
            optional=True,
        ):
            return method(core, *args, **kwargs)

    return work


# --- the shared MLX thread -------------------------------------------------------------


def _drain_shared() -> None:
    """What that thread may have in flight: its own stream and those of MLX's libraries."""
    drain(modules=True)


def one_turn(
    site: str, name: str | None = None, *, pauses_in: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For work on the shared MLX thread: one call is one turn.

    ``name`` is the model's in logs; by default that of the method's own object. The
    speech model ``pauses_in`` lets others have their turn before each of its windows.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def work(*args: Any, **kwargs: Any) -> Any:
            if turns.current is None:
                return function(*args, **kwargs)
            who = name or _name_of(args, site)
            with (
                holding(os.path.basename(who.rstrip("/")), site, _drain_shared),
                _pauses_before_windows(pauses_in),
            ):
                return function(*args, **kwargs)

        return work

    return decorate


def _name_of(args: tuple[Any, ...], site: str) -> str:
    owner = args[0] if args else None
    for attribute in ("model_name", "_model_name"):
        name = getattr(owner, attribute, None)
        if isinstance(name, str) and name:
            return name
    return site


@contextmanager
def _pauses_before_windows(model: Any) -> Iterator[None]:
    """Shadow the model's own methods meanwhile; no other thread uses it."""
    own = getattr(model, "__dict__", None)
    shadowed: list[str] = []
    for name in _SPEECH_WINDOWS:
        method = getattr(model, name, None)
        if own is None or not callable(method) or name in own:
            continue
        try:
            object.__setattr__(model, name, _pausing(method))
        except (AttributeError, TypeError):
            continue
        shadowed.append(name)
    try:
        yield
    finally:
        for name in shadowed:
            object.__delattr__(model, name)


def _pausing(method: Any) -> Any:
    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        yield_turn()
        return method(*args, **kwargs)

    return step


def pausing(items: Any) -> Any:
    """The same items; before every one but the first, others have their turn.

    For use inside a turn. Whatever has no items is handed back as it is.
    """
    if turns.current is None or not hasattr(items, "__iter__"):
        return items
    return YieldingIterator(items)


def steps(items: Any, site: str, name: str | None = None) -> Any:
    """The same items, all of them one turn with pauses, from the first ``next`` until
    they end or are closed. Whoever uses this closes it."""
    if turns.current is None:
        return items
    return _turn_of(YieldingIterator(items), site, os.path.basename((name or site).rstrip("/")))


def _turn_of(items: YieldingIterator, site: str, name: str) -> Iterator[Any]:
    try:
        with holding(name, site, _drain_shared):
            yield from items
    finally:
        items.close()
