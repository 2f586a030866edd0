"""Clients that come back when they are told to, and give up after their third try."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from omlx_admission.core.queue import Admission
from omlx_admission.settings import Settings

from .fake_pool import FakePool, Model
from .virtual import VirtualLoop

HINT = re.compile(r"about (\d+) s")

BUDGET_S, BUSY_S, LOAD_S = 5.0, 20.0, 1.5


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


class House:
    """'a' is in use for 20 s; clients of 'b' wait 5 s at each of three tries."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.pool = FakePool({"a": Model(6), "b": Model(6)}, ceiling=10)
        self.pool.models["a"].engine = object()
        self.pool.models["a"].leases = 1
        self.admission = Admission(self.pool, Settings(max_wait_s=BUDGET_S), clock=loop.time)

    async def client(self) -> int:
        """The number of the try that is served; 0 where none is."""
        for number in (1, 2, 3):
            try:
                await self.admission.acquire(self.pool.ask("b"))
            except Exception as refused:
                await asyncio.sleep(float(HINT.findall(str(refused))[0]))
            else:
                return number
        return 0

    def play(self, clients: int) -> list[int]:
        tasks = [self.loop.create_task(self.client()) for _ in range(clients)]
        self.loop.turn()
        self.loop.advance(BUSY_S)
        self.pool.models["a"].leases = 0
        self.loop.call_soon(self.admission.released, "a")
        self.loop.advance(LOAD_S)
        self.pool.end_load("b")
        self.loop.advance(BUDGET_S)
        return [task.result() for task in tasks]


@pytest.mark.parametrize("jitter", [1.0, 1.1, 1.2])
def test_what_runs_longer_than_a_drain_may_last_is_told_in_the_hint(
    loop: VirtualLoop, mocker: Any, jitter: float
) -> None:
    """The drain is given up after 10 s; that 'a' has run for as long is known still."""
    mocker.patch("omlx_admission.core.refusal.random.uniform", return_value=jitter)
    assert math.isclose(2 * BUDGET_S, House(loop).admission.policy.dials.drain_limit)
    assert House(loop).play(clients=2) == [3, 3]
