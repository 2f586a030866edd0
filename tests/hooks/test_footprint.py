"""P5: bytes of a model that has left stay on the footprint of the process for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omlx_admission.core import footprint
from omlx_admission.core.footprint import Reading, is_settled

from .conftest import House, until


class Kernel:
    """Counts what is loaded, and what has left until it is told to reap that."""

    def __init__(self, house: House, mocker: Any, base: int = 50) -> None:
        self.house, self.base, self.residue, self._seen = house, base, 0, 0
        self.looks = 0
        mocker.patch.object(house.module, "get_phys_footprint", self.read)

    def read(self) -> int:
        self.looks += 1
        tracked = int(self.house.pool._current_model_memory)
        self.residue += max(0, self._seen - tracked)
        self._seen = tracked
        return self.base + tracked + self.residue

    def reap(self) -> None:
        self.read()
        self.residue = 0


@pytest.mark.slow
async def test_p5_the_load_begins_when_the_footprint_has_noticed(
    house: House, mocker: Any
) -> None:
    kernel = Kernel(house, mocker)
    at_load: list[int] = []
    start = house._start

    async def started(name: str) -> None:
        at_load.append(kernel.read())
        await start(name)

    mocker.patch.object(house, "_start", started)
    await house.use("a")
    for model in "babab":
        swap = house.ask(model)
        await until(lambda: house.resident() == set() and bool(kernel.read()))
        looks = kernel.looks
        await until(lambda seen=looks: kernel.looks >= seen + 4)  # it looks, and waits on
        assert not swap.done()
        assert house.admission.policy.swap is not None
        kernel.reap()
        await swap
        await house.release(model)
    # Never the old one and the new one together.
    assert at_load == [50] * 6
    house.assert_idle()


async def test_p5_nothing_more_is_evicted_for_bytes_that_are_on_their_way(
    house: House, mocker: Any
) -> None:
    """With the residue in the reading, stock would take the next idle model too."""
    kernel = Kernel(house, mocker, base=0)
    for model in ("d", "a"):
        await house.get(model)
        await house.release(model)
    house.entry("d").last_access += 1000
    swap = house.ask("b")
    await until(lambda: house.pool._current_model_memory == 300)
    kernel.reap()
    await swap
    assert house.resident() == {"b", "d"}
    await house.ends_idle("b")


async def test_p5_a_footprint_that_never_falls_stops_nothing_for_good(
    house: House, mocker: Any
) -> None:
    mocker.patch.object(footprint, "LONGEST_S", 0.1)
    Kernel(house, mocker)
    await house.use("a")
    await house.get("b")
    assert house.resident() == {"b"}
    await house.ends_idle("b")


async def test_p5_an_unload_that_is_not_ours_waits_for_nothing(
    house: House, mocker: Any
) -> None:
    kernel = Kernel(house, mocker)
    await house.use("a")
    await asyncio.wait_for(house.pool._unload_engine("a"), 5)
    assert kernel.read() == 650
    house.assert_idle()


async def test_p5_a_client_that_leaves_meanwhile_leaves_nothing(
    house: House, mocker: Any
) -> None:
    kernel = Kernel(house, mocker)
    await house.use("a")
    swap = house.ask("b")
    await until(lambda: house.pool._current_model_memory == 0)
    swap.cancel()
    kernel.reap()
    await until(lambda: house.admission.policy.swap is None)
    house.assert_idle()


@pytest.mark.parametrize(
    ("before", "now", "answer"),
    [
        (Reading(650, 600, False), Reading(650, 0, False), False),
        (Reading(650, 600, False), Reading(80, 0, False), True),
        (Reading(650, 600, False), Reading(81, 0, False), False),
        (Reading(650, 600, False), Reading(650, 0, True), True),
        # The weights were never counted: nothing will fall.
        (Reading(400, 600, False), Reading(400, 0, False), True),
        # Another engine has taken memory meanwhile.
        (Reading(650, 600, False), Reading(250, 200, False), True),
    ],
)
def test_is_settled(before: Reading, now: Reading, answer: bool) -> None:
    assert is_settled(before, now) is answer
