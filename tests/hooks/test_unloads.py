"""Unloads by hand: they wait for what runs, share one teardown and can be told not to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from omlx_admission.core import faults
from omlx_admission.core import quiesce as leave
from omlx_admission.core.answer import AnswerMiddleware
from omlx_admission.hooks.pool import unloads
from omlx_admission.hooks.pool.state import state_of

from .by_hand import ByHand, unload
from .conftest import House, Make, later, refused, settle, soon, until
from .test_queue import names


def drains(house: House, model: str = "a") -> bool:
    return str(house.entry(model).pending_unload_reason).startswith("admission unload")


def by_admin(house: House, query: str = "") -> ByHand:
    """What the admin's unload route does with the pool since 0.6.2."""
    if not hasattr(house.pool, "request_unload"):
        pytest.skip("this oMLX has no request_unload")

    async def route() -> Any:
        house.pool.get_entry("a")
        return await house.pool.request_unload("a", reason="manual admin unload")

    return ByHand(route, path="/admin/api/models/a/unload", query=query)


Door = Callable[..., ByHand]
DOORS: dict[str, Door] = {
    "public": lambda house, **request: unload(house.pool, **request),
    "admin": by_admin,
}
by_every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


async def draining(house: House, door: Door = DOORS["public"], **request: Any) -> ByHand:
    """An unload that waits for what runs."""
    by_hand = door(house, **request)
    await settle()
    assert drains(house)
    assert not by_hand.task.done()
    return by_hand


async def test_b52_an_unload_waits_for_what_runs_and_newcomers_get_the_next_engine(
    house: House,
) -> None:
    dying = await house.get("a")
    first, second = unload(house.pool), await draining(house)
    late, for_b = house.ask("a"), house.ask("b")
    await later(1.0)
    assert drains(house)
    assert not any(t.done() for t in (first.task, second.task, late, for_b))
    dying.stop.assert_not_awaited()
    dying.abort_all_requests.assert_not_awaited()
    await house.release("a")
    assert await first.task == await second.task == "unloaded"
    assert await late is not dying
    await house.release("a")
    await for_b
    dying.stop.assert_awaited_once()
    await house.ends_idle("b")
    assert names(house.events) == [
        *("loaded a", "unloaded a", "loaded a", "unloaded a", "loaded b")
    ]
    assert state_of(house.pool).leaving == {}


@pytest.mark.parametrize("told_by", ["hand", "somebody else"])
async def test_who_waits_for_a_model_that_is_told_to_leave_does_not_keep_it(
    make_house: Make, told_by: str
) -> None:
    """The queue must not take the model's own next load for a swap that drains it."""
    house = make_house(max_age_s=0.0)
    engine = await house.get("a")
    if told_by == "hand":
        await draining(house)
    else:
        house.pool._mark_pending_unload_locked("a", "some reason")
    reason = house.entry("a").pending_unload_reason
    late = house.ask("a")
    await later(1.0)
    assert house.entry("a").pending_unload_reason == reason
    await house.release("a")
    assert await late is not engine
    await house.ends_idle("a")


async def test_b08_who_comes_between_the_drain_and_the_teardown_waits_for_the_next_engine(
    house: House,
) -> None:
    """The request comes at each turn of the loop round the handover."""
    for turns in range(7):
        engine = await house.get("a")
        by_hand = unload(house.pool)
        await settle()
        await house.release("a")
        for _ in range(turns):
            await asyncio.sleep(0)
        after = await house.get("a")
        assert after is not engine
        assert house.pool._current_model_memory == 600
        await by_hand.task
        await house.release("a")
    house.assert_idle()


