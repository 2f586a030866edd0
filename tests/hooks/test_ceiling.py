"""F3, C1: what the moving part of the ceiling forbids is a wait; never is what is fixed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from omlx_admission.core.pool import ceiling
from omlx_admission.hooks.pool.port import admission_refused

from .conftest import House, Make, refused, request_to, settle, soon, until, within

CHAT = "/v1/chat/completions"
#: `b` (600) is above it, `d` and `p` (300) are not.
DIP = 590


def balanced(make_house: Make, **values: object) -> House:
    """A pool whose ceiling moves, 1000 at most."""
    house = make_house(**values)
    house.fixed_ceiling = 1000
    return house


@pytest.fixture
def house(make_house: Make) -> House:
    """Its ceiling moves."""
    return balanced(make_house)


async def look(house: House) -> None:
    """The queue looks at the pool, as it does at every event and by its polls."""
    await settle()
    house.admission.step()
    await settle()


async def test_f3_a_dip_while_others_run_ends_no_wait(house: House) -> None:
    """C1a: one look at a low ceiling decided over a wait of minutes."""
    await house.get("a")
    waiting = [house.ask("b") for _ in range(3)]
    await settle()
    house.ceiling = DIP
    await look(house)
    assert not any(w.done() for w in waiting)
    house.ceiling = 1000
    await house.release("a")
    await asyncio.gather(*waiting)
    await house.release("b", len(waiting))
    house.assert_idle()


async def test_c1_a_dip_at_the_first_look_is_waited_out_and_nobody_leaves_for_it(
    house: House,
) -> None:
    """C1b: nothing else happens that could wake the queue; it looks again by itself."""
    await house.use("a")
    house.ceiling = DIP
    for_b = house.ask("b")
    await look(house)
    assert not for_b.done()
    assert house.resident() == {"a"}
    assert not house.admission.gated
    await house.get("a")  # it serves on
    await house.release("a")
    house.ceiling = 1000
    await for_b
    assert house.resident() == {"b"}
    await house.ends_idle("b")


async def test_c1_with_nothing_loaded_stock_is_not_asked_in_vain(house: House) -> None:
    house.ceiling = DIP
    for_b = house.ask("b")
    await look(house)
    assert not for_b.done()
    (target,) = house.admission.policy.targets
    assert house.admission.policy.queues[target].retries == 0
    house.ceiling = 1000
    await for_b
    await house.ends_idle("b")


async def test_c1_a_dip_that_outlasts_the_budget_is_503_and_names_the_ceiling(
    make_house: Make,
) -> None:
    house = balanced(make_house, max_wait_s=30.0)
    await house.use("d")
    house.ceiling = DIP
    request = request_to(CHAT)
    with within(request), pytest.raises(admission_refused()):
        await soon(house.ask("b"))
    refusal = request.refusal
    assert (refusal.status, refusal.code) == (503, "model_swap_timeout")
    assert refusal.retry_after is not None
    assert "ceiling, 0.00 GB at the moment and 0.00 GB at most" in refusal.message
    assert "other applications" in refusal.message
    assert house.resident() == {"d"}
    house.assert_idle()


async def test_c1_one_that_may_not_wait_is_503_too(make_house: Make) -> None:
    house = balanced(make_house, max_wait_s=0.0)
    house.ceiling = DIP
    request = request_to(CHAT)
    await refused(house.get("b", by=request))
    assert (request.refusal.status, request.refusal.code) == (503, "model_busy")
    assert "at the moment" in request.refusal.message


@pytest.mark.parametrize("moment", [1000, DIP])
async def test_k2_what_is_fixed_forbids_at_once(house: House, moment: int) -> None:
    """Whatever the moving part is, the text speaks of what cannot change."""
    house.entry("p").is_pinned = True
    house.entry("a").estimated_size = 800
    await house.get("p")
    house.ceiling = moment
    for model, error in (("x", "ModelTooLargeError"), ("a", "InsufficientMemoryError")):
        request = request_to(CHAT)
        with within(request), pytest.raises(getattr(house.module, error)):
            house.pool.get_engine(model).send(None)
        assert (request.refusal.status, request.refusal.code) == (507, "model_too_large")
    await house.ends_idle("p")


async def test_c1_the_ceiling_falls_while_the_load_waits_for_the_pool(house: House) -> None:
    """Between our decision and stock's own look: nobody leaves for what will not fit."""
    await house.use("a")
    async with house.pool._lock:
        for_b = await house.waits("b")
        assert house.admission.policy.swap is not None
        house.ceiling = DIP
    await until(lambda: house.admission.policy.swap is None)
    assert not for_b.done()
    assert house.resident() == {"a"}
    assert "unload a" not in house.events
    house.ceiling = 1000
    await for_b
    await house.ends_idle("b")


