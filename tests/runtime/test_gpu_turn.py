"""The turn with real threads: order, re-entry, and every way in which a wait can end."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.gpu_turn.turn import (
    GpuTurn,
    Hold,
    Listener,
    TurnAbandoned,
    TurnTimeout,
)

PATIENCE_S = 20.0  # no outcome depends on it: a test that needs it has failed


class Actor:
    """A thread that does what it is told, one thing after another."""

    def __init__(self, turn: GpuTurn, name: str) -> None:
        self.turn = turn
        self.name = name
        self.hold: Hold | None = None
        self.parked = threading.Event()
        self._orders: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            call, answer = order
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    def do(self, call: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._orders.put((call, answer))
        return answer

    def ask(self, **keywords: Any) -> Future[Any]:
        """Begin to acquire; returns once the thread has the turn or waits for it."""
        self.parked.clear()
        keywords.setdefault("alive", self.parked.set)
        keywords.setdefault("owner", self.name)

        def acquire() -> None:
            self.hold = self.turn.acquire(self.name, "test", **keywords)

        answer = self.do(acquire)
        answer.add_done_callback(lambda _: self.parked.set())
        assert self.parked.wait(PATIENCE_S)
        return answer

    def has_it(self, answer: Future[Any]) -> None:
        answer.result(PATIENCE_S)

    def release(self) -> None:
        def release() -> None:
            assert self.hold is not None
            self.hold.release()

        self.do(release).result(PATIENCE_S)

    def end(self) -> None:
        self._orders.put(None)
        self.thread.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turn, "LOOK_S", 0.01)


@pytest.fixture
def turn() -> GpuTurn:
    return GpuTurn(quantum_s=0.0)


@pytest.fixture
def actors(turn: GpuTurn) -> Iterator[list[Actor]]:
    made = [Actor(turn, name) for name in "abcd"]
    yield made
    for actor in made:
        actor.end()


def waiting(turn: GpuTurn) -> list[str]:
    return [name for name, _site, _s in turn.snapshot().waiting]


def test_first_come_first_served_and_no_barging(turn: GpuTurn, actors: list[Actor]) -> None:
    a, b, c, _ = actors
    a.ask().result(PATIENCE_S)
    for_b, for_c = b.ask(), c.ask()
    assert waiting(turn) == ["b", "c"]
    a.release()
    b.has_it(for_b)
    # The one who just had it goes to the end of the queue, though it asks at once.
    for_a = a.ask()
    assert waiting(turn) == ["c", "a"]
    b.release()
    c.has_it(for_c)
    c.release()
    a.has_it(for_a)
    a.release()
    assert turn.snapshot().holder is None
    assert [s.name for s in turn.snapshot().recent] == ["a", "b", "c", "a"]


def test_spans_never_overlap_and_add_up(turn: GpuTurn, actors: list[Actor]) -> None:
    spans: list[gpu_turn.Span] = []
    turn.observer = spans.append

    def work() -> None:
        for _ in range(200):
            hold = turn.acquire(threading.current_thread().name, "loop")
            hold.release()

    for answer in [actor.do(work) for actor in actors]:
        answer.result(PATIENCE_S)
    assert len(spans) == 800
    ordered = sorted(turn.snapshot().recent)
    assert len(ordered) == gpu_turn.RECENT
    by_time = sorted(spans, key=lambda s: (s.start, s.end))
    assert all(one.end <= two.start for one, two in itertools.pairwise(by_time))
    totals = turn.snapshot().totals
    assert {name: total.turns for name, total in totals.items()} == dict.fromkeys("abcd", 200)
    assert sum(t.held_s for t in totals.values()) == pytest.approx(
        sum(s.end - s.start for s in spans)
    )


def test_a_thread_may_take_it_again_inside(turn: GpuTurn, actors: list[Actor]) -> None:
    a, b, _, _ = actors

    def nested() -> None:
        outer = turn.acquire("a", "outer")
        inner = turn.acquire("a", "inner")
        assert turn.held()
        inner.release()
        inner.release()  # a second release is none
        assert turn.held()
        a.hold = outer

    a.do(nested).result(PATIENCE_S)
    for_b = b.ask()
    assert not for_b.done()
    a.release()
    b.has_it(for_b)
    assert not turn.held()
    b.release()


def test_abandon_ends_the_waits_of_one_owner_only(turn: GpuTurn, actors: list[Actor]) -> None:
    a, b, c, d = actors
    a.ask().result(PATIENCE_S)
    for_b, for_c, for_d = b.ask(owner="x"), c.ask(owner="y"), d.ask(owner="x")
    assert turn.abandon("x") == 2
    for answer in (for_b, for_d):
        with pytest.raises(TurnAbandoned):
            answer.result(PATIENCE_S)
    assert waiting(turn) == ["c"]
    assert turn.abandon("x") == 0
    a.release()
    c.has_it(for_c)
    c.release()
    assert turn.snapshot().abandoned == 2


def test_abandoning_the_holder_takes_nothing_away(turn: GpuTurn, actors: list[Actor]) -> None:
    a, b, _, _ = actors
    a.ask(owner="x").result(PATIENCE_S)
    for_b = b.ask()
    assert turn.abandon("x") == 0
    assert turn.snapshot().holder == "a"
    a.release()
    b.has_it(for_b)
    b.release()


def test_a_closing_engine_does_not_even_begin_to_wait(
    turn: GpuTurn, actors: list[Actor]
) -> None:
    a, b, _, _ = actors
    a.ask().result(PATIENCE_S)
    with pytest.raises(TurnAbandoned):
        b.ask(closing=lambda: True).result(PATIENCE_S)
    assert waiting(turn) == []
    a.release()
    # Nor does it begin to work where the turn is free.
    with pytest.raises(TurnAbandoned):
        b.ask(closing=lambda: True).result(PATIENCE_S)
    assert turn.snapshot().holder is None


def test_a_waiter_notices_by_itself_that_its_engine_closes(
    turn: GpuTurn, actors: list[Actor]
) -> None:
    a, b, c, _ = actors
    a.ask().result(PATIENCE_S)
    closes = threading.Event()
    for_b = b.ask(closing=closes.is_set)
    for_c = c.ask()
    closes.set()
    with pytest.raises(TurnAbandoned):
        for_b.result(PATIENCE_S)
    a.release()
    c.has_it(for_c)
    c.release()


def test_no_wait_is_endless(turn: GpuTurn, actors: list[Actor]) -> None:
    a, b, c, _ = actors
    a.ask().result(PATIENCE_S)
    with pytest.raises(TurnTimeout, match=r"'b' waited 0 s .* 'a' \(test\) holds"):
        b.ask(limit_s=0.02).result(PATIENCE_S)
    for_c = c.ask()
    a.release()
    c.has_it(for_c)  # the one that gave up is not in the way
    c.release()
    assert turn.snapshot().timeouts == 1


def test_a_waiter_says_that_it_lives_until_it_has_the_turn(
    turn: GpuTurn, actors: list[Actor]
) -> None:
    a, b, _, _ = actors
    a.ask().result(PATIENCE_S)
    said = threading.Semaphore(0)
    for_b = b.ask(alive=lambda: (said.release(), b.parked.set()))
    for _ in range(5):
        assert said.acquire(timeout=PATIENCE_S)
    a.release()
    b.has_it(for_b)
    b.release()


def test_a_waiter_that_cannot_say_so_waits_all_the_same(
    turn: GpuTurn, actors: list[Actor]
) -> None:
    a, b, _, _ = actors
    a.ask().result(PATIENCE_S)

    def alive() -> None:
        b.parked.set()
        raise RuntimeError("the registry is gone")

    for_b = b.ask(alive=alive)
    a.release()
    b.has_it(for_b)
    b.release()


def test_an_exception_thrown_into_a_waiter_loses_nothing(
    turn: GpuTurn, actors: list[Actor]
) -> None:
    """What `PyThreadState_SetAsyncExc` does, at the two moments that matter."""
    a, b, c, _ = actors

    class Killed(BaseException):
        pass

    def die(*_: Any) -> bool:
        raise Killed

    a.ask().result(PATIENCE_S)
    for_b = b.ask(closing=iter_then(die, False))
    with pytest.raises(Killed):
        for_b.result(PATIENCE_S)
    for_c = c.ask()
    a.release()
    c.has_it(for_c)
    c.release()
    assert turn.snapshot().holder is None


def test_an_exception_thrown_in_as_the_turn_arrives_passes_it_on(
    turn: GpuTurn, actors: list[Actor]
) -> None:
    a, b, c, _ = actors

    class Killed(BaseException):
        pass

    class Gate:
        """The waiter's lock; the turn has come, and then the thread is killed."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def acquire(self, *args: Any, **keywords: Any) -> bool:
            if self.lock.acquire(*args, **keywords):
                raise Killed
            return False

        def release(self) -> None:
            self.lock.release()

    a.ask().result(PATIENCE_S)
    for_b, for_c = b.ask(), c.ask()
    ticket = next(turn._queue.waiting)
    ticket.wake = Gate(ticket.wake)
    # Let the waiter come round to the new lock before the turn arrives.
    b.parked.clear()
    assert b.parked.wait(PATIENCE_S)
    assert b.parked.wait(PATIENCE_S)
    a.release()
    with pytest.raises(Killed):
        for_b.result(PATIENCE_S)
    c.has_it(for_c)
    c.release()


