"""Loads that take long, or for ever, on the pool: told apart by the thread behind them."""

from __future__ import annotations

import asyncio
import importlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omlx_admission.hooks.pool.port import admission_refused

from .conftest import House, Make, later, settle, soon, until


class LoadThread:
    """Loads of a house that sit on oMLX's load thread until the test lets them go."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._go = threading.Event()
        self.begun: list[str] = []

    async def start(self, name: str) -> None:
        house = self._house
        house.events.append(f"load {name}")
        executor = importlib.import_module("omlx.engine_core").get_mlx_executor()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(executor, self._wait, name)
        # A load is more than one job.
        await loop.run_in_executor(executor, self._go.wait)
        house.events.append(f"loaded {name}")

    def _wait(self, name: str) -> None:
        self.begun.append(name)
        self._go.wait()

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def on_the_thread(mocker: Any) -> Iterator[Callable[[House], LoadThread]]:
    """From now on, loads of that house sit on the thread."""
    threads: list[LoadThread] = []

    def put(house: House) -> LoadThread:
        thread = LoadThread(house)
        threads.append(thread)
        mocker.patch.object(house, "_start", thread.start)
        return thread

    yield put
    for thread in threads:
        thread.let_go()


@pytest.fixture(autouse=True)
def impatient(mocker: Any) -> None:
    """What rests for 0.3 s rests for ever."""
    mocker.patch("omlx_admission.core.policy.admission._QUIET_S", 0.3)


async def is_refused(asked: asyncio.Task[Any]) -> str:
    """It gets a 503; its text."""
    with pytest.raises(admission_refused()) as caught:
        await soon(asked)
    refusal = caught.value.refusal  # type: ignore[attr-defined]
    assert refusal.status == 503
    assert refusal.retry_after is not None
    return str(refusal.message)


async def test_p1_a_load_that_nothing_works_for_is_given_up_after_its_waiters_answer(
    make_house: Make,
) -> None:
    house = make_house(max_wait_s=2.0)
    house.hold_loads = True
    assert "loading" in await is_refused(house.ask("b"))
    await until(lambda: not house.entry("b").is_loading)
    house.hold_loads = False
    await house.use("a", "b")
    assert house.events.count("load b") == 2
    house.assert_idle()


async def test_p1_but_not_while_somebody_waits(house: House) -> None:
    asked = await house.held_load("b")
    await later(0.5)
    house.admission.step()
    await settle()
    assert house.entry("b").is_loading
    await house.let_load("b")
    await asked
    assert house.events.count("load b") == 1
    await house.ends_idle("b")


@pytest.mark.parametrize("own_thread", [False, True], ids=["oMLX's thread", "ours"])
async def test_p1_c4_a_load_at_work_is_not_thrown_away(
    make_house: Make,
    on_the_thread: Callable[[House], LoadThread],
    own_thread: bool,
    mocker: Any,
) -> None:
    """Whoever waited is refused, however often; whoever waits at its end is served."""
    from omlx_admission.hooks.gpu import process as gpu_process

    elsewhere = importlib.import_module("concurrent.futures").ThreadPoolExecutor(1)

    def route(_stock: Any, function: Any, args: Any, kwargs: Any) -> Any:
        return elsewhere.submit(function, *args, **kwargs)

    if own_thread:
        mocker.patch.object(gpu_process.process.executors, "_route", route)
    house = make_house(max_wait_s=1.0)
    thread = on_the_thread(house)
    for _ in range(3):
        assert "loading" in await is_refused(house.ask("b"))
        # The policy looks at it with nobody waiting, many times over what is patient.
        await later(0.5)
        house.admission.step()
        await settle()
    asked = await house.waits("b")
    thread.let_go()
    await asked
    await house.release("b")
    assert thread.begun == ["b"]
    assert house.events == ["load b", "loaded b"]
    house.assert_idle()
    elsewhere.shutdown()


async def test_p1_a_stuck_thread_costs_no_other_model_its_place(
    make_house: Make, on_the_thread: Callable[[House], LoadThread]
) -> None:
    """A (0.6) is stuck beside D (0.3); B (0.8) cannot be loaded, so D need not leave."""
    house = make_house(max_wait_s=2.0, max_age_s=0.0)
    house.entry("b").estimated_size = 800
    await house.use("d")
    house.admission.policy.estimates.saw_swap("a", 0.05)
    thread = on_the_thread(house)
    await is_refused(house.ask("a"))
    for _ in range(2):
        for_b = house.ask("b")
        await later(0.5)
        # D serves beside a waiter of B that is older than any age.
        await house.use("d")
        text = await is_refused(for_b)
        assert re.search(r"'a' \(for \d s already\) loading", text), text
    view = house.admission.port.view((), 0)
    assert {m.model: (m.size, m.loading) for m in view.models.values()} == {
        "a": (600, True),
        "d": (300, False),
    }
    assert "unload d" not in house.events
    asked = house.ask("a")
    thread.let_go()
    await asked
    await house.release("a")
    assert thread.begun == ["a"]
    house.assert_idle()


async def test_what_the_load_thread_does_for_others_is_no_work_of_a_load(
    make_house: Make,
) -> None:
    """An embedder in use keeps the thread busy; a load that waits for nothing rests."""
    house = make_house(max_wait_s=1.0)
    house.hold_loads = True
    executor = importlib.import_module("omlx.engine_core").get_mlx_executor()
    go = threading.Event()
    job = executor.submit(go.wait)
    try:
        await is_refused(house.ask("b"))
        await until(lambda: not house.entry("b").is_loading)
    finally:
        go.set()
    job.result()
    house.assert_idle()


async def test_a_loop_that_stood_still_does_not_make_a_load_rest(
    make_house: Make, on_the_thread: Callable[[House], LoadThread]
) -> None:
    """The thread comes back while the process stands; the load has not heard of it yet."""
    house = make_house(max_wait_s=1.0)
    thread = on_the_thread(house)
    await is_refused(house.ask("b"))
    executor = importlib.import_module("omlx.engine_core").get_mlx_executor()
    thread.let_go()
    executor.submit(lambda: None).result()  # on the loop: nothing else runs meanwhile
    threading.Event().wait(0.5)
    house.admission.step()
    await until(lambda: not house.entry("b").is_loading)
    assert house.entry("b").engine is not None
    assert thread.begun == ["b"]
    house.assert_idle()
