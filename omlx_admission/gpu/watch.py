"""What happened on the GPU: exposure, faults, replays. Fed by hooks, read by status.

A fault is logged once per engine, class and event (`exposure.Event`), with the holder of
the turn and its waiters, or with what was busy where engines take no turns. A process whose
submissions the driver ignores ends itself where that is wanted: it would answer health
checks and generate nothing until it is restarted (oMLX issue 3706).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from omlx_admission.gpu.exposure import Event, Record
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
from omlx_admission.gpu.faults import GpuFault, classify, classify_text
from omlx_admission.gpu_turn import turn as gpu_turn

logger = logging.getLogger("omlx.admission")

_WHAT = {
    GpuFault.HANG: "hung the GPU",
    GpuFault.TIMEOUT: "kept the GPU longer than the driver allows",
    GpuFault.PAGE_FAULT: "touched memory that the GPU cannot reach",
    GpuFault.INTERACTIVITY: "was stopped by the system because it kept the display waiting",
    GpuFault.SUBMISSIONS_IGNORED: "is refused by the GPU driver until the server restarts",
    GpuFault.INNOCENT_VICTIM: "was discarded because other work failed on the GPU",
    GpuFault.OUT_OF_MEMORY: "found no GPU memory",
}


#: What an owner can set, told where it may help (`advice`).
ADVICE = (
    "two engines were busy on the GPU when it locked up; to let one at a time on it, set "
    'OMLX_SERIALIZE_ENGINE_GPU=1, or "serialize_engine_gpu": true under "scheduler" in '
    "oMLX's settings.json, and start oMLX again"
)


def advice(record: Record) -> str | None:
    """`ADVICE` where lockups were counted with two engines busy and without turns."""
    return ADVICE if record.count(busy=2, serialised=False) else None


class GpuFaultError(RuntimeError):
    """A GPU fault as a client reads it. The driver's text comes first, so that a
    client that classifies by text still can."""

    def __init__(self, error: BaseException, fault: GpuFault, engine: str) -> None:
        super().__init__(
            f"{error} [GPU fault {fault.value}: the work of model '{engine}' "
            f"{_WHAT[fault]}; its requests have ended and may be sent again]"
        )
        self.fault = fault


@dataclass
class Replays:
    """MTP reconcile replays: committed history that was computed again."""

    count: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0


@dataclass(frozen=True)
class Fault:
    """The last report of one class by one engine. ``at`` is ``time.time``."""

    engine: str
    fault: GpuFault
    text: str
    at: float
    circumstances: str


P = ParamSpec("P")
R = TypeVar("R")
_broken: set[str] = set()
_thread = threading.local()


def _raises_nothing(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R | None]:
    """The bookkeeping may fail; what it is about must not be hidden by that."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            if method.__name__ not in _broken:
                _broken.add(method.__name__)
                logger.exception(
                    "admission: the GPU watch (%s) failed, oMLX goes on without it",
                    method.__name__,
                )
            return None

    return call


