"""F1: a cancel at any await of a load, an unload, a drain or a reload leaves right books.

Several of them run at once, in an order that a seed decides, and each is cancelled after
a number of turns of the loop that the seed decides too. ``CANCEL_ROUNDS`` is how many
orders are played: a thousand take some seconds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from omlx_admission.hooks.pool import model_dirs
from omlx_admission.hooks.pool import pending_unloads as pending
from omlx_admission.hooks.pool.state import state_of

from . import by_hand
from .conftest import SIZES, House, Make, until

ROUNDS = int(os.environ.get("CANCEL_ROUNDS", "400"))

#: Most turns of the loop before a cancel; most end sooner than that.
_TURNS = 30

MODELS = ("a", "b", "d", "p")


class Inline(concurrent.futures.Executor):
    """oMLX's load thread, whose jobs are done in the turn of the loop that asks."""

    def submit(self, job: Any, /, *args: Any, **kwargs: Any) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(None)
        return done


class Play:
    """Loads, unloads, drains and reloads of one pool, and cancels of each."""

    def __init__(self, house: House, models: str, seed: int) -> None:
        self.house, self.models = house, models
        self.random = random.Random(seed)
        self.done: list[str] = []
        # Engines take some turns to start and to stop, each another number.
        house._start = self._start  # type: ignore[method-assign]
        house._stop = self._stop  # type: ignore[method-assign]

    async def _turns(self, most: int) -> None:
        for _ in range(self.random.randint(0, most)):
            await asyncio.sleep(0)

    async def _start(self, _name: str) -> None:
        await self._turns(20)

    async def _stop(self, _name: str) -> None:
        await self._turns(20)

    # -- what is cancelled ----------------------------------------------------

    async def request(self) -> None:
        model = self.random.choice(MODELS)
        await self.house.get(model)
        try:
            await self._turns(30)
        finally:
            await self.house.release(model)

    async def unload(self) -> None:
        await self.house.pool._unload_engine(self.random.choice(MODELS))

    async def drain(self) -> None:
        query = self.random.choice(("", "mode=now", "mode=if-idle"))
        asking = by_hand.unload(self.house.pool, self.random.choice(MODELS), query=query)
        try:
            await asking.task
        except asyncio.CancelledError:
            asking.task.cancel()
            await asyncio.gather(asking.task, return_exceptions=True)
            raise

    async def mark(self) -> None:
        """The enforcer's, of a model that is in use."""
        model = self.random.choice(MODELS)
        self.house.pool._mark_pending_unload_locked(model, "hard memory pressure")

    async def evict(self) -> None:
        request = SimpleNamespace(
            target_cap_bytes=800, predicted_transient_bytes=400, request_id="r"
        )
        await self.house.pool._evict_idle_lru_for_prefill(
            exclude_model_id=self.random.choice(MODELS), eviction_request=request
        )

    async def reload(self) -> None:
        """What the admin's reload does with the pool."""
        pool = self.house.pool

        async def stock() -> None:
            for model in pool.get_loaded_model_ids():
                await pool._unload_engine(model)
            pool._entries.clear()
            pool._current_model_memory = 0
            pool.discover_models([self.models], [])
            self.sizes()

        await by_hand.ByHand(
            lambda: model_dirs.change_model_dirs(stock, None, (), {}),
            path="/admin/api/reload",
            max_wait="0.2",
        ).task

    def sizes(self) -> None:
        """A rescan takes them from the files."""
        for name, size in SIZES.items():
            entry = self.house.pool._entries[name]
            if entry.engine is None and not entry.is_loading:
                entry.estimated_size = size

    # -- one order --------------------------------------------------------------

    async def order(self) -> None:
        actions = [self.request, self.request, self.unload, self.drain]
        actions.append(self.evict)
        if self.house.admission is not None:
            # Without the queue nobody follows a mark, and a reload is oMLX's own.
            actions += [self.mark, self.reload]
        chosen = self.random.sample(actions, self.random.randint(1, 4))
        await asyncio.gather(*(self._cancelled(action) for action in chosen))

    async def _cancelled(self, action: Callable[[], Awaitable[None]]) -> None:
        await self._turns(20)
        task = asyncio.ensure_future(action())
        for _ in range(self.random.randint(0, _TURNS)):
            if task.done():
                break
            await asyncio.sleep(0)
        if self.random.random() < 0.9:
            task.cancel()
        name = action.__name__
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await task
            except Exception:
                name += " refused"
            else:
                name += " whole"
            self.done.append(name)
            return
        self.done.append(f"{name} cancelled")

    def is_quiet(self) -> bool:
        pool, state = self.house.pool, state_of(self.house.pool)
        marks = [e for e in pool._entries.values() if e.pending_unload_reason or e.is_loading]
        admission = state.admission
        quiet = admission is None or (
            not admission.policy.waiting
            and admission.policy.swap is None
            and not admission._loads
        )
        return quiet and not (marks or state.unloading or state.leaving or state.reloading)

    async def check(self, order: int) -> None:
        await until(self.is_quiet)
        self.house.assert_idle()
        found = self.house.pool._current_model_memory
        assert found == self.house.tracked(), f"order {order}: {self.done[-4:]}"

    async def everything_loads(self) -> None:
        for model in MODELS:
            engine = await self.house.get(model)
            assert engine.stop.await_count == 0
            await self.house.release(model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("queue", [True, False], ids=["queue", "no queue"])
def test_f1_a_cancel_at_any_await_leaves_right_books(
    make_house: Make,
    mocker: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    seed: int,
    queue: bool,
) -> None:
    async def test() -> None:
        house = make_house(max_age_s=0.0, linger_s=0.0, max_wait_s=20.0, queue=queue)
        monkeypatch.setattr(model_dirs, "_admin_pool", lambda: house.pool)
        mocker.patch("omlx.engine_core._global_mlx_executor", Inline())
        # Each unload collects several times; nothing here is garbage of that kind.
        mocker.patch("gc.collect", lambda *_: 0)
        monkeypatch.setattr(pending, "_POLL_S", 0.001)
        play = Play(house, str(tmp_path / "models"), seed)
        for order in range(ROUNDS // 4):
            await play.order()
            await play.check(order)
        await play.everything_loads()
        await play.check(-1)
        assert sum(name.endswith("cancelled") for name in play.done) > ROUNDS // 8

    async def bounded() -> None:
        async with asyncio.timeout(30 + ROUNDS):
            await test()

    asyncio.run(bounded())