def iter_then(then: Callable[[], Any], *first: Any) -> Callable[[], Any]:
    """A callable that returns ``first``, one a call, and then calls ``then``."""
    items = iter(first)

    def call() -> Any:
        for item in items:
            return item
        return then()

    return call


def test_a_dead_holder_loses_the_turn(
    turn: GpuTurn, actors: list[Actor], caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c, _ = actors
    a.ask().result(PATIENCE_S)
    for_b, for_c = b.ask(), c.ask()
    assert not for_b.done()
    with caplog.at_level(logging.ERROR, "omlx.admission"):
        a.end()
        b.has_it(for_b)
    assert "ended without giving the GPU turn back" in caplog.text
    assert turn.snapshot().lost == 1
    # The dead thread's hold, released by whoever finds it, takes nothing from the living.
    assert a.hold is not None
    a.hold.release()
    assert turn.snapshot().holder == "b"
    b.release()
    c.has_it(for_c)
    c.release()


def test_a_stuck_holder_is_reported_once_with_its_stack(
    actors: list[Actor], caplog: pytest.LogCaptureFixture
) -> None:
    turn = GpuTurn(stuck_s=0.0)
    a, b, _, _ = actors
    a.turn = b.turn = turn
    go_on = threading.Event()

    def stand_still_here() -> None:
        hold = turn.acquire("a", "test")
        started.set()
        go_on.wait(PATIENCE_S)
        hold.release()

    started = threading.Event()
    done = a.do(stand_still_here)
    assert started.wait(PATIENCE_S)
    said = threading.Semaphore(0)
    with caplog.at_level(logging.WARNING, "omlx.admission"):
        for_b = b.ask(alive=lambda: (said.release(), b.parked.set()))
        for _ in range(4):
            assert said.acquire(timeout=PATIENCE_S)
        state = turn.snapshot()
    assert state.stuck is not None
    assert "stand_still_here" in state.stuck
    assert state.stuck_reports == 1
    assert caplog.text.count("has held the GPU turn") == 1
    assert "stand_still_here" in caplog.text
    go_on.set()
    done.result(PATIENCE_S)
    b.has_it(for_b)
    b.release()
    assert turn.snapshot().stuck is None


def test_g1_work_that_hands_over_now_and_then_is_not_stuck(
    actors: list[Actor], caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    turn = GpuTurn(stuck_s=60.0, clock=lambda: now)
    a, b, c, _ = actors
    a.turn = b.turn = c.turn = turn
    a.has_it(a.ask())
    now = 1000.0
    assert turn.snapshot().stuck is None, "no work waits"
    for_b = b.ask()
    for_c = c.ask()
    now = 1050.0
    state = turn.snapshot()
    assert (state.held_s, state.stood_s, state.stuck) == (1050.0, 50.0, None)
    a.release()
    b.has_it(for_b)
    now = 1100.0  # C has waited for 100 s, and for this turn of B's for 50 s
    state = turn.snapshot()
    assert (state.holder, state.stood_s, state.stuck) == ("b", 50.0, None)
    now = 1111.0
    assert turn.snapshot().stuck is not None
    b.release()
    c.has_it(for_c)
    c.release()
    assert turn.snapshot().stood_s == 0.0


class _Told(Listener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def stuck(self, text: str) -> None:
        self.texts.append(text)
        raise RuntimeError("of the listener")


def test_g9_a_turn_that_was_never_handed_over_is_told_when_a_waiter_gives_up(
    actors: list[Actor],
) -> None:
    told = _Told()
    now = 0.0
    turn = GpuTurn(limit_s=600.0, listener=told, clock=lambda: now)
    a, b, c, d = actors
    for actor in actors:
        actor.turn = turn
    a.has_it(a.ask())
    optional = b.ask(limit_s=5.0)
    now = 6.0
    with pytest.raises(TurnTimeout):
        optional.result(PATIENCE_S)
    assert told.texts == [], "clean-up waits less, and goes on without"
    for_c = c.ask()
    now = 10.0
    for_d = d.ask()
    now = 11.0
    a.release()
    c.has_it(for_c)
    now = 611.0
    with pytest.raises(TurnTimeout):
        for_d.result(PATIENCE_S)
    assert told.texts == [], "it was handed over meanwhile"
    for_d = d.ask()
    now = 1300.0
    with pytest.raises(TurnTimeout):
        for_d.result(PATIENCE_S)
    (text,) = told.texts
    assert text.startswith("'d' waited 600 s for its turn on the GPU, which 'c'")
    c.release()


def test_what_others_had_since_ones_own_turn(actors: list[Actor]) -> None:
    now = [0.0]
    turn = GpuTurn(clock=lambda: now[0])

    def take(name: str, seconds: float) -> None:
        hold = turn.acquire(name, "test")
        now[0] += seconds
        hold.release()

    assert turn.others_since("a") is None
    take("a", 1.0)
    assert turn.others_since("a") is None
    assert turn.others_since("b") == (1.0, 1.0)
    for name, seconds in (("b", 4.0), ("c", 0.25), ("b", 2.0)):
        take(name, seconds)
    assert turn.others_since("a") == (4.0, 0.25)
    take("a", 0.5)
    assert turn.others_since("a") is None
    assert turn.others_since("b") == (0.5, 0.5)


class TestBreathing:
    """Long work that lets others in between two steps."""

    def test_others_go_first_then_it_comes_back(
        self, turn: GpuTurn, actors: list[Actor]
    ) -> None:
        a, b, _, _ = actors
        order: list[str] = []
        a.ask().result(PATIENCE_S)

        def pause() -> None:
            assert a.hold is not None
            a.hold.yield_turn(lambda: order.append("drained"))
            order.append("a again")

        a.do(pause).result(PATIENCE_S)
        assert order == ["a again"]  # nobody waits: nothing to drain, nothing to give
        for_b = b.ask()
        paused = a.do(pause)
        b.has_it(for_b)
        assert order == ["a again", "drained"]
        assert not paused.done()
        b.release()
        paused.result(PATIENCE_S)
        assert turn.snapshot().holder == "a"
        a.release()
        assert turn.snapshot().holder is None

    def test_an_error_of_the_drain_keeps_the_turn_for_the_clean_up(
        self, turn: GpuTurn, actors: list[Actor]
    ) -> None:
        a, b, _, _ = actors
        a.ask().result(PATIENCE_S)
        for_b = b.ask()

        def drain() -> None:
            raise RuntimeError("the GPU failed")

        def pause() -> None:
            assert a.hold is not None
            a.hold.yield_turn(drain)

        with pytest.raises(RuntimeError, match="the GPU failed"):
            a.do(pause).result(PATIENCE_S)
        assert turn.snapshot().holder == "a"
        a.release()
        b.has_it(for_b)
        b.release()

    def test_not_inside_another_hold(self, turn: GpuTurn, actors: list[Actor]) -> None:
        a, b, _, _ = actors
        a.ask().result(PATIENCE_S)
        for_b = b.ask()

        def pause() -> None:
            inner = turn.acquire("a", "inner")
            inner.yield_turn(lambda: pytest.fail("there is work of the outer hold in flight"))
            inner.release()

        a.do(pause).result(PATIENCE_S)
        assert not for_b.done()
        a.release()
        b.has_it(for_b)
        b.release()

    def test_not_before_a_quantum(self, actors: list[Actor]) -> None:
        now = [0.0]
        turn = GpuTurn(clock=lambda: now[0])
        a, b, _, _ = actors
        a.turn = b.turn = turn
        a.ask().result(PATIENCE_S)
        for_b = b.ask()

        def pause() -> None:
            assert a.hold is not None
            a.hold.yield_turn(lambda: None)

        now[0] = turn.quantum_s * 0.9
        a.do(pause).result(PATIENCE_S)
        assert turn.snapshot().holder == "a"
        now[0] = turn.quantum_s * 1.1
        paused = a.do(pause)
        b.has_it(for_b)
        b.release()
        paused.result(PATIENCE_S)
        # The quantum begins anew with the turn.
        for_b = b.ask()
        a.do(pause).result(PATIENCE_S)
        assert turn.snapshot().holder == "a"
        a.release()
        b.has_it(for_b)
        b.release()

    @pytest.mark.parametrize("how", ["abandon", "closing"])
    def test_one_whose_engine_closes_meanwhile_leaves_and_holds_nothing(
        self, turn: GpuTurn, actors: list[Actor], how: str
    ) -> None:
        a, b, c, _ = actors
        closing = threading.Event()
        a.ask(closing=closing.is_set).result(PATIENCE_S)
        for_b = b.ask()

        def pause() -> None:
            assert a.hold is not None
            try:
                a.hold.yield_turn(lambda: None)
            finally:
                a.hold.yield_turn(lambda: pytest.fail("it holds nothing"))
                a.hold.release()

        a.parked.clear()
        paused = a.do(pause)
        b.has_it(for_b)
        assert a.parked.wait(PATIENCE_S)  # it says that it lives, in this wait too
        if how == "abandon":
            assert turn.abandon("a") == 1
        else:
            closing.set()
        with pytest.raises(TurnAbandoned):
            paused.result(PATIENCE_S)
        for_c = c.ask()
        assert not for_c.done()
        b.release()
        c.has_it(for_c)
        c.release()
        assert turn.snapshot().holder is None

    def test_one_that_cannot_come_back_holds_nothing(
        self, turn: GpuTurn, actors: list[Actor]
    ) -> None:
        a, b, _, _ = actors
        turn.limit_s = 0.02
        a.ask().result(PATIENCE_S)
        for_b = b.ask(limit_s=PATIENCE_S)

        def pause() -> None:
            assert a.hold is not None
            try:
                a.hold.yield_turn(lambda: None)
            finally:
                a.hold.release()

        with pytest.raises(TurnTimeout):
            a.do(pause).result(PATIENCE_S)
        b.has_it(for_b)
        b.release()
        assert turn.snapshot().holder is None


def test_a_broken_observer_does_not_break_the_release(
    turn: GpuTurn, actors: list[Actor], caplog: pytest.LogCaptureFixture
) -> None:
    def observer(_: gpu_turn.Span) -> None:
        raise ValueError("of the observer")

    turn.observer = observer
    a = actors[0]
    a.ask().result(PATIENCE_S)
    with caplog.at_level(logging.ERROR, "omlx.admission"):
        a.release()
    assert "observer" in caplog.text
    assert turn.snapshot().holder is None
