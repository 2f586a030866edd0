"""The GPU turn: one thread's work on the GPU at a time, handed over first come, first served.

The waits of this module are the dangerous ones. oMLX closes an
engine by blocking its event loop on the engine's thread and ends the process
after 60 s, so a thread that waits here must leave at once when its engine
closes (`GpuTurn.abandon`), and no wait is without a limit. Nothing here needs
the event loop: a holder releases on its own thread.

Lock order: the turn first, oMLX's ``_mx_buffer_access_lock`` second. The mutex
in here is innermost and held for microseconds.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import length
from .queue import TurnQueue

logger = logging.getLogger("omlx.gpu_turn")

#: Seconds between two looks of a waiter at its engine, the holder and the clock, and
#: between two calls of its ``alive``. oMLX forgets a decoding engine after 2.5 s.
LOOK_S = 0.5
#: Turns remembered for the status.
RECENT = 256


class TurnAbandoned(Exception):
    """The waiter's engine is closing: there is nothing left to wait for."""


class TurnTimeout(RuntimeError):
    """The turn did not come within the limit; the text says who had it, for a client."""


class Listener:
    """What is said of work with the turn, while it is still held; this one is silent."""

    def failed(self, error: BaseException, name: str) -> None:
        """The work of ``name``, or its drain, raised ``error``."""

    def stuck(self, text: str) -> None:
        """A waiter has given up on a turn that was never handed over while it waited."""

    def broken(self, error: BaseException) -> None:
        """The turn itself failed: the work runs without it."""
        logger.error("GPU turn: failed, work goes on without it", exc_info=error)


class Span(NamedTuple):
    """One turn. Times are seconds of ``time.monotonic``."""

    name: str
    site: str
    asked: float
    start: float
    end: float


@dataclass
class Totals:
    """Counts of one contender since the process began."""

    turns: int = 0
    held_s: float = 0.0
    waited_s: float = 0.0
    longest_held_s: float = 0.0
    longest_wait_s: float = 0.0


class _Ticket:
    """One request for the turn, by one thread."""

    __slots__ = (
        "abandoned",
        "asked",
        "depth",
        "name",
        "owner",
        "reported",
        "site",
        "start",
        "thread",
        "wake",
    )

    def __init__(self, name: str, site: str, owner: Hashable, asked: float) -> None:
        self.name = name
        self.site = site
        self.owner = owner
        self.thread = threading.current_thread()
        self.asked = asked
        self.start = 0.0
        self.depth = 1
        self.wake: Any = None  # a lock that the end of the wait releases
        self.abandoned = False
        self.reported = False


class Hold:
    """A turn being held; give it back once, on the thread that took it."""

    __slots__ = ("_alive", "_closing", "_ticket", "_turn")

    def __init__(
        self,
        turn: GpuTurn,
        ticket: _Ticket,
        alive: Callable[[], None] | None = None,
        closing: Callable[[], bool] | None = None,
    ) -> None:
        self._turn = turn
        self._ticket: _Ticket | None = ticket
        self._alive = alive
        self._closing = closing

    def release(self) -> None:
        """Hand the turn to the next waiter. Never raises; a second call does nothing."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._turn._release(ticket)

    def yield_turn(self, drain: Callable[[], None]) -> None:
        """In the middle of long work: let others have their turn, then wait for it again.

        Does nothing where no thread waits, where this hold lies inside another one, or
        before a quantum of time has been held.
        ``drain`` waits for what this thread has in flight; its error is raised here and
        the turn is kept, for the holder's own clean-up.

        Raises:
            TurnAbandoned: the engine closes meanwhile; the hold is over.
            TurnTimeout: it did not come back within the limit; the hold is over.
        """
        ticket = self._ticket
        turn = self._turn
        if ticket is None or ticket.depth > 1 or not turn.contended:
            return
        if turn._clock() - ticket.start < turn.quantum_s:
            return
        drain()
        again = self._turn._again(ticket)
        self._ticket = None
        self._ticket = self._turn._obtain(again, self._alive, self._closing, self._turn.limit_s)


@dataclass(frozen=True)
class Snapshot:
    """What the turn looks like now. Seconds; names as given to `GpuTurn.acquire`."""

    holder: str | None
    site: str | None
    held_s: float
    waiting: tuple[tuple[str, str, float], ...]
    """Name, site and seconds waited, first come first."""
    stuck: str | None
    """The holder's stack, where others wait for this turn longer than the limit."""
    stood_s: float = 0.0
    """For how long others have waited for this very turn. Work that hands over now and then
    goes on, however long it is, and holding a turn that is wanted by none harms none."""
    totals: dict[str, Totals] = field(default_factory=dict)
    recent: tuple[Span, ...] = ()
    abandoned: int = 0
    timeouts: int = 0
    stuck_reports: int = 0
    lost: int = 0
    """Holders whose thread ended without a release; the turn was taken from them."""


