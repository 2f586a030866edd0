"""The queue as a state machine, with models whose running answers can be parked.

The rules and invariants are those of `test_admission_machine`; what a model runs is taken
out by the fake pool at once, in parts, or not at all, clients leave while they are parked,
and each parked answer has one end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, multiple, precondition, rule

from omlx_admission.core.policy.model import PoolView, Target
from omlx_admission.core.port import ParkedAnswer
from omlx_admission.core.queue import Admission
from omlx_admission.settings import Settings

from .fake_pool import Broken, FakePool, Model, Refused
from .test_admission_machine import MODELS, SIZES, Queue
from .virtual import VirtualLoop

pytestmark = pytest.mark.slow

#: Bytes of one parked answer: of those, two may be parked.
ANSWER = 20


@dataclass(eq=False)
class Answer:
    """One request that was running; it knows how it ended."""

    machine: ParkingQueue
    number: int
    model: str
    leave: Callable[[], None] | None = None
    end: str | None = None

    def waits(self, leave: Callable[[], None]) -> None:
        self.leave = leave

    def lost(self, error: Exception) -> None:
        self._ends(error.refusal.code if isinstance(error, Refused) else type(error).__name__)

    def goes_on(self) -> None:
        self._ends("back")
        self.machine.running[self.number] = self.model

    def leaves(self) -> None:
        assert self.leave is not None
        self._ends("left")
        self.leave()

    def _ends(self, end: str) -> None:
        assert self.end is None, "a parked answer ended twice"
        self.end = end
        self.machine.parked.remove(self)


@dataclass
class ParkingPool(FakePool):
    """``asked``: models that the queue wants parked, and the bytes that each may take."""

    machine: Any = None
    asked: dict[str, float | None] = field(default_factory=dict)
    unparkable: frozenset[str] = frozenset({"e"})

    def held(self) -> int:
        return ANSWER * len(self.machine.parked)

    def view(self, targets: Sequence[Target], max_models: int) -> PoolView:
        view = super().view(targets, max_models)
        models = {
            name: replace(
                model,
                answering=1e6
                if self.models[name].marked and name not in self.unparkable
                else None,
            )
            for name, model in view.models.items()
        }
        used = view.used + self.held()
        return replace(view, models=models, used=used, committed=used, parked=self.held())

    def park(self, model: str, most: int | None) -> None:
        assert self.models[model].marked
        assert model not in self.unparkable
        self.asked[model] = most

    def put_back(self, model: str, engine: Any, answers: Sequence[ParkedAnswer]) -> None:
        assert self.models[model].engine is engine
        for answer in answers:
            assert isinstance(answer, Answer)
            answer.goes_on()

    def evict(self, name: str) -> None:
        super().evict(name)
        self.asked.pop(name, None)


class ParkingQueue(Queue):
    def __init__(self) -> None:
        super().__init__()
        places = {"a": 2, "b": 3, "d": 2}
        models = {n: Model(100 * s, places=places.get(n)) for n, s in SIZES.items()}
        self.pool = ParkingPool(models, ceiling=1000, machine=self)
        self.parked: list[Answer] = []
        config = Settings(max_wait_s=120.0, max_queue=8, park=True)
        self.admission = Admission(self.pool, config, clock=self.loop.time)

    def _take_out(self, model: str, most: int) -> None:
        numbers = [n for n, m in self.running.items() if m == model][:most]
        limit = self.pool.asked[model]
        if limit is not None and ANSWER * len(numbers) > limit:
            del self.pool.asked[model]  # it drains on
            return
        if limit is not None:
            self.pool.asked[model] = limit - ANSWER * len(numbers)
        answers = [Answer(self, number, model) for number in numbers]
        for number in numbers:
            del self.running[number]
            self.pool.give_back(model, self.pool.models[model].engine)
        self.parked += answers
        self.loop.call_soon(self.admission.parked, self.pool.ask(model), answers)
        self.loop.turn()

    @rule(
        target=Queue.requests,
        first=st.sampled_from("abc"),
        other=st.sampled_from("abcd"),
        out=st.booleans(),
    )
    def one_drains_for_another(self, first: str, other: str, out: bool) -> Any:
        """The long way to a park; the other rules come in between."""
        numbers = [self.ask(first)]
        if first in self.pool.loads:
            self.pool.end_load(first)
            self.loop.turn()
        numbers.append(self.ask(other))
        self.loop.advance(35.0)
        for model in self._to_park() if out else ():
            self._take_out(model, 2)
        return multiple(*numbers)

    @rule(pick=st.integers(0, 5), most=st.integers(1, 3))
    @precondition(lambda self: self._to_park())
    def park(self, pick: int, most: int) -> None:
        """Between two bursts, as long as it drains; what was on its way comes later."""
        self._take_out(self._to_park()[pick % len(self._to_park())], most)

    def _to_park(self) -> list[str]:
        busy = set(self.running.values())
        return sorted(m for m in self.pool.asked if self.pool.models[m].marked and m in busy)

    @rule(pick=st.integers(0, 5))
    @precondition(lambda self: self.parked)
    def leave_while_parked(self, pick: int) -> None:
        answer = self.parked[pick % len(self.parked)]
        self.loop.call_soon(answer.leaves)
        self.loop.turn()

    @rule(name=MODELS)
    @precondition(lambda self: self.parked)
    def everybody_but_the_parked_leaves(self, name: str) -> None:
        for number, task in self.tasks.items():
            if number not in self.outcomes:
                task.cancel()
        self.loop.turn()

    @invariant()
    def one_outcome_each(self) -> None:
        waiting = [n for n in self.tasks if n not in self.outcomes]
        policy = self.admission.policy
        assert len(waiting) + len(self.parked) == policy.waiting
        assert len(self.parked) == policy.parked
        assert not self.admission.broken

    @invariant()
    def memory_stays_under_the_ceiling(self) -> None:
        assert self.pool.used() + self.pool.held() <= self.pool.ceiling

    def everybody_ends(self) -> None:
        """Every parked answer has come back and ended, or was told."""
        super().everybody_ends()
        assert self.parked == []
        assert self.admission.policy.parked == 0


TestParkingQueue = ParkingQueue.TestCase
TestParkingQueue.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    deadline=None,
)


class Alone:
    """The parts of a machine that an answer and its pool ask for."""

    def __init__(self) -> None:
        self.running: dict[int, str] = {}
        self.parked: list[Answer] = []


def test_shutdown_and_a_fault_of_the_queue_end_parked_answers() -> None:
    for end, said in (("shut_down", "shutting_down"), ("_break", "QueueBroken")):

        async def scenario(end: str = end) -> Answer:
            machine: Any = Alone()
            pool = ParkingPool({"a": Model(600)}, ceiling=1000, machine=machine)
            admission = Admission(pool, Settings(park=True))
            answer = Answer(machine, 1, "a")
            machine.parked.append(answer)
            # B is in use, so A waits.
            pool.models["b"] = Model(600, engine=object(), leases=1)
            admission.parked(pool.ask("a"), [answer])
            assert answer.end is None
            getattr(admission, end)(*((Broken(),) if end == "_break" else ()))
            assert admission.policy.parked == 0
            return answer

        assert asyncio.run(scenario()).end == said


def test_parked_answers_count_for_no_limit_of_the_queue() -> None:
    async def scenario() -> None:
        machine: Any = Alone()
        pool = ParkingPool({"a": Model(600)}, ceiling=1000, machine=machine)
        admission = Admission(pool, Settings(park=True, max_queue=1))
        answers = [Answer(machine, n, "a") for n in range(3)]
        machine.parked += answers
        pool.models["b"] = Model(600, engine=object(), leases=1)
        admission.parked(pool.ask("a"), answers)
        waiting = asyncio.ensure_future(admission.acquire(pool.ask("a")))
        await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(Refused) as refused:
            await admission.acquire(pool.ask("a"))
        assert refused.value.refusal.code == "admission_queue_full"
        admission.shut_down()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(scenario())


#: Seconds of a swap, and W, of the two busy models below.
SWAP, AGE = 10.0, 40.0


class Busy:
    """Two models with endless answers, and memory for one; newcomers come all the time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop = VirtualLoop()
        self.running: dict[int, str] = {}
        self.parked: list[Answer] = []
        self.began: dict[Answer, float] = {}
        self.silences: list[float] = []
        self.waits: list[float] = []
        self.asked: list[str] = []
        self.turns: list[float] = []
        self.taken_at: dict[str, float] = {}
        self.loaded_at = {"a": 0.0, "b": 0.0}
        self.tasks: set[asyncio.Task[None]] = set()
        self.count = 0
        models = {name: Model(600, places=4) for name in "ab"}
        self.pool = ParkingPool(models, ceiling=1000, machine=self)
        config = Settings(max_wait_s=1e6, max_age_s=AGE, park=True)
        self.admission = Admission(self.pool, config, clock=self.loop.time)

    async def request(self, model: str) -> None:
        asked = self.loop.time()
        self.asked.append(model)
        await self.admission.acquire(self.pool.ask(model))
        self.asked.remove(model)
        self.waits.append(self.loop.time() - asked)
        self.count += 1
        self.running[self.count] = model

    def look(self) -> None:
        """Once a virtual second: loads end, and what has to be parked is."""
        now = self.loop.time()
        for model in list(self.pool.loads):
            began = self.taken_at.setdefault(model, now)
            if now >= began + SWAP:
                del self.taken_at[model]
                self.loaded_at[model] = now
                self.pool.end_load(model)
                self.loop.turn()
        for model in list(self.pool.asked):
            numbers = [n for n, m in self.running.items() if m == model]
            if not self.pool.models[model].marked or not numbers:
                continue
            self.turns.append(now - self.loaded_at[model])
            # What is beyond the share of memory has an end.
            for number in numbers[2:]:
                del self.running[number]
                self.pool.give_back(model, self.pool.models[model].engine)
            answers = [Answer(self, number, model) for number in numbers[:2]]
            for answer in answers:
                del self.running[answer.number]
                self.pool.give_back(model, self.pool.models[model].engine)
                self.began[answer] = now
            self.parked += answers
            self.loop.call_soon(self.admission.parked, self.pool.ask(model), answers)
            self.loop.turn()
        for answer, since in list(self.began.items()):
            if answer.end is not None:
                assert answer.end == "back"
                self.silences.append(now - since)
                del self.began[answer]

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            if len(self.tasks) < 4:
                model = self.random.choice("ab")
                # No more than there are places: who waits for one waits for an answer's end.
                held = [*self.running.values(), *(a.model for a in self.parked), *self.asked]
                if held.count(model) < 4 and self.random.random() < 0.2:
                    task = self.loop.create_task(self.request(model))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
            self.loop.advance(1.0)
            self.look()

    def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.loop.turn()
        self.admission.shut_down()
        self.loop.close()


@pytest.mark.parametrize("seed", range(5))
def test_two_models_that_are_busy_all_the_time_share_and_keep_the_bounds(seed: int) -> None:
    """Nobody starves, no model is parked before its turn, nobody is silent for longer than
    two swaps and the other model's turn."""
    busy = Busy(seed)
    busy.run(3000)
    turn = max(AGE / 2, SWAP)
    # Of an answer that has run for very long: its age forbids nothing. The clock of the
    # test ticks once a second, and several things take a tick each.
    ticks = 4.0
    most = AGE + turn + SWAP / 5 + ticks
    assert len(busy.silences) >= 20
    assert min(busy.turns[1:]) >= turn - ticks
    assert max(busy.silences) <= 2 * SWAP + most
    assert max(busy.waits) <= 2 * SWAP + most
    still = [busy.loop.time() - since for since in busy.began.values()]
    assert max(still, default=0.0) <= 2 * SWAP + most
    busy.end()
