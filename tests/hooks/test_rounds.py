"""B12, a small version of ``python -m benchmarks.soak rounds``: hand-outs against evictions."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.rounds import Rounds, make_enforcer

from .conftest import House, run

Make = Callable[..., House]


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
        make_enforcer(house.pool)
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
