# SPDX-License-Identifier: Apache-2.0
"""The GPU turn itself: order, re-entry, and every way in which a wait can end."""

import queue
import threading
from concurrent.futures import Future

import pytest

from omlx.gpu_turn import turn as turns
from omlx.gpu_turn.queue import TurnError, TurnQueue
from omlx.gpu_turn.turn import GpuTurn, TurnAbandoned, TurnTimeout

PATIENCE_S = 20.0  # no outcome depends on it: a test that needs it has failed


class Actor:
    """A thread that does what it is told, one thing after another."""

    def __init__(self, turn, name):
        self.turn = turn
        self.name = name
        self.hold = None
        self.parked = threading.Event()
        self.orders = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while (order := self.orders.get()) is not None:
            call, answer = order
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    def do(self, call):
        answer = Future()
        self.orders.put((call, answer))
        return answer

    def ask(self, **how):
        """Begin to acquire; returns once the thread has the turn or waits for it."""
        self.parked.clear()
        how = {"alive": self.parked.set, "owner": self.name, **how}

        def acquire():
            self.hold = self.turn.acquire(self.name, "test", **how)

        answer = self.do(acquire)
        answer.add_done_callback(lambda _: self.parked.set())
        assert self.parked.wait(PATIENCE_S)
        return answer

    def release(self):
        self.do(lambda: self.hold.release()).result(PATIENCE_S)

    def end(self):
        self.orders.put(None)
        self.thread.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(turns, "LOOK_S", 0.01)


@pytest.fixture
def turn():
    return GpuTurn(quantum_s=0.0)


@pytest.fixture
def actors(turn):
    made = [Actor(turn, name) for name in "abc"]
    yield made
    for actor in made:
        actor.end()


def waiting(turn):
    return [name for name, _site, _seconds in turn.snapshot().waiting]


def test_first_come_first_served_and_no_barging(turn, actors):
    a, b, c = actors
    a.ask().result(PATIENCE_S)
    for_b, for_c = b.ask(), c.ask()
    assert waiting(turn) == ["b", "c"]
    a.release()
    for_b.result(PATIENCE_S)
    # The one who just had it goes to the end of the queue, though it asks at once.
    for_a = a.ask()
    assert waiting(turn) == ["c", "a"]
    b.release()
    for_c.result(PATIENCE_S)
    c.release()
    for_a.result(PATIENCE_S)
    a.release()
    assert [span.name for span in turn.snapshot().recent] == ["a", "b", "c", "a"]
    assert turn.snapshot().holder is None


def test_a_thread_takes_it_again_inside(turn):
    outer = turn.acquire("a", "outer")
    inner = turn.acquire("a", "inner")
    inner.release()
    inner.release()  # a second release is none
    assert turn.held()
    outer.release()
    assert not turn.held()


def test_abandon_ends_the_waits_of_one_owner_only(turn, actors):
    a, b, c = actors
    a.ask().result(PATIENCE_S)
    for_b, for_c = b.ask(), c.ask()
    assert turn.abandon("b") == 1
    with pytest.raises(TurnAbandoned):
        for_b.result(PATIENCE_S)
    assert waiting(turn) == ["c"]
    assert turn.abandon("a") == 0  # the holder is not touched
    a.release()
    for_c.result(PATIENCE_S)
    c.release()


def test_a_waiter_notices_by_itself_that_its_engine_closes(turn, actors):
    a, b, _ = actors
    closing = threading.Event()
    a.ask().result(PATIENCE_S)
    for_b = b.ask(closing=closing.is_set)
    closing.set()
    with pytest.raises(TurnAbandoned):
        for_b.result(PATIENCE_S)
    a.release()


def test_no_wait_is_endless_and_the_text_says_who_had_the_turn(turn, actors):
    a, b, _ = actors
    a.ask().result(PATIENCE_S)
    with pytest.raises(TurnTimeout, match=r"'a' \(test\)"):
        b.ask(limit_s=0.02).result(PATIENCE_S)
    a.release()
    assert turn.snapshot().timeouts == 1
    b.ask().result(PATIENCE_S)
    b.release()


def test_the_turn_of_a_dead_thread_passes_on(turn, actors):
    a, b, _ = actors
    a.ask().result(PATIENCE_S)
    a.end()
    b.ask().result(PATIENCE_S)
    assert turn.snapshot().lost == 1
    b.release()


def test_long_work_lets_others_in_and_comes_back(turn, actors):
    a, b, _ = actors
    drained = []
    a.ask().result(PATIENCE_S)
    a.do(lambda: a.hold.yield_turn(lambda: drained.append("alone"))).result(PATIENCE_S)
    assert drained == []  # nobody waits
    for_b = b.ask()
    back = a.do(lambda: a.hold.yield_turn(lambda: drained.append(turn.held())))
    for_b.result(PATIENCE_S)
    assert drained == [True]
    b.release()
    back.result(PATIENCE_S)
    assert turn.snapshot().holder == "a"
    a.release()


def test_a_stuck_holder_is_reported_once_with_its_stack(actors, caplog):
    turn = GpuTurn(stuck_s=0.0)
    holder, waiter = Actor(turn, "holder"), Actor(turn, "waiter")
    holder.ask().result(PATIENCE_S)
    with pytest.raises(TurnTimeout):
        waiter.ask(limit_s=0.1).result(PATIENCE_S)
    reports = [r for r in caplog.records if "has held the GPU turn" in r.message]
    assert len(reports) == 1
    assert "_run" in reports[0].message
    holder.release()
    holder.end()
    waiter.end()


def test_only_the_holder_releases_and_a_ticket_is_used_once():
    order = TurnQueue()
    one, two = object(), object()
    assert order.request(one)
    assert not order.request(two)
    with pytest.raises(TurnError):
        order.request(two)
    with pytest.raises(TurnError):
        order.release(two)
    assert order.release(one) is two
    assert order.release(two) is None
