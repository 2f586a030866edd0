"""Holding the turn round a piece of GPU work, and what comes before handing over.

The next holder inherits an idle GPU: before it is handed over, the streams that
the holder's thread has used are synchronised on that thread (a thread-local stream means
another stream, or none, on any other). An error there is the holder's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import turn as gpu_turn
from .turn import GpuTurn, Hold, TurnAbandoned, TurnTimeout

logger = logging.getLogger("omlx.gpu_turn")


#: Seconds that optional work (clean-up, cache clears) waits before it goes on without.
OPTIONAL_WAIT_S = 5.0

#: Modules that keep a stream of their own, used by every caller.
_STREAM_MODULES = (
    "mlx_lm.generate",
    "mlx_vlm.generate.common",
    "mlx_vlm.generate.dispatch",
    "mlx_vlm.speculative.common",
)


def drain(stream: Any = None, *, modules: bool = False) -> None:
    """Wait until ``stream`` and the calling thread's default stream have finished, and
    with ``modules`` the streams that MLX's libraries keep for their own work.

    Raises:
        RuntimeError: what MLX said of the work in flight; all streams were asked first.
    """
    import mlx.core as mx

    targets: list[Any] = [stream] if isinstance(stream, _stream_types()) else []
    if modules:
        for name in _STREAM_MODULES:
            target = getattr(sys.modules.get(name), "generation_stream", None)
            if isinstance(target, _stream_types()):
                targets.append(target)
    first: RuntimeError | None = None
    for target in targets:
        try:
            mx.synchronize(target)
        except RuntimeError as error:
            # This thread never used it, so nothing of it is in flight.
            if "no Stream" not in str(error):
                first = first or error
    try:
        mx.synchronize()
    except RuntimeError as error:
        first = first or error
    if first is not None:
        raise first


def _stream_types() -> tuple[type, ...]:
    import mlx.core as mx

    return tuple(
        kind
        for name in ("Stream", "ThreadLocalStream")
        if (kind := getattr(mx, name, None)) is not None
    )


def drain_after_error(drain_now: Callable[[], None], name: str) -> None:
    """Drain where the work has failed already: its own error is the one to raise."""
    try:
        drain_now()
    except Exception as error:  # it would hide the first error
        logger.debug("GPU turn: draining '%s' after an error: %s", name, error)


def on_event_loop() -> bool:
    """Whether an event loop runs in this thread: it must never wait for the turn."""
    return asyncio._get_running_loop() is not None


@dataclass
class _Current:
    hold: Hold
    drain: Callable[[], None]


_local = threading.local()


@contextmanager
def holding(
    name: str,
    site: str,
    drain_now: Callable[[], None],
    *,
    optional: bool = False,
    **acquire: Any,
) -> Iterator[None]:
    """The turn for the body; then drain and hand over. ``acquire``: see `GpuTurn.acquire`.

    ``optional`` work does not fail for want of a turn: after `OPTIONAL_WAIT_S`, or where
    its engine closes, it runs without.

    Raises:
        TurnAbandoned, TurnTimeout: the body was not run.
        RuntimeError: the drain's error.
    """
    turn = gpu_turn.current
    hold = None if turn is None else _acquired(turn, name, site, optional, acquire)
    if turn is None or hold is None:
        yield
        return
    outer = getattr(_local, "current", None)
    _local.current = outer or _Current(hold, drain_now)
    try:
        try:
            yield
        except BaseException as error:
            # Seen while the turn is still held: the log says who held it and who waited.
            turn.listener.failed(error, name)
            drain_after_error(drain_now, name)
            raise
        try:
            drain_now()
        except BaseException as error:
            turn.listener.failed(error, name)
            raise
    finally:
        _local.current = outer
        hold.release()


def _acquired(
    turn: GpuTurn, name: str, site: str, optional: bool, acquire: dict[str, Any]
) -> Hold | None:
    """The turn, once it is there; None: go on without."""
    if on_event_loop():
        return None
    if optional:
        acquire["limit_s"] = OPTIONAL_WAIT_S
    try:
        return turn.acquire(name, site, **acquire)
    except (TurnAbandoned, TurnTimeout):
        if not optional:
            raise
    except Exception as error:  # no fault of the turn ends the work
        turn.listener.broken(error)
    return None


def held(
    name: str,
    site: str,
    call: Callable[[], Any],
    drain_now: Callable[[], None],
    *,
    optional: bool = False,
    **acquire: Any,
) -> Any:
    """Run ``call`` with the turn, as `holding` does its body."""
    with holding(name, site, drain_now, optional=optional, **acquire):
        return call()


def yield_turn() -> None:
    """Between two steps of long work: let those who wait have their turn first.

    Work whose engine closes meanwhile goes on without the turn: it stops where it looks
    for that itself, and the teardown waits for it.
    """
    now: _Current | None = getattr(_local, "current", None)
    if now is not None:
        with contextlib.suppress(TurnAbandoned):
            now.hold.yield_turn(now.drain)


class YieldingIterator:
    """An iterator's items, with a pause for others before every one but the first."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._items)
        else:
            yield_turn()
        return next(self._iterator)

    def close(self) -> None:
        """Close the generator behind it, if it is one."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)