class GpuTurn:
    """The turn of one process. Thread-safe.

    ``stuck_s`` is the hold after which a holder is reported with its stack;
    ``limit_s`` the longest wait, ``quantum_s`` what work that pauses holds at least.
    """

    def __init__(
        self,
        *,
        stuck_s: float = 60.0,
        limit_s: float = 600.0,
        quantum_s: float = length.QUANTUM_S,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stuck_s = stuck_s
        self.limit_s = limit_s
        self.quantum_s = quantum_s
        self.listener = listener or Listener()
        self.observer: Callable[[Span], None] | None = None
        self._clock = clock
        self._mutex = threading.Lock()
        self._queue: TurnQueue[_Ticket] = TurnQueue()
        self._totals: dict[str, Totals] = {}
        self._recent: deque[Span] = deque(maxlen=RECENT)
        self._abandoned = 0
        self._timeouts = 0
        self._stuck_reports = 0
        self._lost = 0

    @property
    def contended(self) -> bool:
        """Whether a thread waits. A glance without the lock: it may be over by now."""
        return len(self._queue) > 0

    def held(self) -> bool:
        """Whether the calling thread has the turn."""
        holder = self._queue.holder
        return holder is not None and holder.thread is threading.current_thread()

    def others_since(self, name: str) -> tuple[float, float] | None:
        """The longest and the shortest turn of others since the last one of ``name``, in
        seconds; None: there was none."""
        with self._mutex:
            own = itertools.takewhile(lambda span: span.name != name, reversed(self._recent))
            held = [span.end - span.start for span in own]
        return (max(held), min(held)) if held else None

    def acquire(
        self,
        name: str,
        site: str,
        *,
        owner: Hashable = None,
        alive: Callable[[], None] | None = None,
        closing: Callable[[], bool] | None = None,
        limit_s: float | None = None,
    ) -> Hold:
        """Wait for the turn; the calling thread has it until it releases.

        A thread that has it already gets it again at once. ``alive`` is called when the
        wait begins and at least every `LOOK_S`; ``closing`` says that the engine closes.

        Raises:
            TurnAbandoned: `abandon` was called for ``owner``, or ``closing`` said so.
            TurnTimeout: not within ``limit_s`` (default: the turn's own).
        """
        holder = self._queue.holder
        if holder is not None and holder.thread is threading.current_thread():
            holder.depth += 1  # only its own thread changes it
            return Hold(self, holder)
        ticket = _Ticket(name, site, owner, self._clock())
        limit = self.limit_s if limit_s is None else limit_s
        ticket = self._obtain(ticket, alive, closing, limit)
        return Hold(self, ticket, alive, closing)

    def abandon(self, owner: Hashable) -> int:
        """End every wait of ``owner`` now. Returns how many; the holder is not touched."""
        ended = 0
        with self._mutex:
            for ticket in list(self._queue.waiting):
                if ticket.owner == owner and self._queue.withdraw(ticket):
                    ticket.abandoned = True
                    ticket.wake.release()
                    ended += 1
        return ended

    def snapshot(self) -> Snapshot:
        """The present state and the counts."""
        now = self._clock()
        with self._mutex:
            holder = self._queue.holder
            held_s = now - holder.start if holder is not None else 0.0
            stood_s = self._stood(now)
            return Snapshot(
                holder=holder.name if holder is not None else None,
                site=holder.site if holder is not None else None,
                held_s=held_s,
                waiting=tuple((t.name, t.site, now - t.asked) for t in self._queue.waiting),
                stuck=(
                    _stack_of(holder.thread)
                    if holder is not None and stood_s > self.stuck_s
                    else None
                ),
                stood_s=stood_s,
                totals={name: Totals(**vars(total)) for name, total in self._totals.items()},
                recent=tuple(self._recent),
                abandoned=self._abandoned,
                timeouts=self._timeouts,
                stuck_reports=self._stuck_reports,
                lost=self._lost,
            )

    # --- the wait ---------------------------------------------------------------------

    def _obtain(
        self,
        ticket: _Ticket,
        alive: Callable[[], None] | None,
        closing: Callable[[], bool] | None,
        limit_s: float,
    ) -> _Ticket:
        if closing is not None and closing():
            self._count_abandoned()
            raise TurnAbandoned
        with self._mutex:
            ticket.wake = threading.Lock()
            ticket.wake.acquire()
            if self._queue.request(ticket):
                ticket.start = ticket.asked
                return ticket
        try:
            self._wait(ticket, alive, closing, limit_s)
        except BaseException:
            # Also what is thrown into the thread from outside: the turn may be ours by
            # now, and must not be lost with us.
            self._leave(ticket)
            raise
        return ticket

    def _wait(
        self,
        ticket: _Ticket,
        alive: Callable[[], None] | None,
        closing: Callable[[], bool] | None,
        limit_s: float,
    ) -> None:
        deadline = ticket.asked + limit_s
        while True:
            if alive is not None:
                try:
                    alive()
                except Exception:
                    alive = None
                    logger.debug("GPU turn: a waiter cannot say it is alive", exc_info=True)
            left = deadline - self._clock()
            if ticket.wake.acquire(timeout=max(0.0, min(LOOK_S, left))):
                if ticket.abandoned:
                    self._count_abandoned()
                    raise TurnAbandoned
                return
            if closing is not None and closing():
                self._count_abandoned()
                raise TurnAbandoned
            self._look_at_holder()
            if self._clock() >= deadline:
                # The lock is asked once more: the turn may have come meanwhile.
                if ticket.wake.acquire(blocking=False) and not ticket.abandoned:
                    return
                raise self._timeout(ticket, limit_s)

    def _leave(self, ticket: _Ticket) -> None:
        with self._mutex:
            if not self._queue.withdraw(ticket) and ticket is self._queue.holder:
                self._pass_on(ticket)

    def _again(self, ticket: _Ticket) -> _Ticket:
        """Let go in the middle of work; returns the ticket to come back with."""
        self._release(ticket)
        return _Ticket(ticket.name, ticket.site, ticket.owner, self._clock())

    def _release(self, ticket: _Ticket) -> None:
        with self._mutex:
            if ticket is not self._queue.holder:
                return  # taken from a thread that was thought dead
            ticket.depth -= 1
            if ticket.depth:
                return
            span = self._pass_on(ticket)
        if self.observer is not None:
            try:
                self.observer(span)
            except Exception:
                logger.exception("GPU turn: the observer of GPU turns failed")

    def _pass_on(self, ticket: _Ticket) -> Span:
        """Mutex held: book the turn that ends and wake the next holder."""
        now = self._clock()
        span = Span(ticket.name, ticket.site, ticket.asked, ticket.start, now)
        following = self._queue.release(ticket)
        if following is not None:
            following.start = now
            following.wake.release()
        self._recent.append(span)
        totals = self._totals.get(ticket.name)
        if totals is None:
            totals = self._totals[ticket.name] = Totals()
        held, waited = now - span.start, span.start - span.asked
        totals.turns += 1
        totals.held_s += held
        totals.waited_s += waited
        totals.longest_held_s = max(totals.longest_held_s, held)
        totals.longest_wait_s = max(totals.longest_wait_s, waited)
        return span

    # --- a holder in trouble ------------------------------------------------------------

    def _look_at_holder(self) -> None:
        now = self._clock()
        with self._mutex:
            holder = self._queue.holder
            if holder is None:
                return
            if not holder.thread.is_alive():
                self._lost += 1
                self._pass_on(holder)
                lost, held_s = True, now - holder.start
            elif self._stood(now) > self.stuck_s and not holder.reported:
                holder.reported = True
                self._stuck_reports += 1
                lost, held_s = False, self._stood(now)
            else:
                return
        if lost:
            logger.error(
                "GPU turn: the thread of '%s' (%s) ended without giving the GPU turn back "
                "after %.1f s; the turn passes on",
                holder.name,
                holder.site,
                held_s,
            )
            return
        logger.warning(
            "GPU turn: '%s' (%s) has held the GPU turn for %.0f s while others wait; it is "
            "at:\n%s",
            holder.name,
            holder.site,
            held_s,
            _stack_of(holder.thread),
        )

    def _stood(self, now: float) -> float:
        """Mutex held: see `Snapshot.stood_s`."""
        holder, first = self._queue.holder, next(self._queue.waiting, None)
        if holder is None or first is None:
            return 0.0
        return now - max(holder.start, first.asked)

    def _timeout(self, ticket: _Ticket, limit_s: float) -> TurnTimeout:
        with self._mutex:
            self._timeouts += 1
            holder = self._queue.holder
            who = f"'{holder.name}' ({holder.site})" if holder is not None else "nobody"
            # Work that may go on without the turn waits less, and is no measure.
            stood = (
                holder is not None and holder.start <= ticket.asked and limit_s >= self.limit_s
            )
        text = (
            f"'{ticket.name}' waited {limit_s:.0f} s for its turn on the GPU, which {who} "
            "holds; the request was given up"
        )
        if stood:
            try:
                self.listener.stuck(text)
            except Exception:
                logger.exception("GPU turn: telling of a stuck turn failed")
        return TurnTimeout(text)

    def _count_abandoned(self) -> None:
        with self._mutex:
            self._abandoned += 1


#: The turn of this process, None where engines do not take turns.
current: GpuTurn | None = None


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "  (no stack: the thread is in no Python code)"
    return "".join(traceback.format_stack(frame)).rstrip()