async def test_the_budget_ends_in_a_refusal_and_the_model_serves_on(house: House) -> None:
    engine = await house.get("a")
    patient, hasty = unload(house.pool), unload(house.pool, max_wait="0.05")
    late = house.ask("a")
    refusal = await refused(hasty.task)
    assert (refusal.status, refusal.code) == (503, "model_busy")
    assert hasty.request.refusal.retry_after is not None
    # One of two gave up: the other one's wish stands.
    assert drains(house)
    assert not late.done()
    patient.leave()
    await refused(patient.task)
    # Now nobody wants it unloaded, and who queued behind the gate is served at once.
    await settle()
    assert late.done()
    assert await late is engine
    assert house.entry("a").pending_unload_reason is None
    engine.stop.assert_not_awaited()
    engine.abort_all_requests.assert_not_awaited()
    await house.ends_idle("a", "a")


async def test_who_looks_late_leaves_the_next_engine_alone(house: House, mocker: Any) -> None:
    """The second of two who asked wakes when the model is loaded again."""
    mocker.patch.object(leave, "_POLL_S", 60.0)
    await house.get("a")
    first, second = unload(house.pool), unload(house.pool)
    await settle()
    await house.release("a")
    await first.task
    after = await house.get("a")
    assert not second.task.done()
    state_of(house.pool).leaving["a"].notify()
    assert await second.task == "unloaded"
    after.stop.assert_not_awaited()
    assert house.entry("a").engine is after
    await house.ends_idle("a")


@by_every_door
async def test_neither_the_release_nor_the_unload_waits_for_another_load(
    house: House, door: Door
) -> None:
    engine = await house.get("a")
    for_d = await house.held_load("d")
    by_hand = await draining(house, door)
    release = asyncio.ensure_future(house.release("a"))
    await settle()
    assert release.done()
    assert await by_hand.task in ("unloaded", True)
    assert not for_d.done()
    engine.abort_all_requests.assert_not_awaited()
    await house.let_load("d")
    await for_d
    await house.ends_idle("d")


async def test_a_cancelled_unload_withdraws_its_mark(house: House) -> None:
    await house.get("a")
    by_hand = await draining(house)
    by_hand.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await by_hand.task
    await house.ends_idle("a")
    assert house.resident() == {"a"}


async def test_a_swap_that_drains_the_model_goes_on_when_the_unload_is_withdrawn(
    make_house: Make,
) -> None:
    house = make_house(max_age_s=0.0)
    await house.get("a")
    for_b = await house.waits("b")
    swap = house.entry("a").pending_unload_reason
    assert swap == "admission drain for 'b'"
    by_hand = await draining(house)
    by_hand.leave()
    await refused(by_hand.task)
    assert house.entry("a").pending_unload_reason == swap
    await house.release("a")
    await for_b
    assert house.events.count("unload a") == 1
    await house.ends_idle("b")


@pytest.mark.parametrize("swap_first", [True, False])
async def test_a_swap_and_an_unload_of_the_same_model_share_one_teardown(
    make_house: Make, swap_first: bool
) -> None:
    house = make_house(max_age_s=0.0)
    await house.get("a")
    asked = [await house.waits("b")] if swap_first else []
    by_hand = await draining(house)
    asked = asked or [await house.waits("b")]
    await house.release("a")
    await asyncio.gather(*asked, by_hand.task)
    assert house.events.count("unload a") == 1
    assert house.resident() == {"b"}
    await house.ends_idle("b")


async def test_the_operator_may_unload_a_pinned_model(house: House) -> None:
    house.entry("a").is_pinned = True
    await house.get("a")
    by_hand = await draining(house)
    await house.release("a")
    assert await by_hand.task == "unloaded"
    assert house.resident() == set()
    house.assert_idle()


async def test_now_ends_what_runs_with_an_error_before_the_teardown(house: House) -> None:
    engine = await house.get("a")
    ending: list[asyncio.Future[None]] = []

    async def abort(**said: str) -> int:
        house.events.append("abort")
        ending.append(asyncio.ensure_future(ended()))
        return 1

    async def ended() -> None:
        await settle()
        house.events.append("released")
        await house.release("a")

    engine.abort_all_requests.side_effect = abort
    by_hand = unload(house.pool, query="mode=now")
    late = house.ask("a")
    assert await by_hand.task == "unloaded"
    assert house.events[2:5] == ["abort", "released", "unload a"]
    assert await late is not engine
    await house.ends_idle("a")


