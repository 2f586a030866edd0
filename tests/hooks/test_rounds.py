"""Hand-outs against evictions, at random (B08, B12, B26).

A round hands one model to two requests, which use it some turns of the event loop
later, while something evicts it at another random turn: a swap to a model that does
not fit beside it, the sweep for expired models, the memory enforcer, an unload by hand
or one of an idle model. What may never happen: a use of an engine that has not started
or is being torn down, a lease or a mark that is left.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from omlx_admission.hooks.pool.state import state_of

from .by_hand import ByHand, unload
from .conftest import Make, enforcer_of, run

#: Most turns of the event loop between a hand-out and its use, or before an eviction.
_TURNS = 40


class Rounds:
    """Rounds on one pool: A is handed out, B does not fit beside it, D fits beside either.

    Attributes:
        problems: what was broken, in words; empty is what is promised.
        evictions: how often each kind of eviction was tried.
        unloads: how many of them found the model idle or let it come to rest.
    """

    def __init__(self, pool: Any, use: Callable[[Any], Awaitable[None]], seed: int) -> None:
        self.pool, self.model, self.other, self.small = pool, "a", "b", "d"
        self.problems: list[str] = []
        self.evictions: Counter[str] = Counter()
        self.unloads = 0
        self.uses = 0
        self._use = use
        self._chance = random.Random(seed)
        self._kinds: dict[str, Callable[[], Awaitable[Any]]] = {
            "swap": self._swap,
            "expired": self._expire,
            "enforcer": self._enforce,
            "by hand": lambda: unload(pool).task,
            "if idle": lambda: pool.unload_if_idle_unpinned("a"),
        }

    async def run(self, rounds: int) -> None:
        """Play so many rounds; then nothing may be left."""
        for number in range(rounds):
            before = self._entry.engine
            kind = self._chance.choice(sorted(self._kinds))
            self.evictions[kind] += 1
            # It takes no lease and uses what it is handed, so that nothing is kept for a use.
            path = "/admin/api/bench/start"
            results = await asyncio.gather(
                ByHand(self._request, path).task,
                ByHand(self._request, path).task,
                self._later(self._kinds[kind]),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    self.problems.append(f"round {number}, {kind}: {result!r}")
            if before is not None and self._entry.engine is not before:
                self.unloads += 1
            self._books(f"round {number}, {kind}")
        for task in set(state_of(self.pool).admission._loads.values()):
            await task
        self._nothing_left()

    @property
    def _entry(self) -> Any:
        return self.pool._entries[self.model]

    async def _turns(self) -> None:
        for _ in range(self._chance.randrange(_TURNS)):
            await asyncio.sleep(0)

    async def _request(self) -> None:
        lease = self._chance.random() < 0.5
        await self._turns()
        engine = await self.pool.get_engine(self.model, **({"_lease": True} if lease else {}))
        try:
            self._in_service(engine, "handed out")
            await self._turns()
            self._in_service(engine, "used")
            await self._use(engine)
            self.uses += 1
        finally:
            if lease:
                await self.pool.release_engine(self.model)

    def _in_service(self, engine: Any, when: str) -> None:
        if self._entry.engine is not engine or self.model in state_of(self.pool).unloading:
            self.problems.append(f"a dying engine was {when}")

    async def _later(self, evict: Callable[[], Awaitable[Any]]) -> None:
        await self._turns()
        await evict()

    async def _swap(self) -> None:
        await self.pool.get_engine(self.other, _lease=True)
        await self.pool.release_engine(self.other)

    async def _expire(self) -> None:
        for entry in self.pool._entries.values():
            entry.last_access = min(entry.last_access, 1.0)
        settings = SimpleNamespace(ttl_seconds=1)
        await self.pool.check_ttl_expirations(SimpleNamespace(get_settings=lambda _m: settings))

    async def _enforce(self) -> None:
        """Soft pressure: an idle model leaves, if there are two."""
        await self.pool.get_engine(self.small)
        self._entry.last_access = 1.0
        enforcer = self.pool._process_memory_enforcer
        enforcer.usage = int(1000 * 0.9)
        try:
            await enforcer._check_and_enforce()
        finally:
            enforcer.usage = 0

    def _books(self, when: str) -> None:
        entries = self.pool._entries
        known = sum(e.estimated_size for e in entries.values() if e.engine is not None)
        loading = any(e.is_loading for e in entries.values())
        if not loading and not state_of(self.pool).unloading:
            counted = self.pool._current_model_memory
            if counted != known:
                self.problems.append(f"{when}: {counted} bytes counted, {known} loaded")

    def _nothing_left(self) -> None:
        for name, entry in self.pool._entries.items():
            if entry.in_use:
                self.problems.append(f"{entry.in_use} leases of {name} left")
            if entry.pending_unload_reason:
                self.problems.append(f"{name} is marked still: {entry.pending_unload_reason}")
        state = state_of(self.pool)
        if state.unloading or state.leaving:
            self.problems.append("a teardown or a drain is left")
        if state.admission is not None and state.admission.policy.waiting:
            self.problems.append(f"{state.admission.policy.waiting} waiters left")


def played(make_house: Make, seed: int, rounds: int, **settings: Any) -> Rounds:
    """So many rounds on fake engines, which object to any use before or after their time."""
    plays: list[Rounds] = []

    async def use(engine: Any) -> None:
        for _ in range(3):
            if engine.start.await_count != 1 or engine.stop.await_count:
                raise RuntimeError("engine not started")
            await asyncio.sleep(0)

    async def test() -> None:
        house = make_house(max_age_s=0.0, linger_s=0.0, **settings)
        enforcer_of(house.pool)
        plays.append(Rounds(house.pool, use, seed))
        await plays[0].run(rounds)
        house.assert_idle()

    # An unload collects garbage several times; pytest's own is not its business.
    gc.collect()
    gc.freeze()
    try:
        run(test)
    finally:
        gc.unfreeze()
    return plays[0]


@pytest.mark.parametrize("seed", [1])
def test_b12_no_engine_goes_between_its_hand_out_and_its_use(
    make_house: Make, seed: int
) -> None:
    play = played(make_house, seed, 40)
    assert play.problems == []
    assert play.uses == 80
    assert play.unloads > 10
    assert len(play.evictions) == 5


def test_b12_the_rounds_find_what_stock_does(make_house: Make) -> None:
    """Without our leases the engines go: the check above can fail."""
    play = played(make_house, 1, 20, leases=False, unloads=False)
    assert any("dying engine" in problem for problem in play.problems)
    assert any("not started" in problem for problem in play.problems)
