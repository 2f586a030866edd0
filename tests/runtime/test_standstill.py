"""A process that was stopped: what came due meanwhile is looked at once more (C8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from omlx_admission.core.queue import Admission
from omlx_admission.settings import Settings

from .fake_pool import FakePool, Model, Refused
from .virtual import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


class Stage:
    """Five requests for b, which loads; their budget is 8 s."""

    def __init__(self, loop: VirtualLoop, budget: float = 8.0) -> None:
        self.loop = loop
        self.pool = FakePool({"a": Model(6), "b": Model(6)}, ceiling=10)
        self.admission = Admission(self.pool, Settings(max_wait_s=budget), clock=loop.time)
        self.tasks: list[asyncio.Task[Any]] = [
            loop.create_task(self.admission.acquire(self.pool.ask("b"))) for _ in range(5)
        ]
        loop.turn()

    def stopped(self, seconds: float) -> None:
        """Time passes, and nothing runs meanwhile."""
        self.loop.now += seconds
        self.loop.turn()

    def over(self) -> None:
        """Nobody waits any more: the load may have been given up by now."""
        if "b" in self.pool.loads:
            self.pool.end_load("b")
        self.loop.turn()

    def refused(self) -> int:
        return sum(t.done() and isinstance(t.exception(), Refused) for t in self.tasks)


def test_c8_who_came_due_meanwhile_is_served_when_the_model_comes(loop: VirtualLoop) -> None:
    stage = Stage(loop)
    loop.advance(2.7)
    stage.stopped(12.0)
    assert stage.refused() == 0
    loop.advance(0.9)
    stage.pool.end_load("b")
    loop.turn()
    assert [t.done() and t.exception() is None for t in stage.tasks] == [True] * 5
    assert stage.pool.models["b"].leases == 5


def test_c8_also_where_the_deadline_was_just_before_the_end_of_it(loop: VirtualLoop) -> None:
    stage = Stage(loop)
    loop.advance(2.7)
    stage.stopped(5.4)
    assert stage.refused() == 0
    loop.advance(0.9)
    stage.pool.end_load("b")
    loop.turn()
    assert stage.refused() == 0


def test_c8_once_and_not_longer_than_a_moment(loop: VirtualLoop) -> None:
    stage = Stage(loop)
    loop.advance(2.7)
    stage.stopped(100.0)
    loop.advance(9.9)
    assert stage.refused() == 0
    loop.advance(0.2)
    assert stage.refused() == 5
    assert stage.admission.policy.waiting == 0
    stage.over()


def test_a_deadline_in_time_is_a_deadline(loop: VirtualLoop) -> None:
    stage = Stage(loop)
    loop.advance(7.9)
    assert stage.refused() == 0
    loop.advance(0.2)
    assert stage.refused() == 5
    stage.over()
