"""The rule that is in force, and the clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from omlx_admission.core.stream_hold import Keepalive, Rule

from ..virtual import VirtualLoop
from .rig import AFTER, FRAMES, HANDLING, INTERVAL, Waiter


@pytest.fixture(autouse=True)
def _rule() -> Iterator[None]:
    rule = Rule(AFTER, lambda p: Keepalive(FRAMES[p].encode(), INTERVAL))
    HANDLING.hold_for = rule.hold_for
    yield
    HANDLING.reset()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.turn()
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def waiter(loop: VirtualLoop) -> Waiter:
    return Waiter(loop)