async def test_now_ends_the_requests_that_hold_the_model_and_no_others(house: House) -> None:
    """Each gives its lease back on its own way out, whatever its engine knows of it."""
    engine = await house.get("a")
    await house.release("a")
    clients = {name: Client(house, name) for name in ("a", "d", "released")}
    for client in clients.values():
        await client.holds.wait()
    assert house.entry("a").in_use == 1
    by_hand = unload(house.pool, query="mode=now")
    assert await by_hand.task == "unloaded"
    await clients["a"].task
    assert clients["a"].sent[0]["status"] == 503
    assert b'"model_unloading"' in clients["a"].sent[1]["body"]
    engine.stop.assert_awaited_once()
    for name in ("d", "released"):
        assert not clients[name].task.done()
        clients[name].go_on.set()
        await clients[name].task
        assert clients[name].sent[0]["status"] == 200
    house.assert_idle()


async def test_now_ends_a_request_that_was_granted_the_model_and_has_not_woken(
    house: House, mocker: Any
) -> None:
    """It holds a lease that no request is seen to hold yet; its answer is whole as well."""
    house.hold_loads = True
    client = Client(house, "a")
    await until(lambda: "load a" in house.events)
    wake, by_hand = house.admission._wake, []

    def slowly(*waiters: Any) -> None:
        by_hand.append(unload(house.pool, query="mode=now"))
        asyncio.get_running_loop().call_later(0.01, wake, *waiters)

    mocker.patch.object(house.admission, "_wake", slowly)
    await house.let_load("a")
    await client.task
    assert client.sent[0]["status"] == 503
    assert b'"model_unloading"' in client.sent[1]["body"]
    assert await by_hand[0].task == "unloaded"
    house.assert_idle()


