"""Grants keep pace with what an engine takes: places, in order, and who goes past them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from omlx_admission.core.policy.model import places_for
from omlx_admission.hooks.pool.port import admission_refused

from .by_hand import ByHand
from .conftest import House, Make, settle


def refusal_of(task: asyncio.Task[Any]) -> Any:
    error = task.exception()
    assert isinstance(error, admission_refused())
    return error.refusal


async def asked(house: House, model: str, count: int) -> list[asyncio.Task[Any]]:
    tasks = []
    for _ in range(count):
        tasks.append(house.ask(model))
        await settle()
    return tasks


async def served(house: House, tasks: dict[str, list[asyncio.Task[Any]]]) -> None:
    """Everybody is granted, and done with it, in whatever order."""
    models = {task: model for model, those in tasks.items() for task in those}
    while models:
        ended, _ = await asyncio.wait(models, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
            await house.release(models.pop(task))


def done(tasks: list[asyncio.Task[Any]]) -> list[bool]:
    return [t.done() for t in tasks]


@pytest.fixture
def busy(make_house: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A pool whose engines run ``slots`` requests at once, as real text engines do."""

    def make(slots: int, **values: Any) -> House:
        engine = House.engine

        def with_scheduler(house: House, *args: Any, **keywords: Any) -> Any:
            made = engine(house, *args, **keywords)
            scheduler = SimpleNamespace(config=SimpleNamespace(max_num_seqs=slots))
            made._engine = SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler))
            return made

        monkeypatch.setattr(House, "engine", with_scheduler)
        return make_house(**values)

    return make


@pytest.mark.parametrize("slots", [1, 8])
async def test_c2_the_load_grants_as_many_as_the_engine_takes(busy: Make, slots: int) -> None:
    house = busy(slots)
    house.hold_loads = True
    waiters = await asked(house, "a", 44)
    await house.let_load("a")
    await waiters[0]
    await settle()
    places = places_for(slots)
    for served in range(44 - places + 1):
        # In order of arrival, one for each that ends, and no more.
        taken = min(places + served, 44)
        assert done(waiters) == [True] * taken + [False] * (44 - taken)
        assert house.entry("a").in_use == places
        await house.release("a")
        await settle()
    for _ in range(places - 1):
        await house.release("a")
    house.assert_idle()


async def test_c25_a_newcomer_of_a_loaded_model_waits_its_turn(busy: Make) -> None:
    house = busy(1)
    await house.use("a")
    first = await asked(house, "a", 2)
    assert all(done(first))
    later = await asked(house, "a", 3)
    assert done(later) == [False] * 3
    await house.release("a")
    # The place is handed over in the step that frees it: nobody slips in.
    newcomer = await house.waits("a")
    assert done(later) == [True, False, False]
    assert not newcomer.done()
    later[1].cancel()
    await settle()
    await house.release("a")
    await settle()
    assert later[2].done()
    assert not newcomer.done()
    for _ in range(3):
        await house.release("a")
        await settle()
    assert newcomer.done()
    house.assert_idle()


async def test_c25_before_the_queue_was_ever_needed(busy: Make) -> None:
    """A pinned model is loaded without it; its first burst is paced all the same."""
    house = busy(1)
    await house.use("a")
    house.pool.__dict__.pop("_omlx_admission_state")
    assert house.admission is None
    tasks = await asked(house, "a", 4)
    assert done(tasks) == [True, True, False, False]
    for _ in range(4):
        await house.release("a")
        await settle()
    assert all(done(tasks))
    house.assert_idle()


async def test_unleased_hand_outs_take_no_place(busy: Make) -> None:
    """Load routes and the first question of a validation generate nothing."""
    house = busy(1)
    await house.use("a")
    await asked(house, "a", 3)
    probe = house.ask("a", lease=False)
    await settle()
    assert probe.done()
    assert house.entry("a").in_use == 2
    for _ in range(3):
        await house.release("a")
        await settle()
    house.assert_idle()


async def test_without_the_queue_nothing_is_paced(busy: Make) -> None:
    house = busy(1, features={"resident"})
    await house.use("a")
    assert all(done(await asked(house, "a", 5)))


async def test_an_engine_without_such_a_scheduler_is_given_all(house: House) -> None:
    await house.use("a")
    assert all(done(await asked(house, "a", 60)))
    await house.release("a", 60)
    house.assert_idle()


@pytest.mark.parametrize("slots", [1, 8])
async def test_c3_only_what_the_engine_has_is_sat_out(busy: Make, slots: int) -> None:
    house = busy(slots, max_age_s=0.0)
    await house.use("a")
    crowd = await asked(house, "a", 60)
    for_b = await house.waits("b")
    places = places_for(slots)
    assert sum(done(crowd)) == places
    for _ in range(places):
        assert not for_b.done()
        await house.release("a")
        await settle()
    await for_b
    # Nobody of the crowd got in between, and the first of them is next.
    assert sum(done(crowd)) == places
    await house.release("b")
    await crowd[places]
    for task in crowd:
        await task
        await house.release("a")
    house.assert_idle()


async def test_a_request_that_allows_no_wait_goes_to_the_engines_own_queue(busy: Make) -> None:
    house = busy(1)
    await house.use("a")

    def at_once(model: str) -> asyncio.Task[Any]:
        route = "/v1/chat/completions"
        return ByHand(lambda: house.get(model), path=route, max_wait="0").task

    tasks = [at_once("a") for _ in range(33)]
    await settle()
    # What oMLX's engine queues for certain, and not one that it could break.
    assert house.entry("a").in_use == 32
    refusal = refusal_of(tasks[-1])
    assert (refusal.status, refusal.code) == (503, "model_busy")
    assert "'a' is fully in use" in refusal.message
    assert "not loaded" not in refusal.message
    for_b = at_once("b")
    await settle()
    assert "'b' is not loaded" in refusal_of(for_b).message
    for task in tasks[:-1]:
        await task
        await house.release("a")
    house.assert_idle()


async def test_c7_a_queue_full_for_b_turns_nobody_away_from_a(busy: Make) -> None:
    house = busy(1, max_queue=3, max_age_s=0.0)
    await house.get("a")
    for_b = await asked(house, "b", 4)
    refusal = refusal_of(for_b[3])
    assert refusal.code == "admission_queue_full"
    assert "'b' is not loaded" in refusal.message
    # Its gate is closed, and it has as many places in the queue for itself.
    for_a = await asked(house, "a", 4)
    assert done(for_a) == [False, False, False, True]
    refusal = refusal_of(for_a[3])
    assert refusal.code == "admission_queue_full"
    assert "'a' leaves for 'b'" in refusal.message
    await house.release("a")
    await served(house, {"b": for_b[:3], "a": for_a[:3]})
    house.assert_idle()