async def test_c1_a_dip_during_a_drain_neither_ends_it_nor_evicts(make_house: Make) -> None:
    house = balanced(make_house, max_age_s=0.0)
    await house.get("a")
    for_b = await house.waits("b")
    assert house.admission.gated == {"a"}
    house.ceiling = DIP
    await house.release("a")
    await look(house)
    assert house.resident() == {"a"}
    assert not for_b.done()
    house.ceiling = 1000
    await for_b
    assert house.resident() == {"b"}
    await house.ends_idle("b")


async def test_c1_a_load_that_the_enforcer_ends_in_a_dip_is_tried_again(house: House) -> None:
    for_b = await house.held_load("b")
    house.ceiling = DIP
    house.entry("b").abort_loading = True  # what the enforcer does under pressure
    await house.let_load("b")
    await until(lambda: house.admission.policy.swap is None)
    assert not for_b.done()
    house.ceiling = 1000
    await house.let_load("b")
    await for_b
    await house.ends_idle("b")


async def test_c1_what_is_only_kept_for_a_request_leaves_for_it_in_a_dip(house: House) -> None:
    """Both fit under the fixed part, but not now: it must not stand in its own way."""
    request = request_to("/v1/models/b/load")
    with within(request):
        await house.get("d", lease=False)
        house.ceiling = 700
        await soon(house.ask("b", lease=False))
    assert house.resident() == {"b"}
    request.end()
    house.assert_idle()


async def test_c1_where_the_parts_cannot_be_read_nothing_is_refused_for_good(
    make_house: Make,
) -> None:
    house = balanced(make_house, max_wait_s=0.05)
    house.pool._process_memory_enforcer.get_ceiling_breakdown = dict
    with pytest.raises(admission_refused()) as refused:
        await house.get("x")
    assert refused.value.refusal.status == 503


@pytest.mark.parametrize(("static", "status"), [(1300, 503), (1000, 507)])
async def test_c1_without_the_queue_the_answer_tells_them_apart_too(
    make_house: Make, static: int, status: int
) -> None:
    house = make_house(features={"errors"})
    house.fixed_ceiling = static
    request = request_to(CHAT)
    with within(request), pytest.raises(house.module.ModelTooLargeError):
        await house.get("x")
    assert request.refusal.status == status
    assert (request.refusal.retry_after is not None) is (status == 503)


@pytest.mark.parametrize(
    ("parts", "tier", "known"),
    [
        ({"static": 9, "dynamic": 5, "metal_cap": 7}, "balanced", 7),
        ({"static": 9, "dynamic": 5, "metal_cap": 0}, "safe", 9),
        ({"static": 9, "dynamic": 5, "metal_cap": 7}, "custom", 5),
        ({"static": 0, "dynamic": 0, "metal_cap": 0}, "balanced", 0),
    ],
)
@pytest.mark.parametrize("name", ["get_ceiling_breakdown", "_get_ceiling_breakdown"])
def test_the_fixed_part(parts: dict[str, int], tier: str, known: int, name: str) -> None:
    enforcer = SimpleNamespace(_memory_guard_tier=tier, **{name: lambda: parts})
    assert ceiling.fixed(SimpleNamespace(_process_memory_enforcer=enforcer)) == known
    assert ceiling.fixed(SimpleNamespace(_process_memory_enforcer=None)) == 0
