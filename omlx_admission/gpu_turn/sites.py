"""The sites: which work takes the turn, under what name, and when it hands over.

A wrapper here is called as ``wrapper(wrapped, instance, args, kwargs)``, with ``wrapped``
bound to its instance. Without a turn of the process each calls straight through.

Teardown never asks for the turn. ``EngineCore.close`` blocks the event loop on the
engine's thread and ends the process after a minute, so whatever waits for the turn on
that thread is told to leave first (`leave`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from . import holding, length
from . import turn as turns
from .turn import TurnAbandoned

logger = logging.getLogger("omlx.gpu_turn")


@dataclass(frozen=True)
class Site:
    """One kind of GPU work.

    Attributes:
        name: as it is shown.
        note: what one turn is, and when it is handed over.
        steps: methods of the work's model between whose calls others get their turn.
        items: methods of the model between whose items they do.
    """

    name: str
    note: str
    steps: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


BURST = Site(
    "decode burst",
    "one burst a turn: decode, prefill chunks, MTP, prefix restore and what else a "
    "scheduler step does; longer beside long turns of others, shorter beside short ones",
)
PROMPT = Site(
    "prompt in one step",
    "others get their turn between two chunks, of a draft model's scoring too",
)
CLEAN_UP = Site(
    "failure clean-up",
    f"waits at most {holding.OPTIONAL_WAIT_S:.0f} s, then goes on without: clean-up must "
    "happen",
)
VISION = Site(
    "vision encoding",
    "one chat's images and audio a turn, from the encoder on: templates, text and the "
    "decoding of pictures take none",
)
KEEP_WARM = Site(
    "keep-warm",
    f"gives way to requests; runs without the turn after {holding.OPTIONAL_WAIT_S:.0f} s",
)
EMBEDDING = Site("embedding", "one forward a turn, inside any fairness wait of oMLX's own")
RERANKER = Site("reranker", "others get their turn between two forwards")
TEXT_TO_SPEECH = Site("text to speech", "one chunk of audio a turn", items=("generate",))
SPEECH_TO_TEXT = Site(
    "speech to text",
    "streams: one chunk a turn, and none where no audio has come; files: others get their "
    "turn between two windows where the model decodes window by window (Whisper, Parakeet, "
    "Qwen3-ASR), else the whole file is one turn",
    steps=("decode", "_generate_single_chunk", "decode_chunk"),
)
SPEECH_TO_SPEECH = Site(
    "speech to speech", "one file is one turn: its models offer no step between"
)
DIFFUSION = Site(
    "diffusion", "others get their turn between two denoising steps that mlx-vlm reports"
)
DFLASH = Site(
    "DFlash",
    "others get their turn between two events; a stream of its own library is waited for "
    "by the evaluation of each event only",
)


#: The ids of models by the path of their files, as far as their pool has told them.
models: dict[str, str] = {}


def short(name: str) -> str:
    """A model's name as it is shown: its id, else what its path says: the last part, or the
    repository where that part is the hash of a snapshot in a download cache."""
    known = models.get(name)
    if known is not None:
        return known
    parts = name.rstrip("/").split("/")
    if len(parts) > 2 and parts[-2] == "snapshots":
        return parts[-3].removeprefix("models--")
    return parts[-1] or name


# --- engines with a scheduler ---------------------------------------------------------


class EngineClosing(RuntimeError):
    """The model is being unloaded; work that had not begun is given up."""


class Engine:
    """What is kept per engine, on its scheduler. Loop and engine thread; plain flags."""

    __slots__ = ("closing", "error", "name", "turn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.closing = False
        self.error: BaseException | None = None
        self.turn: turns.GpuTurn | None = None  # that it asked for last


_ATTRIBUTE = "_gpu_turn_engine"


def name_of(core: Any) -> str:
    """The name of an engine core's model, or of a scheduler's."""
    name = getattr(getattr(core, "config", None), "model_name", None)
    if not isinstance(name, str) or not name:
        name = str(getattr(core, "_engine_id", "engine"))
    return short(name)


def engine_of(scheduler: Any, core: Any = None) -> Engine:
    """What is kept of this scheduler's engine; made at the first call."""
    state = getattr(scheduler, _ATTRIBUTE, None)
    if not isinstance(state, Engine):
        state = Engine(name_of(scheduler if core is None else core))
        setattr(scheduler, _ATTRIBUTE, state)
    return state


def enter(core: Any) -> None:
    """The engine starts: it may wait for the turn."""
    scheduler = getattr(core, "scheduler", None)
    if scheduler is not None and (turns.current is not None or hasattr(scheduler, _ATTRIBUTE)):
        engine_of(scheduler, core).closing = False


def leave(core: Any) -> None:
    """The engine stops or closes: nothing on its thread waits for the turn any more."""
    scheduler = getattr(core, "scheduler", None)
    if scheduler is not None and (turns.current is not None or hasattr(scheduler, _ATTRIBUTE)):
        state = engine_of(scheduler, core)
        state.closing = True
        if state.turn is not None:
            state.turn.abandon(scheduler)