@dataclass
class Watch:
    """One per process. Methods may be called from any thread and raise nothing.

    Attributes:
        recorder: the exposure ledger; None before the server knows its base path.
        exit: ends the process, given a reason; None where it must go on.
        on_lockup: called at a lockup with two engines busy, after it is counted, or None.
        turn: the turn that engines take, or None.
    """

    recorder: ExposureRecorder | None = None
    exit: Callable[[str], object] | None = None
    on_lockup: Callable[[], None] | None = None
    turn: Callable[[], gpu_turn.GpuTurn | None] = lambda: gpu_turn.current
    clock: Callable[[], float] = time.monotonic
    replays: Replays = field(default_factory=Replays)
    faults: dict[tuple[str, GpuFault], Fault] = field(default_factory=dict)
    busy_now: dict[str, float] = field(default_factory=dict)
    _event: Event = field(default_factory=Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @_raises_nothing
    def busy(self, engine: str, longest: int) -> None:
        """``engine`` has work, its longest request ``longest`` tokens."""
        if engine not in self.busy_now:
            self.busy_now[engine] = self.clock()
        if self.recorder is not None:
            self.recorder.busy(engine, longest=longest)

    @_raises_nothing
    def idle(self, engine: str) -> None:
        """``engine`` has no work, or is gone."""
        self.busy_now.pop(engine, None)
        if self.recorder is not None:
            self.recorder.idle(engine)

    @contextmanager
    def work(self, engine: str) -> Iterator[None]:
        """The body is GPU work of ``engine`` on this thread. A fault that it meets, and
        those that cleaning up after it meets on this thread, belong to this work."""
        _thread.engine, _thread.began, _thread.working = engine, self.clock(), True
        try:
            yield
        finally:
            _thread.working = False

    @staticmethod
    def engine_of_thread() -> str:
        """The engine that this thread works or last worked for, or the thread's name."""
        return getattr(_thread, "engine", None) or threading.current_thread().name

    def saw(self, error: BaseException, engine: str) -> GpuFault | None:
        """Look at an exception that GPU work of ``engine`` raised: count, log, perhaps end
        the process. None: it is no GPU fault."""
        fault = classify(error)
        if fault is None:
            return None
        self._note(fault, str(error), engine)
        if fault is GpuFault.SUBMISSIONS_IGNORED and self.exit is not None:
            self.leave()
            self.exit(f"the GPU driver ignores this process's submissions ({error})")
        return fault

    @_raises_nothing
    def leave(self) -> None:
        """The process ends itself now: what was counted is on disk."""
        if self.recorder is not None:
            self.recorder.leave()

    def saw_text(self, text: str, engine: str) -> GpuFault | None:
        """The same for an error text that oMLX made of an exception which it swallowed.

        It never ends the process: a text may quote anything.
        """
        fault = classify_text(text)
        if fault is not None:
            self._note(fault, text, engine)
        return fault

    @_raises_nothing
    def replayed(self, tokens: int, seconds: float, ok: bool, engine: str) -> None:
        """A reconcile replay of ``tokens`` committed tokens has ended."""
        with self._lock:
            self.replays.count += 1
            self.replays.tokens += tokens
            self.replays.seconds += seconds
            self.replays.failed += not ok
        logger.info(
            "admission: MTP reconcile replayed %d tokens of '%s' in %.2f s%s",
            tokens,
            engine,
            seconds,
            "" if ok else " and failed",
        )

    @_raises_nothing
    def _note(self, fault: GpuFault, text: str, engine: str) -> None:
        now = self.clock()
        began = self._began(now)
        key = (engine, fault)
        with self._lock:
            self._event = self._event.at(now, fault, began)
            repeat = key in self._event.reported
            self._event.reported[key] = False
        if not repeat:
            circumstances = self._circumstances(now) or "circumstances unknown"
            logger.error(
                "admission: GPU fault %s in '%s': %s; %s%s",
                fault.value,
                engine,
                text[:500],
                circumstances,
                f"; {ADVICE}" if self._may_help(fault) else "",
            )
            self.faults[key] = Fault(engine, fault, text[:500], time.time(), circumstances)
        if self.recorder is not None:
            self.recorder.fault(engine, fault, began=began)
        if self.on_lockup is not None and fault.is_lockup and len(self.busy_now) > 1:
            self.on_lockup()

    def _began(self, now: float) -> float:
        """When the work that failed on this thread began: where it waited for its turn
        first, with the turn."""
        began: float = getattr(_thread, "began", -math.inf)
        turn = self.turn()
        if getattr(_thread, "working", False) and turn is not None and turn.held():
            began = max(began, now - turn.snapshot().held_s)
        return began

    def _may_help(self, fault: GpuFault) -> bool:
        """Whether the advice may, and has not been given."""
        first = not any(known.is_lockup for _, known in self.faults)
        if self.on_lockup is not None or self.turn() is not None:
            return False
        return fault.is_lockup and first and len(self.busy_now) > 1

    @_raises_nothing
    def _circumstances(self, now: float) -> str:
        turn = self.turn()
        busy = ", ".join(
            f"{name} ({now - since:.1f} s)" for name, since in self.busy_now.copy().items()
        )
        if turn is None:
            return f"engines take no turns; busy: {busy or 'none'}"
        state = turn.snapshot()
        holder = (
            f"{state.holder} ({state.site}, {state.held_s:.2f} s)" if state.holder else "nobody"
        )
        waiting = ", ".join(f"{n} ({site}, {s:.2f} s)" for n, site, s in state.waiting)
        return f"turn held by {holder}; waiting: {waiting or 'nobody'}; busy: {busy or 'none'}"


#: The watch of this process.
watch = Watch()
