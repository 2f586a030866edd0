"""What happened: fed by the runtime and the hooks, read by status, metrics and the page.

Every method that is told something returns at once, takes O(1), keeps a bounded
amount and raises nothing: a fault in here must not cost a request anything.
Methods for the pool run on the event loop's thread; :meth:`Observer.turn` runs on
engines' threads and :meth:`Observer.check_stuck` on the watching one.

Times are seconds of ``time.monotonic`` inside; what goes out for people is the
time of day (``time.time``), converted once, when it is asked for.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

from omlx_admission.core.events import Events
from omlx_admission.core.policy.model import Outcome, Waiter
from omlx_admission.observation.history import WINDOW_S, Distribution, Level, Names, Shares

logger = logging.getLogger("omlx.admission")

#: Swaps and refusals remembered one by one.
RECENT = 50

#: Model names kept apart in counts; spans of the time line.
MAX_NAMES = 64
_MAX_SPANS = 1000

#: While more than this many wait, their coming and going is logged at DEBUG only:
#: a crowd, one line each, would bury the lines that matter.
_CROWD = 50

#: A load or unload is called stuck after so many times its estimate, and never
#: earlier than after a minute (seconds).
_STUCK_TIMES = 5.0
_STUCK_LEAST_S = 60.0

#: How often the watching thread looks, in seconds.
CHECK_S = 1.0

WAIT_BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TURN_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
AGE_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)

_P = ParamSpec("_P")


def never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    """Log the first fault of ``method`` and swallow every one."""
    noted = False

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal noted
        try:
            method(*args, **kwargs)
        except Exception:
            if not noted:
                noted = True
                logger.exception("admission: the observer failed at %s", method.__name__)

    return call


@dataclass
class Progress:
    """Something that began and has not ended. ``limit_s``: after that it is stuck."""

    kind: str
    model: str
    began: float
    limit_s: float
    detail: str = ""
    estimate_s: float | None = None
    reported: bool = False


@dataclass(frozen=True)
class Problem:
    """Something that is stuck or broken, for status, page and log.

    ``logged``: the check that found it writes the log line itself.
    """

    kind: str
    model: str | None
    seconds: float
    limit_s: float | None
    text: str
    logged: bool = False


@dataclass
class Swap:
    """One swap: seconds of its drain and of its load, evictions included."""

    target: str
    victims: tuple[str, ...]
    reason: str
    began: float
    drain_s: float
    estimate_s: float
    at: float = 0.0
    load_s: float | None = None
    result: str = "running"
    served: int = 0


@dataclass(frozen=True)
class Refused:
    """One refusal. ``text`` is ours: it names models and seconds, nothing of the request."""

    at: float
    model: str
    code: str
    text: str
    waited_s: float
    request: str | None


Section = Callable[[], Any]
Check = Callable[[], Iterable[Problem]]


class Observer(Events):
    """One per process.

    Attributes:
        version: grows with every event, so that a reader knows whether to read again.
        stuck_s: limit of loads, unloads and drains in seconds; None is automatic.
        budget_s: the wait budget, from which the automatic limit of a drain comes.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.wall = wall
        self.version = 0
        self.stuck_s: float | None = None
        self.budget_s = 300.0
        self.began = clock()
        self.name = Names(MAX_NAMES)
        self.levels: dict[str, Level] = {}
        self.progress: dict[tuple[str, str], Progress] = {}
        self.swaps: deque[Swap] = deque(maxlen=RECENT)
        self.refusals: deque[Refused] = deque(maxlen=RECENT)
        self.swap_counts: Counter[tuple[str, str]] = Counter()
        self.refusal_counts: Counter[str] = Counter()
        self.load_failures: Counter[str] = Counter()
        self.waits: dict[tuple[str, str], Distribution] = {}
        #: Silences of parked answers.
        self.parkings: dict[tuple[str, str], Distribution] = {}
        self.loads: dict[str, Distribution] = {}
        self.unloads: dict[str, Distribution] = {}
        self.drains: dict[str, Distribution] = {}
        self.eviction_age = Distribution(AGE_BOUNDS)
        self.turn_waits: dict[str, Distribution] = {}
        self.turn_holds: dict[str, Distribution] = {}
        self.turn_shares: dict[str, Shares] = {}
        self.states: dict[str, tuple[str, float]] = {}
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_MAX_SPANS)
        self._expected: dict[str, float] = {}
        self._turn_lock = threading.Lock()
        self._sections: dict[str, Section] = {}
        self._checks: list[Check] = []
        self._refreshes: list[Callable[[], None]] = []
        self._watching: threading.Event | None = None
        self._problems_seen: set[tuple[str, str | None]] = set()

    # -- requests -------------------------------------------------------------

    @never_raises
    def enqueued(self, waiter: Waiter, waiting: int) -> None:
        """``waiter`` has joined the queue of ``waiting`` requests."""
        model = waiter.target.model
        self._level(model, +1)
        level = logging.INFO if waiting <= _CROWD else logging.DEBUG
        logger.log(
            level,
            "admission: %s waits for '%s', %d in the queue",
            request_of(waiter),
            model,
            waiting,
        )

    @never_raises
    def left(self, waiter: Waiter, now: float, waiting: int, queued: bool) -> None:
        """``waiter`` has ended; ``now`` is of the clock that it was enqueued by.

        Without ``queued`` it was answered in the step in which it came.
        """
        model, outcome = waiter.target.model, waiter.outcome.value
        waited = now - waiter.enqueued
        if queued:
            self._level(model, -1)
        self._add(self.waits, (self.name(model), outcome), waited, WAIT_BOUNDS)
        # A refusal has its own line, with the reason.
        crowd = (
            waiting > _CROWD
            or not queued
            or waiter.outcome in (Outcome.EXPIRED, Outcome.REFUSED)
        )
        logger.log(
            logging.DEBUG if crowd else logging.INFO,
            "admission: %s for '%s' %s after %.2f s",
            request_of(waiter),
            model,
            outcome,
            waited,
        )

    @never_raises
    def refused(self, model: str, code: str, text: str, waited: float, request: Any) -> None:
        """A request was told no. ``request`` is what has an ``id``, or None."""
        self.version += 1
        name = None if request is None else str(request.id)
        self.refusal_counts[code] += 1
        self.refusals.append(Refused(self.wall(), model, code, text, waited, name))
        who = "a call" if name is None else f"request {name}"
        logger.info("admission: %s refused (%s): %s", who, code, text)

    # -- swaps ----------------------------------------------------------------

    @never_raises
    def drain_began(self, models: Sequence[str], target: str) -> None:
        """``models`` take no new requests until they are idle."""
        for model in models:
            limit = self.stuck_s or max(_STUCK_LEAST_S, self.budget_s / 2)
            self._begin("drain", model, limit, detail=target)
            self._state(model, "draining")

    @never_raises
    def parked(self, model: str, answers: int) -> None:
        """``answers`` of ``model`` were taken out, and wait for its return."""
        self._level(model, +answers)

    @never_raises
    def parked_ended(self, waiter: Waiter, now: float) -> None:
        """A parked answer goes on, or has ended."""
        model, parked = waiter.target.model, now - waiter.enqueued
        self._level(model, -1)
        outcome = "resumed" if waiter.outcome is Outcome.GRANTED else waiter.outcome.value
        self._add(self.parkings, (self.name(model), outcome), parked, WAIT_BOUNDS)
        logger.info(
            "admission: a parked answer of '%s' %s after %.2f s", model, outcome, parked
        )

    @never_raises
    def drain_withdrawn(self, models: Sequence[str]) -> None:
        """They serve on."""
        for model in models:
            self._end("drain", model)
            self._state(model, "resident")

    @never_raises
    def swap_began(
        self,
        target: str,
        victims: Sequence[str],
        reason: str,
        drain_s: float,
        estimate_s: float,
    ) -> None:
        """The load of ``target`` begins, with the eviction of ``victims``."""
        for victim in victims:
            drain = self._end("drain", victim)
            if drain is not None:
                waited = self.clock() - drain.began
                self._add(self.drains, self.name(victim), waited, WAIT_BOUNDS)
        self._expected[self.name(target)] = estimate_s
        limit = self._load_limit(estimate_s)
        self._begin("swap", target, limit, detail=reason, estimate_s=estimate_s)
        swap = Swap(target, tuple(victims), reason, self.clock(), drain_s, estimate_s)
        swap.at = self.wall()
        self.swaps.append(swap)

    @never_raises
    def swap_ended(self, target: str, result: str, served: int = 0) -> None:
        """``result``: loaded, failed, no room, or cancelled."""
        self._end("swap", target)
        for swap in reversed(self.swaps):
            if swap.target == target and swap.result == "running":
                swap.load_s = self.clock() - swap.began
                swap.result, swap.served = result, served
                self.swap_counts[swap.reason, result] += 1
                return

    # -- the pool -------------------------------------------------------------

    @never_raises
    def load_began(self, model: str, estimate_s: float) -> None:
        """The pool loads ``model``; ``estimate_s`` where no swap knows better."""
        expected = self._expected.get(model, estimate_s)
        self._begin("load", model, self._load_limit(expected), estimate_s=expected)
        self._state(model, "loading")

    @never_raises
    def load_ended(self, model: str, ok: bool) -> None:
        """It is resident, or the load has failed or was cancelled."""
        load = self._end("load", model)
        self._state(model, "resident" if ok else None)
        if not ok:
            self.load_failures[self.name(model)] += 1
        elif load is not None:
            self._add(self.loads, self.name(model), self.clock() - load.began, WAIT_BOUNDS)

    @never_raises
    def unload_began(self, model: str, unused_s: float) -> None:
        """The pool gives ``model`` up, ``unused_s`` seconds after its last use."""
        drain = self._end("drain", model)
        if drain is not None:
            waited = self.clock() - drain.began
            self._add(self.drains, self.name(model), waited, WAIT_BOUNDS)
        self.eviction_age.add(unused_s)
        self._begin("unload", model, self.stuck_s or _STUCK_LEAST_S)
        self._state(model, "unloading")

    @never_raises
    def unload_ended(self, model: str, resident: bool) -> None:
        """Its teardown has ended; ``resident``: it is still there."""
        unload = self._end("unload", model)
        self._state(model, "resident" if resident else None)
        if unload is not None:
            self._add(self.unloads, self.name(model), self.clock() - unload.began, WAIT_BOUNDS)

    # -- the GPU turn -----------------------------------------------------------

    @never_raises
    def turn(self, engine: str, asked: float, start: float, end: float) -> None:
        """One turn of ``engine`` has ended. Times of ``time.monotonic``; any thread."""
        with self._turn_lock:
            engine = self.name(engine)
            self._add(self.turn_waits, engine, start - asked, TURN_BOUNDS)
            self._add(self.turn_holds, engine, end - start, TURN_BOUNDS)
            shares = self.turn_shares.get(engine)
            if shares is None:
                shares = self.turn_shares[engine] = Shares()
            shares.add(start, end)

    # -- for readers ----------------------------------------------------------

    def register_section(
        self,
        name: str,
        provide: Section,
        check: Check | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """Show ``provide()`` under ``name`` in status, and ``check``'s problems.

        Both run on the event loop and must not wait; ``refresh`` runs on the watching
        thread, every second, and may.
        """
        self._sections[name] = provide
        if check is not None:
            self._checks.append(check)
        if refresh is not None:
            self._refreshes.append(refresh)

    def register_check(self, check: Check) -> None:
        """Ask ``check`` for problems too."""
        self._checks.append(check)

    def reset(self) -> None:
        """Nothing is registered any more, and nothing watches. What happened stays."""
        self.stop_watch()
        for registered in (self._sections, self._checks, self._refreshes):
            registered.clear()

    def sections(self) -> dict[str, Any]:
        """What was registered, each as it is now; None where it failed to say."""
        found: dict[str, Any] = {}
        for name, provide in list(self._sections.items()):
            try:
                found[name] = provide()
            except Exception as error:  # noqa: BLE001 - one section must not hide the others
                logger.debug("admission: section '%s' of status failed: %r", name, error)
                found[name] = None
        return found

    def problems(self) -> list[Problem]:
        """What is stuck now, longest first."""
        now = self.clock()
        late = [p for p in list(self.progress.values()) if now - p.began > p.limit_s]
        teardown = any(p.kind in ("load", "unload") for p in late)
        found = [
            Problem(p.kind, p.model, now - p.began, p.limit_s, _stuck_text(p, now))
            for p in late
            # A swap that hangs because its load hangs is one problem.
            if p.kind != "swap" or not teardown
        ]
        for check in list(self._checks):
            try:
                found += check()
            except Exception as error:  # noqa: BLE001
                logger.debug("admission: a health check failed: %r", error)
        return sorted(found, key=lambda p: -p.seconds)

    def since(self, model: str) -> float | None:
        """The time of day since when ``model`` is in its state; None if it never was."""
        state = self.states.get(model)
        return None if state is None else self.of_day(state[1])

    def of_day(self, moment: float) -> float:
        """A moment of `clock` as time of day."""
        return self.wall() - (self.clock() - moment)

    def timeline(self) -> dict[str, Any]:
        """The last ten minutes: states and waits by model, shares of the GPU turn."""
        now, shift = self.clock(), self.wall() - self.clock()
        start = now - WINDOW_S
        spans: dict[str, list[list[Any]]] = {}
        for model, kind, began, ended in list(self._spans):
            if ended > start:
                began = max(began, start)
                spans.setdefault(model, []).append(
                    [kind, _ms(began + shift), _ms(ended + shift)]
                )
        for model, (kind, began) in list(self.states.items()):
            row = [kind, _ms(max(began, start) + shift), None]
            spans.setdefault(model, []).append(row)
        return {
            "start": _ms(start + shift),
            "end": _ms(now + shift),
            "states": spans,
            "waiting": {
                model: [[_ms(at + shift), value] for at, value in level.since(start)]
                for model, level in list(self.levels.items())
            },
            "turns": {
                engine: [[_ms(at + shift), round(share, 3)] for at, share in rows]
                for engine, shares in list(self.turn_shares.items())
                if (rows := shares.since(start))
            },
        }

    # -- watching -------------------------------------------------------------

    def start_watch(self) -> None:
        """Look every `CHECK_S` seconds, in a thread: a blocked event loop is noticed too."""
        if self._watching is not None:
            return
        stop = self._watching = threading.Event()

        def watch() -> None:
            self.check_stuck()
            while not stop.wait(CHECK_S):
                self.check_stuck()

        threading.Thread(target=watch, name="admission-watch", daemon=True).start()

    def stop_watch(self) -> None:
        """End the watching thread."""
        stop, self._watching = self._watching, None
        if stop is not None:
            stop.set()

    @never_raises
    def check_stuck(self) -> None:
        """Log what is newly stuck, once, and what no longer is; refresh sections."""
        for refresh in list(self._refreshes):
            refresh()
        found = {(p.kind, p.model): p for p in self.problems()}
        for key, problem in found.items():
            if key not in self._problems_seen and not problem.logged:
                self.version += 1
                logger.warning("admission: stuck: %s", problem.text)
        for kind, model in self._problems_seen - found.keys():
            self.version += 1
            logger.warning(
                "admission: the %s%s goes on", kind, f" of '{model}'" if model else ""
            )
        self._problems_seen = set(found)

    # -- inside ---------------------------------------------------------------

    def _level(self, model: str, by: int) -> None:
        self.version += 1
        model = self.name(model)
        level = self.levels.get(model)
        if level is None:
            level = self.levels[model] = Level()
        level.set(level.value + by, self.clock())

    def _begin(
        self,
        kind: str,
        model: str,
        limit_s: float,
        detail: str = "",
        estimate_s: float | None = None,
    ) -> None:
        self.version += 1
        progress = Progress(kind, model, self.clock(), limit_s, detail, estimate_s)
        self.progress[kind, model] = progress

    def _end(self, kind: str, model: str) -> Progress | None:
        self.version += 1
        return self.progress.pop((kind, model), None)

    def _state(self, model: str, state: str | None) -> None:
        now = self.clock()
        old = self.states.pop(model, None)
        if old is not None and old[1] < now:
            self._spans.append((model, old[0], old[1], now))
        if state is not None:
            self.states[model] = (state, now)

    def _load_limit(self, estimate_s: float) -> float:
        return self.stuck_s or max(_STUCK_LEAST_S, _STUCK_TIMES * estimate_s)

    @staticmethod
    def _add(
        store: dict[Any, Distribution], key: Any, value: float, bounds: tuple[float, ...]
    ) -> None:
        distribution = store.get(key)
        if distribution is None:
            distribution = store[key] = Distribution(bounds)
        distribution.add(value)


def request_of(waiter: Waiter) -> str:
    """How a waiter is called in the log: its request's id, or "a call"."""
    request = getattr(waiter.context, "request", None)
    return "a call" if request is None else f"request {request.id}"


def as_row(record: Swap | Refused) -> dict[str, Any]:
    """A record as plain data."""
    return asdict(record)


def _stuck_text(progress: Progress, now: float) -> str:
    seconds = now - progress.began
    model = f"'{progress.model}'"
    what = {
        "load": f"the load of {model}",
        "unload": f"the unload of {model}",
        "swap": f"the swap to {model}",
        "drain": f"the drain of {model} for '{progress.detail}'",
    }[progress.kind]
    return f"{what} has lasted {seconds:.0f} s, limit {progress.limit_s:.0f} s"


def _ms(moment: float) -> float:
    return round(moment, 3)


#: The observer of this process.
observer = Observer()
