"""Holding the turn round a piece of GPU work, and what comes before handing over.

Whoever takes the turn inherits an idle GPU: before it is handed over, the streams that
the holder's thread has used are synchronised on that thread (an MLX thread-local stream
is another stream, or none, on any other thread). An error there is the holder's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import turn as turns
from .turn import Hold, TurnAbandoned, TurnTimeout

logger = logging.getLogger(__name__)

#: Seconds that clean-up and work ahead of requests wait before they run without the turn.
OPTIONAL_WAIT_S = 5.0

#: Modules with a stream of their own, used by whichever thread calls into them.
_STREAM_MODULES = (
    "mlx_lm.generate",
    "mlx_vlm.generate.common",
    "mlx_vlm.generate.dispatch",
    "mlx_vlm.speculative.common",
)
_STREAM_TYPES = tuple(
    kind
    for name in ("Stream", "ThreadLocalStream")
    if (kind := getattr(mx, name, None)) is not None
)


@dataclass
class _Current:
    hold: Hold
    drain: Callable[[], None]


_local = threading.local()


@contextmanager
def holding(
    name: str,
    site: str,
    drain: Callable[[], None],
    *,
    optional: bool = False,
    **acquire: Any,
) -> Iterator[None]:
    """The turn for the body; then drain and hand over. ``acquire``: see `GpuTurn.acquire`.

    Raises:
        TurnAbandoned, TurnTimeout: there was no turn, and the body is not ``optional``.
        RuntimeError: the drain's error.
    """
    hold: Hold | None = None
    # An event loop must never wait here.
    if turns.current is not None and asyncio._get_running_loop() is None:
        if optional:
            acquire["limit_s"] = OPTIONAL_WAIT_S
        try:
            hold = turns.current.acquire(name, site, **acquire)
        except (TurnAbandoned, TurnTimeout):
            if not optional:
                raise
    if hold is None:
        yield
        return
    outer = getattr(_local, "current", None)
    _local.current = outer or _Current(hold, drain)
    try:
        try:
            yield
        except BaseException:
            drain_after_error(drain)
            raise
        drain()
    finally:
        _local.current = outer
        hold.release()


def drain_stream(stream: Any = None, *, libraries: bool = False) -> None:
    """Wait for ``stream``, this thread's default stream and, with ``libraries``, the
    streams of MLX's libraries.

    Raises:
        RuntimeError: what MLX said of the work in flight; all streams were asked first.
    """
    targets = [stream]
    if libraries:
        modules = (sys.modules.get(name) for name in _STREAM_MODULES)
        targets += [getattr(module, "generation_stream", None) for module in modules]
    first: RuntimeError | None = None
    for target in targets:
        if not isinstance(target, _STREAM_TYPES):
            continue
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


def drain_libraries() -> None:
    drain_stream(libraries=True)


def drain_after_error(drain: Callable[[], None]) -> None:
    """Drain where the work has failed already: its own error is the one to raise."""
    try:
        drain()
    except Exception as error:  # noqa: BLE001
        logger.debug("Draining the GPU after an error: %s", error)


# --- pauses in long work ---------------------------------------------------------------


def breathe() -> None:
    """Between two steps of long work: those who wait have their turn first."""
    now: _Current | None = getattr(_local, "current", None)
    if now is not None:
        now.hold.breathe(now.drain)


def pausing(items: Any) -> Any:
    """The same items; before every one but the first, others have their turn.

    For use inside a turn. Whatever has no items is handed back as it is.
    """
    if turns.current is None or not hasattr(items, "__iter__"):
        return items
    return _with_breaths(items)


def steps(items: Any, site: str, name: str | None = None) -> Any:
    """The same items, all of them one turn with pauses, from the first ``next`` until
    they end or are closed. Whoever uses this closes it."""
    if turns.current is None:
        return items
    return _turn_of(items, site, os.path.basename((name or site).rstrip("/")))


def _turn_of(items: Any, site: str, name: str) -> Iterator[Any]:
    try:
        with holding(name, site, drain_libraries):
            yield from _with_breaths(items)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _with_breaths(items: Any) -> Iterator[Any]:
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
        breathe()