class Client:
    """A request that is handed a model, and answers when it is told to."""

    def __init__(self, house: House, name: str) -> None:
        self.holds, self.go_on = asyncio.Event(), asyncio.Event()
        self.sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            model = "a" if name == "released" else name
            await house.get(model)
            if name == "released":
                await house.release(model)
            self.holds.set()
            try:
                await self.go_on.wait()
            finally:
                if name != "released":
                    await house.release(model)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
        middleware = AnswerMiddleware(app)
        work = middleware(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        self.task = asyncio.get_running_loop().create_task(work)


@pytest.mark.parametrize(("runs", "grace_s"), [(False, 1000.0), (True, 0.05)])
async def test_c9_now_waits_for_no_lease_under_which_nothing_runs_and_else_for_a_moment(
    house: House, mocker: Any, runs: bool, grace_s: float
) -> None:
    """A client that has stopped reading, and an engine that does not end what runs."""
    mocker.patch.object(unloads, "ABORT_GRACE_S", grace_s)
    engine = await house.get("a")
    engine.has_active_requests.return_value = runs
    assert await soon(unload(house.pool, query="mode=now").task) == "unloaded"
    engine.abort_all_requests.assert_awaited_once()
    assert house.resident() == set()
    await house.ends_idle("a")


async def test_p6_an_abort_without_a_signature_is_called_all_the_same(
    house: House, mocker: Any
) -> None:
    engine = await house.get("a")
    mocker.patch("inspect.signature", side_effect=TypeError)
    await soon(unload(house.pool, query="mode=now").task)
    engine.abort_all_requests.assert_awaited_once_with()
    await house.release("a")


@pytest.mark.parametrize("why", ["in use", "speech", "loading", "pinned", "waited for"])
async def test_if_idle_refuses_at_once_and_changes_nothing(house: House, why: str) -> None:
    model, reason = "a", {"speech": "in use", "waited for": "1 request waits"}.get(why, why)
    asked = []
    if why in ("loading", "waited for"):
        asked.append(await house.held_load("a"))
    else:
        await house.use("a")
    if why == "in use":
        await house.get("a")
    elif why == "speech":
        house.entry("a").engine.has_active_requests.return_value = True
    elif why == "pinned":
        house.entry("a").is_pinned = True
    elif why == "waited for":
        model = "b"
        asked.append(await house.waits("b"))
    by_hand = unload(house.pool, model, query="mode=if-idle")
    refusal = await refused(by_hand.task)
    assert (refusal.status, refusal.code) == (409, "model_not_idle")
    assert reason in by_hand.request.refusal.message
    assert "unload a" not in house.events
    house.hold_loads = False
    for task, name in zip(asked, "ab", strict=False):
        if name == "a":
            await house.let_load("a")
        await task
        await house.release(name)


@pytest.mark.parametrize("query", ["mode=later", "mode=", "mode=drain&mode=x"])
async def test_an_unknown_mode_is_refused_and_the_known_ones_are_named(
    house: House, query: str
) -> None:
    await house.use("a")
    refusal = await refused(unload(house.pool, query=query).task)
    assert refusal.status == 400
    assert all(mode in refusal.message for mode in ("drain", "now", "if-idle"))
    assert house.resident() == {"a"}


async def test_a_deletion_waits_and_then_ends_what_runs(house: House, mocker: Any) -> None:
    """Stock goes on when this unload fails, and would forget a model that is loaded."""
    mocker.patch.object(unloads, "ABORT_GRACE_S", 0.05)
    engine = await house.get("a")
    by_hand = ByHand(
        lambda: house.pool._unload_engine("a"),
        path="/admin/api/hf/models/a",
        method="DELETE",
        max_wait="30",
    )
    await settle()
    by_hand.leave()  # what is half done is not stopped
    await later(10.0)
    engine.abort_all_requests.assert_not_awaited()
    await soon(by_hand.task)
    engine.abort_all_requests.assert_awaited_once()
    assert house.resident() == set()
    await house.ends_idle("a")


async def test_a_settings_change_waits_and_is_refused_quietly(house: House) -> None:
    """Its route answers 200 and says that nothing was unloaded: no refusal replaces that."""
    engine = await house.get("a")
    by_hand = ByHand(
        lambda: house.pool._unload_engine("a"),
        path="/admin/api/models/a/settings",
        method="PUT",
        max_wait="0.05",
    )
    await refused(by_hand.task)
    assert by_hand.request.refusal is None
    engine.stop.assert_not_awaited()
    await house.ends_idle("a")


async def test_one_request_has_one_budget_for_all_that_it_unloads(house: House) -> None:
    ended: list[str] = []
    for model in "ad":
        await house.get(model)

    async def change() -> None:
        for model in "ad":
            await refused(house.pool._unload_engine(model))
            ended.append(model)

    by_hand = ByHand(change, path="/admin/api/global-settings", max_wait="0.1")
    await until(lambda: "a" in ended)
    await settle()
    assert ended == ["a", "d"]
    await by_hand.task
    await house.ends_idle("a", "d")


async def test_a_benchmark_that_outlives_its_request_waits_too(house: House) -> None:
    engine = await house.get("a")
    background: list[asyncio.Task[Any]] = []

    async def start() -> None:
        work = house.pool._unload_engine("a")
        background.append(asyncio.get_running_loop().create_task(work))

    route = ByHand(start, path="/admin/api/bench/start")
    await route.task
    route.leave()
    await later(1.0)
    engine.stop.assert_not_awaited()
    await house.release("a")
    await background[0]
    engine.stop.assert_awaited_once()
    house.assert_idle()


async def test_a_benchmark_that_unloads_its_own_model_does_not_wait_for_itself(
    make_house: Make,
) -> None:
    house = make_house(max_wait_s=5.0)
    background: list[asyncio.Task[Any]] = []

    async def job() -> None:
        await house.get("a", lease=False)
        assert house.entry("a").in_use == 1
        await house.pool._unload_engine("a")

    async def start() -> None:
        background.append(asyncio.get_running_loop().create_task(job()))

    await ByHand(start, path="/admin/api/bench/start").task
    await background[0]
    assert house.resident() == set()
    house.assert_idle()


async def test_outside_of_requests_and_at_shutdown_stock_unloads(house: House) -> None:
    await house.get("a")
    await house.pool._unload_engine("a")
    assert house.resident() == set()
    await house.release("a")
    await house.get("a")
    by_hand = ByHand(house.pool.shutdown, path="/admin/api/server/restart")
    await by_hand.task
    assert house.resident() == set()


async def test_switched_off_an_unload_cuts_as_stock_does(make_house: Make) -> None:
    house = make_house(unloads=False)
    engine = await house.get("a")
    assert await unload(house.pool).task == "unloaded"
    engine.stop.assert_awaited_once()
    await house.ends_idle("a")


@pytest.mark.parametrize("place", ["plan_unload", "_wait_until_idle"])
async def test_our_own_failure_lets_stock_unload(
    house: House, mocker: Any, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    faults._noted.clear()
    await house.get("a")
    mocker.patch.object(unloads, place, side_effect=ZeroDivisionError)
    assert await unload(house.pool).task == "unloaded"
    await house.release("a")
    assert house.resident() == set()
    house.assert_idle()
    assert "the unload by hand failed" in caplog.text


@by_every_door
@pytest.mark.parametrize("query", ["", "mode=now", "mode=if-idle"])
async def test_f2_what_came_after_the_unload_of_an_idle_model_is_not_cut(
    house: House, door: Door, query: str
) -> None:
    """Another model loads meanwhile, and has the pool's lock."""
    dying = await house.get("a")
    await house.release("a")
    for_d = await house.held_load("d")
    by_hand = door(house, query=query)
    await asyncio.sleep(0)  # it has come as far as to its first wait
    late = house.ask("a")
    assert await by_hand.task in ("unloaded", True)
    assert not for_d.done()
    assert not late.done()
    dying.abort_all_requests.assert_not_awaited()
    house.hold_loads = False
    await house.let_load("d")
    assert await late is not dying
    await for_d
    await house.ends_idle("a", "d")


@by_every_door
async def test_c22_now_acts_at_once_while_another_model_loads(house: House, door: Door) -> None:
    engine = await house.get("a")

    async def abort(**said: str) -> int:
        await house.release("a")
        return 1

    engine.abort_all_requests.side_effect = abort
    for_d = await house.held_load("d")
    assert await door(house, query="mode=now").task in ("unloaded", True)
    engine.abort_all_requests.assert_awaited_once()
    assert not for_d.done()
    await house.let_load("d")
    await for_d
    await house.ends_idle("d")


@by_every_door
async def test_c23_work_that_ends_without_a_lease_is_waited_for(
    house: House, door: Door
) -> None:
    """The last answer is out, its engine has yet to put it away: nobody is cut."""
    if not hasattr(house.pool, "_entry_has_scheduler_work"):
        pytest.skip("this oMLX does not look at its schedulers")
    await house.use("a")
    engine = house.entry("a").engine
    engine.scheduler = MagicMock(running={"r1": None})
    by_hand = await draining(house, door)
    engine.scheduler = None
    assert await by_hand.task in ("unloaded", True)
    engine.abort_all_requests.assert_not_awaited()
    house.assert_idle()


async def test_if_idle_looks_again_in_the_step_that_marks(house: House) -> None:
    """A route of a later release might wait between its look and the unload."""
    engine = await house.get("a")
    await house.release("a")

    async def route() -> None:
        house.pool.get_entry("a")
        await house.get("a")
        await house.pool._unload_engine("a")

    by_hand = ByHand(route, query="mode=if-idle")
    await refused(by_hand.task)
    assert by_hand.code == "model_not_idle"
    engine.stop.assert_not_awaited()
    await house.ends_idle("a")
