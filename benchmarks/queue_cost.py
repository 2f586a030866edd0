"""What one waiter costs, and how long the event loop is held while thousands are released.

The real runtime (``omlx_admission.core.queue``) over a pool that loads nothing;
one process, wall clock.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omlx_admission.core.policy.model import ModelView, PoolView, Target
from omlx_admission.core.port import Ask
from omlx_admission.core.queue import Admission
from omlx_admission.core.refusal import Refusal
from omlx_admission.settings import Settings


class NoPool:
    """A pool with one cold model whose load ends when :attr:`loaded` is set."""

    def __init__(self) -> None:
        self.resident = False
        self.leases = 0
        self.loaded = asyncio.Event()
        self.ask = Ask(Target("b"), 1, {"model_id": "b"})

    def view(self, targets: Sequence[Target], max_models: int) -> PoolView:
        """See :class:`~omlx_admission.core.port.PoolPort`, as all below."""
        models = {}
        if self.resident:
            models["b"] = ModelView("b", 1, busy=self.leases > 0, leases=self.leases)
        return PoolView(
            models, frozenset(targets if self.resident else ()), ceiling=1, fixed_ceiling=1
        )

    def size(self, arguments: Mapping[str, Any]) -> int:
        return 1

    def take(self, target: Target, leases: int) -> Any:
        self.leases += leases
        return self

    def places(self, model: str) -> int | None:
        return None

    def give_back(self, model: str) -> None:
        self.leases -= 1

    def in_service(self, model: str, engine: Any) -> bool:
        return True

    def mark(self, model: str, target: Target) -> None: ...

    def unmark(self, model: str) -> None: ...

    async def load(self, ask: Ask, victims: Sequence[str], max_models: int) -> None:
        await self.loaded.wait()
        self.resident = True

    def passes(self, error: Exception) -> bool:
        return False

    def copy_error(self, error: Exception) -> Exception:
        return error

    def not_found(self, model: str) -> Exception:
        return KeyError(model)

    def too_large(self, model: str, size: int, view: PoolView, text: str) -> Exception:
        return MemoryError(text)

    def refused(self, refusal: Refusal) -> Exception:
        return RuntimeError(refusal.message)

    def seconds_per_byte(self) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class Cost:
    """One round: seconds per waiter to enter and to be woken, and the longest block."""

    enter_s: float
    wake_s: float
    block_s: float

    @property
    def total_s(self) -> float:
        """Enter and wake."""
        return self.enter_s + self.wake_s


async def _round(waiters: int) -> Cost:
    pool = NoPool()
    admission = Admission(pool, Settings(max_queue=waiters + 1))
    running = asyncio.gather(*(admission.acquire(pool.ask) for _ in range(waiters)))
    start = time.perf_counter()
    while admission.policy.waiting < waiters:  # noqa: ASYNC110 - turns of the loop are the subject
        await asyncio.sleep(0)
    entered = time.perf_counter()
    pool.loaded.set()
    longest, before = 0.0, time.perf_counter()
    while not running.done():
        # One turn of the loop: nobody else can run within it.
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    await running
    woken = time.perf_counter()
    admission.shut_down()
    return Cost((entered - start) / waiters, (woken - entered) / waiters, longest)


def measure(waiters: int, rounds: int) -> Cost:
    """Medians over ``rounds``; the block is the median of the rounds' longest."""
    logger = logging.getLogger("omlx.admission")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a line per refusal and swap is no cost of the queue
    costs = []
    try:
        for _ in range(rounds):
            gc.collect()
            costs.append(asyncio.run(_round(waiters)))
    finally:
        logger.setLevel(level)
    return Cost(
        statistics.median(c.enter_s for c in costs),
        statistics.median(c.wake_s for c in costs),
        statistics.median(c.block_s for c in costs),
    )
