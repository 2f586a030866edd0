"""The observer: what it remembers, what it calls stuck, and that it harms nobody."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omlx_admission.core.policy.model import Outcome, Target, Waiter
from omlx_admission.observation.observe import MAX_NAMES, RECENT, Observer, Problem


class Clock:
    """Two clocks that tests move; the time of day starts elsewhere."""

    def __init__(self) -> None:
        self.now = 100.0

    def mono(self) -> float:
        return self.now

    def day(self) -> float:
        return self.now + 1_000_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seen(clock: Clock) -> Observer:
    return Observer(clock.mono, clock.day)


def waiter(model: str = "b", enqueued: float = 100.0, request: Any = None) -> Waiter:
    context = SimpleNamespace(request=request)
    return Waiter(1, Target(model), 10, enqueued, enqueued + 300.0, context)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records]


def test_who_is_answered_at_once_never_counts_as_waiting(seen: Observer) -> None:
    one = waiter()
    one.outcome = Outcome.REFUSED
    seen.left(one, 100.0, 0, False)
    assert seen.levels == {}
    assert seen.waits["b", "refused"].count == 1


def test_a_wait_can_be_followed_by_its_request(
    seen: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omlx.admission")
    one = waiter(request=SimpleNamespace(id="r-7", waited_s=0.0))
    seen.enqueued(one, 1)
    one.outcome = Outcome.GRANTED
    seen.left(one, 103.0, 0, True)
    seen.refused("b", "model_busy", "text", 0.0, one.context.request)  # type: ignore[attr-defined]
    assert lines(caplog) == [
        "admission: request r-7 waits for 'b', 1 in the queue",
        "admission: request r-7 for 'b' granted after 3.00 s",
        "admission: request r-7 refused (model_busy): text",
    ]


def test_a_crowd_is_not_logged_one_by_one(
    seen: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omlx.admission")
    for waiting in range(1, 1001):
        seen.enqueued(waiter(), waiting)
    assert len(lines(caplog)) == 50


def test_a_swap_is_remembered_with_its_times(seen: Observer, clock: Clock) -> None:
    seen.drain_began(("a",), "b")
    assert seen.states["a"][0] == "draining"
    clock.now += 7
    seen.swap_began("b", ("a",), "age", 7.0, 5.0)
    seen.unload_began("a", 0.5)
    clock.now += 1
    seen.unload_ended("a", resident=False)
    seen.load_began("b", 99.0)
    assert seen.progress["load", "b"].estimate_s == 5.0, "the swap knows better"
    clock.now += 4
    seen.load_ended("b", ok=True)
    seen.swap_ended("b", "loaded", served=3)
    swap = seen.swaps[-1]
    assert (swap.target, swap.victims, swap.result, swap.served) == ("b", ("a",), "loaded", 3)
    assert (swap.drain_s, swap.load_s) == (7.0, 5.0)
    assert seen.drains["a"].total == 7.0
    assert seen.unloads["a"].total == 1.0
    assert seen.loads["b"].total == 4.0
    assert seen.swap_counts == {("age", "loaded"): 1}
    assert seen.progress == {}
    assert list(seen.states) == ["b"]


def test_a_failed_load_leaves_nothing(seen: Observer, clock: Clock) -> None:
    seen.swap_began("b", (), "fits", 0.0, 5.0)
    seen.load_began("b", 5.0)
    clock.now += 2
    seen.load_ended("b", ok=False)
    seen.swap_ended("b", "failed")
    assert seen.progress == {}
    assert seen.states == {}
    assert seen.load_failures == {"b": 1}
    assert seen.loads == {}


def test_a_drain_that_is_withdrawn_serves_on(seen: Observer) -> None:
    seen.drain_began(("a",), "b")
    seen.drain_withdrawn(("a",))
    assert seen.progress == {}
    assert seen.states["a"][0] == "resident"


def test_the_timeline_has_the_last_ten_minutes(seen: Observer, clock: Clock) -> None:
    seen.load_began("old", 1.0)
    clock.now += 1
    seen.load_ended("old", ok=False)
    clock.now += 700
    seen.load_began("b", 1.0)
    clock.now += 5
    seen.load_ended("b", ok=True)
    seen.turn("b", clock.now, clock.now, clock.now + 1.0)
    clock.now += 1
    shown = seen.timeline()
    assert shown["end"] - shown["start"] == 600.0
    assert shown["end"] == clock.day()
    began = 1_000_801.0
    assert shown["states"] == {
        "b": [["loading", began, began + 5], ["resident", began + 5, None]]
    }
    assert sum(share for _at, share in shown["turns"]["b"]) == 0.5


@pytest.mark.parametrize("kind", ["load", "unload", "drain", "swap"])
def test_what_is_longer_than_its_limit_is_stuck(
    kind: str, seen: Observer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen.stuck_s = 20.0
    {
        "load": lambda: seen.load_began("b", 5.0),
        "unload": lambda: seen.unload_began("b", 0.0),
        "drain": lambda: seen.drain_began(("b",), "c"),
        "swap": lambda: seen.swap_began("b", (), "fits", 0.0, 5.0),
    }[kind]()
    clock.now += 20.0
    seen.check_stuck()
    assert seen.problems() == []
    clock.now += 1.0
    before = seen.version
    seen.check_stuck()
    seen.check_stuck()
    (problem,) = seen.problems()
    assert (problem.kind, problem.model, problem.seconds) == (kind, "b", 21.0)
    assert len(lines(caplog)) == 1, "said once"
    assert f"the {kind}" in lines(caplog)[0]
    assert "'b'" in lines(caplog)[0]
    assert "21 s, limit 20 s" in lines(caplog)[0]
    assert seen.version > before, "readers look again"
    seen.load_ended("b", ok=True)
    seen.unload_ended("b", resident=False)
    seen.drain_withdrawn(("b",))
    seen.swap_ended("b", "loaded")
    seen.check_stuck()
    assert seen.problems() == []
    assert lines(caplog)[-1] == f"admission: the {kind} of 'b' goes on"


def test_a_swap_whose_load_hangs_is_one_problem(seen: Observer, clock: Clock) -> None:
    seen.swap_began("b", (), "fits", 0.0, 5.0)
    seen.load_began("b", 5.0)
    clock.now += 100
    assert [p.kind for p in seen.problems()] == ["load"]


@pytest.mark.parametrize(("estimate", "limit"), [(1.0, 60.0), (40.0, 200.0)])
def test_the_automatic_limit_follows_the_estimate(
    seen: Observer, clock: Clock, estimate: float, limit: float
) -> None:
    seen.load_began("b", estimate)
    clock.now += limit
    assert seen.problems() == []
    clock.now += 0.5
    assert [p.limit_s for p in seen.problems()] == [limit]


def test_a_check_of_a_section_is_a_problem_like_the_others(
    seen: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    found = [Problem("turn", "a", 61.0, 60.0, "'a' holds the turn")]
    seen.register_section("gpu_turn", lambda: {"on": True}, lambda: found)
    assert seen.sections() == {"gpu_turn": {"on": True}}
    seen.check_stuck()
    assert lines(caplog) == ["admission: stuck: 'a' holds the turn"]
    found[:] = [Problem("turn", "b", 61.0, 60.0, "logged elsewhere", logged=True)]
    seen.check_stuck()
    assert "logged elsewhere" not in "".join(lines(caplog))
    seen.reset()
    assert seen.sections() == {}
    assert seen.problems() == []


def test_a_section_that_fails_hides_no_other(seen: Observer) -> None:
    def fail() -> Any:
        raise RuntimeError("no")

    seen.register_section("bad", fail, fail)
    seen.register_section("good", lambda: 1)
    assert seen.sections() == {"bad": None, "good": 1}
    assert seen.problems() == []


def test_nothing_it_is_told_raises(
    seen: Observer, caplog: pytest.LogCaptureFixture, mocker: Any
) -> None:
    # The note is kept per method of the process: a fresh one here.
    mocker.patch.object(seen, "clock", side_effect=RuntimeError("clock"))
    for _ in range(3):
        seen.enqueued(waiter(), 1)
        seen.left(waiter(), 1.0, 1, True)
        seen.drain_began(("a",), "b")
        seen.swap_began("b", ("a",), "age", 0.0, 1.0)
        seen.load_began("b", 1.0)
        seen.load_ended("b", ok=True)
        seen.unload_began("a", 1.0)
        seen.check_stuck()
    assert "the observer failed" in "".join(lines(caplog))
    assert len(lines(caplog)) <= 8, "once a place"


def test_memory_is_bounded_whatever_comes(seen: Observer, clock: Clock) -> None:
    for i in range(5000):
        clock.now += 1
        model = f"m{i}"
        one = waiter(model)
        seen.enqueued(one, 1)
        one.outcome = Outcome.GRANTED
        seen.left(one, clock.now, 0, True)
        seen.refused(model, "model_busy", "text", 0.0, None)
        seen.swap_began(model, (f"v{i}",), "evict", 0.0, 1.0)
        seen.load_began(model, 1.0)
        clock.now += 1
        seen.load_ended(model, ok=True)
        seen.swap_ended(model, "loaded", 1)
        seen.unload_began(model, 1.0)
        clock.now += 1
        seen.unload_ended(model, resident=False)
        seen.turn(model, clock.now - 1, clock.now - 1, clock.now)
    most = MAX_NAMES + 1
    for store in (seen.levels, seen.waits, seen.loads, seen.unloads, seen.turn_shares):
        assert len(store) <= most
    assert len(seen.swaps) == len(seen.refusals) == RECENT
    assert seen.progress == {}
    assert seen.states == {}
    assert len(seen._spans) <= 1000
    assert len(seen._expected) <= most
    assert sum(w.count for w in seen.waits.values()) == 5000, "summed, not lost"


def test_the_watch_looks_by_itself_and_ends(seen: Observer, mocker: Any) -> None:
    import threading

    mocker.patch.object(sys.modules[Observer.__module__], "CHECK_S", 0.001)
    looked = threading.Event()
    mocker.patch.object(seen, "check_stuck", looked.set)
    seen.start_watch()
    seen.start_watch()
    assert looked.wait(10)
    assert sum(t.name == "admission-watch" for t in threading.enumerate()) == 1
    thread = next(t for t in threading.enumerate() if t.name == "admission-watch")
    seen.stop_watch()
    thread.join(10)
    assert not thread.is_alive()