def _engine_turn(
    core: Any,
    scheduler: Any,
    site: Site,
    drain_now: Callable[[], None],
    *,
    optional: bool = False,
) -> AbstractContextManager[None]:
    state = engine_of(scheduler, core)
    state.turn = turns.current
    return holding.holding(
        state.name,
        site.name,
        drain_now,
        optional=optional,
        owner=scheduler,
        alive=lambda: say_decoding(scheduler),
        closing=lambda: state.closing or getattr(core, "_closed", False),
    )


def say_decoding(scheduler: Any) -> None:
    """An engine that waits outside a step decodes all the same: without this the others
    would take the GPU for theirs after 2.5 s and give up their short prefill chunks."""
    activity = sys.modules.get("omlx.decode_activity")  # since 0.6.0
    running = len(scheduler.running)
    key = getattr(scheduler, "_decode_activity_key", None)
    if activity is not None and running and key is not None:
        activity.get_decode_activity().publish(key, running)


def burst(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """One burst of steps is one turn.

    An error of the drain belongs to the requests that are still running; those that the
    burst has finished are delivered first. So it is raised by the next burst.
    """
    scheduler = core.scheduler
    if scheduler is None or (turns.current is None and not hasattr(scheduler, _ATTRIBUTE)):
        return wrapped(*args, **kwargs)
    state = engine_of(scheduler, core)
    error, state.error = state.error, None
    if error is not None:
        raise error
    if turns.current is None:  # any more
        return wrapped(*args, **kwargs)
    outputs: Any = None

    def drain_what_ran() -> None:
        # A burst that issued nothing (held, throttled, idle) left nothing in flight.
        if outputs is None or any(getattr(step, "has_work", True) for step in outputs):
            holding.drain(
                scheduler._stream, modules=bool(getattr(scheduler, "_vlm_mtp_active", None))
            )

    try:
        with _engine_turn(core, scheduler, BURST, drain_what_ran), _paced(core, state.name):
            outputs = wrapped(*args, **kwargs)
    except TurnAbandoned:
        # The engine's loop ends on this quietly; it has been cancelled anyway.
        raise concurrent.futures.CancelledError from None
    except Exception as failed:
        if outputs is None:
            raise
        if scheduler.has_requests():
            state.error = failed
        else:
            # No request is left to be told.
            logger.warning("Draining '%s' failed: %s", state.name, failed)
    return outputs


_BUDGETS = ("decode_burst_budget_s", "decode_burst_budget_single_s")
_STEPS = "decode_burst_max_steps"


@contextmanager
def _paced(core: Any, name: str) -> Iterator[None]:
    """A burst's budget follows the turns that it had to wait for, see `length`; where bursts
    are switched off they stay so."""
    config = getattr(core, "config", None)
    turn = turns.current
    others = None if turn is None else turn.others_since(name)
    own = {key: getattr(config, key, 0) for key in (*_BUDGETS, _STEPS)}
    if others is None or own[_STEPS] <= 1 or min(own.values()) <= 0:
        yield
        return
    ours = {key: length.burst_s(own[key], *others) for key in _BUDGETS}
    # The cap is on what one burst may list, at oMLX's own lengths.
    longer = max(ours[key] / own[key] for key in _BUDGETS)
    ours[_STEPS] = int(own[_STEPS] * max(1.0, longer))
    for key, value in ours.items():
        setattr(config, key, value)
    try:
        yield
    finally:
        for key, value in ours.items():
            # The settings may have been changed meanwhile.
            if getattr(config, key) == value:
                setattr(config, key, own[key])


def progress(wrapped: Any, _scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Told between two chunks of a prompt that is prefilled within one step, where all of
    the chunk is computed: others get their turn."""
    result = wrapped(*args, **kwargs)
    holding.yield_turn()
    return result


def draft_progress(wrapped: Any, _tracker: Any, args: Any, kwargs: Any) -> Any:
    """The same of a prompt that a draft model scores or that is prefilled in part."""
    result = wrapped(*args, **kwargs)
    if str(kwargs.get("phase")).startswith("specprefill"):
        holding.yield_turn()
    return result


def clean_up(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Clean-up after an error must happen: it waits for the turn, though not for long."""
    state = engine_of(scheduler)
    state.error = None  # every request that it concerned fails now
    with _engine_turn(
        None,
        scheduler,
        CLEAN_UP,
        lambda: holding.drain_after_error(lambda: holding.drain(scheduler._stream), state.name),
        optional=True,
    ):
        return wrapped(*args, **kwargs)


def vision(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Images and audio of a chat are encoded in one turn, on the engine's thread. What
    comes before, for chats of text all there is, is done without."""
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:
        return wrapped(*args, **kwargs)

    def turn() -> AbstractContextManager[None]:
        drain = functools.partial(holding.drain, scheduler._stream, modules=True)
        return _engine_turn(core, scheduler, VISION, drain)

    work = (
        (engine, ("_compute_vision_features",)),
        (getattr(engine, "_vlm_model", None), ("get_input_embeddings",)),
    )
    try:
        with _from_first(work, turn):
            return wrapped(*args, **kwargs)
    except TurnAbandoned:
        name = engine_of(scheduler).name
        raise EngineClosing(f"model '{name}' is being unloaded") from None


def ahead(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Work ahead of requests on an engine's thread; it yields to closing."""
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:
        return wrapped(*args, **kwargs)
    with _engine_turn(
        core, scheduler, KEEP_WARM, lambda: holding.drain(scheduler._stream), optional=True
    ):
        return wrapped(*args, **kwargs)


# --- the shared MLX thread -------------------------------------------------------------


def drain_shared() -> None:
    """What that thread may have in flight: its default stream and the libraries'."""
    holding.drain(modules=True)


def shared(
    site: Site,
    name: str,
    call: Callable[[], Any],
    model: Any = None,
) -> Any:
    """Run ``call`` with the turn; where ``model`` has the site's steps, others get their
    turn between them."""
    with (
        holding.holding(name, site.name, drain_shared),
        _pauses_in(model, site),
    ):
        return call()


def of_model(site: Site) -> Callable[[Any, Any, Any, Any], Any]:
    """A wrapper for a model's own method: one call is one turn."""

    def wrapper(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(model, "model_name", None)
        name = short(name) if isinstance(name, str) and name else site.name
        return shared(site, name, functools.partial(wrapped, *args, **kwargs))

    return wrapper


def poll(wrapped: Any, backend: Any, args: Any, kwargs: Any, name: str | None = None) -> Any:
    """A look of a realtime transcription whether audio has come: the turn only if so."""
    site = SPEECH_TO_TEXT
    work: tuple[Any, tuple[str, ...]] = (backend, ("_decode",))
    if hasattr(backend, "_session"):
        # Of mlx-audio's session: where it encodes, begins, and reads what it decodes.
        work = (backend._session, ("_encode_mel", "_do_prefill", "_adapter_at"))
    with _from_first(
        (work,), lambda: holding.holding(name or site.name, site.name, drain_shared)
    ):
        return wrapped(*args, **kwargs)


@contextmanager
def _from_first(
    work: Sequence[tuple[Any, tuple[str, ...]]],
    turn: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """The turn from the first call of one of these methods to the end; from the beginning
    where one of them is not there."""
    taken = False
    with ExitStack() as held, ExitStack() as shadows:

        def take() -> None:
            nonlocal taken
            if not taken:
                held.enter_context(turn())
                taken = True

        def taking(method: Any) -> Any:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                take()
                return method(*args, **kwargs)

            return call

        for owner, names in work:
            if shadows.enter_context(_shadowed(owner, names, taking)) != len(names):
                take()
        yield


@contextmanager
def _pauses_in(model: Any, site: Site) -> Iterator[None]:
    with _shadowed(model, site.steps, _step), _shadowed(model, site.items, _items):
        yield


@contextmanager
def _shadowed(owner: Any, names: Iterable[str], make: Callable[[Any], Any]) -> Iterator[int]:
    """Replace methods of ``owner`` on the instance meanwhile; how many. No other thread
    uses it."""
    own = getattr(owner, "__dict__", None)
    shadowed: list[str] = []
    for name in names:
        method = getattr(owner, name, None)
        if own is None or not callable(method) or name in own:
            continue
        try:
            object.__setattr__(owner, name, make(method))
        except (AttributeError, TypeError):
            continue
        shadowed.append(name)
    try:
        yield len(shadowed)
    finally:
        for name in shadowed:
            object.__delattr__(owner, name)


def _step(method: Any) -> Any:
    @functools.wraps(method)
    def shadow(*args: Any, **kwargs: Any) -> Any:
        return step(method, None, args, kwargs)

    return shadow


def _items(method: Any) -> Any:
    @functools.wraps(method)
    def shadow(*args: Any, **kwargs: Any) -> Any:
        return pausing(method(*args, **kwargs))

    return shadow


def step(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """One step of long work inside a turn: others get theirs before it."""
    holding.yield_turn()
    return wrapped(*args, **kwargs)


def pausing(items: Any) -> Any:
    """The same items, inside a turn; before each but the first, others get theirs.

    What has no items is handed back as it is.
    """
    if turns.current is None or not hasattr(items, "__iter__"):
        return items
    return holding.YieldingIterator(items)


def steps(items: Any, site: Site, name: str | None = None) -> Any:
    """The same items, all of them one turn with pauses, from the first ``next`` until
    they end or are closed. The caller closes them."""
    if turns.current is None:
        return items
    return _turn_of(holding.YieldingIterator(items), site, short(name or site.name))


def _turn_of(items: holding.YieldingIterator, site: Site, name: str) -> Iterator[Any]:
    try:
        with holding.holding(name, site.name, drain_shared):
            yield from items
    finally:
        items.close()
