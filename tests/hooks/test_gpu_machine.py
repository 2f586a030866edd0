"""The turn under faults, as a state machine with real threads.

Every rule waits until all threads have come to rest, so that the order of events is the
machine's and not the scheduler's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omlx_admission.gpu_turn import holding as gpu_hold
from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.gpu_turn.turn import GpuTurn, TurnAbandoned

PATIENCE_S = 20.0
OWNERS = ("x", "y")
OUTCOMES = ("well", "error in the work", "killed in the work", "error in the drain")


class Killed(BaseException):
    """Thrown into a thread."""


class Worker:
    """A thread whose work on the GPU ends when, and how, the machine says."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.at_rest = threading.Event()
        self.closing = False
        self.outcome = "well"
        self.drained = 0
        self.answer: Future[str] | None = None
        self._finish: queue.Queue[str] = queue.Queue()
        self._orders: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def start(self) -> None:
        """Ask for the turn; returns when the thread works or waits."""
        self.at_rest.clear()
        self.drained = 0
        answer: Future[str] = Future()
        self.answer = answer

        def order() -> None:
            try:
                answer.set_result(
                    gpu_hold.held(
                        self.owner,
                        "test",
                        self._work,
                        self._drain,
                        owner=self.owner,
                        alive=self.at_rest.set,
                        closing=lambda: self.closing,
                    )
                )
            except BaseException as error:
                answer.set_exception(error)

        answer.add_done_callback(lambda _: self.at_rest.set())
        self._orders.put(order)
        assert self.at_rest.wait(PATIENCE_S)

    def _work(self) -> str:
        self.at_rest.set()
        self.outcome = self._finish.get(timeout=PATIENCE_S)
        if self.outcome == "error in the work":
            raise ValueError("work")
        if self.outcome == "killed in the work":
            raise Killed
        return "done"

    def _drain(self) -> None:
        self.drained += 1
        if self.outcome == "error in the drain":
            raise RuntimeError("drain")

    def finish(self, outcome: str) -> None:
        """Let the work end; returns when the thread has handed over."""
        self._finish.put(outcome)
        assert self.answer is not None
        error = self.answer.exception(PATIENCE_S)
        expected = {
            "well": type(None),
            "error in the work": ValueError,
            "killed in the work": Killed,
            "error in the drain": RuntimeError,
        }[outcome]
        assert type(error) is expected, (outcome, error)
        assert self.drained == 1, "handed over without a drain"

    def take_and_die(self) -> None:
        """Take the turn without a way to give it back, and end the thread."""
        turn = gpu_turn.current
        assert turn is not None
        self._orders.put(lambda: turn.acquire(self.owner, "dies") and None)
        self._orders.put(None)
        self.thread.join(PATIENCE_S)

    def end(self) -> None:
        self._orders.put(None)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


class Machine(RuleBasedStateMachine):
    """Workers ask, work, fail, die, and their engines close."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gpu_turn, "LOOK_S", 0.002)
        self.turn = GpuTurn()
        self.patch.setattr(gpu_turn, "current", self.turn)
        self.workers: list[Worker] = []
        self.holder: Worker | None = None
        self.waiting: list[Worker] = []

    def _next(self) -> None:
        """The first waiter has the turn by now, or soon after a death."""
        self.holder = self.waiting.pop(0) if self.waiting else None
        if self.holder is not None:
            self.holder.at_rest.wait(PATIENCE_S)

    @rule(owner=st.sampled_from(OWNERS))
    def ask(self, owner: str) -> None:
        worker = Worker(owner)
        self.workers.append(worker)
        worker.start()
        if self.holder is None:
            self.holder = worker
        else:
            self.waiting.append(worker)

    @precondition(lambda self: self.holder is not None)
    @rule(outcome=st.sampled_from(OUTCOMES))
    def finish(self, outcome: str) -> None:
        assert self.holder is not None
        self.holder.finish(outcome)
        self._next()

    @rule(owner=st.sampled_from(OWNERS))
    def close(self, owner: str) -> None:
        """An engine closes, waiting or holding: its waiters leave, its holder goes on."""
        leaving = [w for w in self.waiting if w.owner == owner]
        assert self.turn.abandon(owner) == len(leaving)
        for worker in leaving:
            assert worker.answer is not None
            assert type(worker.answer.exception(PATIENCE_S)) is TurnAbandoned
            assert worker.drained == 0
            self.waiting.remove(worker)

    @precondition(lambda self: bool(self.waiting))
    @rule(data=st.data())
    def close_unseen(self, data: st.DataObject) -> None:
        """Nobody calls abandon, but the engine says by itself that it closes."""
        worker = data.draw(st.sampled_from(self.waiting))
        worker.closing = True
        assert worker.answer is not None
        assert type(worker.answer.exception(PATIENCE_S)) is TurnAbandoned
        self.waiting.remove(worker)

    @precondition(lambda self: self.holder is None)
    @rule()
    def die_holding(self) -> None:
        worker = Worker("dead")
        worker.take_and_die()
        survivor = Worker("x")
        self.workers.append(survivor)
        survivor.start()
        self.holder = survivor

    @invariant()
    def one_at_a_time_in_order(self) -> None:
        deadline = threading.Event()
        for _ in range(2000):
            state = self.turn.snapshot()
            seen = (state.holder, [name for name, _s, _w in state.waiting])
            wanted = (
                self.holder.owner if self.holder else None,
                [w.owner for w in self.waiting],
            )
            if seen == wanted:
                break
            deadline.wait(0.001)  # a thread on its way to rest
        assert seen == wanted
        at_work = [w for w in self.workers if w is not self.holder and w not in self.waiting]
        for worker in at_work:
            assert worker.answer is not None
            assert worker.answer.done()

    def teardown(self) -> None:
        try:
            while self.holder is not None:
                self.finish("well")
            for worker in self.workers:
                worker.end()
            state = self.turn.snapshot()
            assert (state.holder, state.waiting) == (None, ())
        finally:
            self.patch.undo()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestMachine = Machine.TestCase
