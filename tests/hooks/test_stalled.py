"""C9: a lease belongs to an engine, and a client that stops reading keeps no model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from omlx_admission.core import request as requests
from omlx_admission.hooks.pool import phantom, stalled

from .conftest import House, Make, later, refused, request_to, settle, until, within

CHAT = "/v1/chat/completions"


@pytest.fixture
def house(make_house: Make) -> House:
    """Its residents drain for the first request that waits."""
    return make_house(max_age_s=0.0)


class TestALeaseBelongsToAnEngine:
    """The engine is torn down under a lease: cut by hand, or by stock's own unload."""

    @pytest.mark.parametrize("features", [None, {"queue"}, {"resident"}])
    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("lease", [True, False])
    async def test_c9_it_does_not_count_on_the_next_engine(
        self, make_house: Make, features: set[str] | None, named: bool, lease: bool
    ) -> None:
        if not (named or lease):
            pytest.skip("nothing is held for a caller outside of requests")
        house = make_house(features=features, max_age_s=0.0)
        entry, first, second = house.entry("a"), request_to(CHAT), request_to(CHAT)
        if named:
            await house.get("a", lease, by=first)
        else:
            await house.get("a")
        assert entry.in_use == 1
        await house.pool._unload_engine("a")
        assert entry.in_use == 0
        engine = await house.get("a", by=second)
        assert entry.in_use == 1, "the old lease counts on the new engine"
        # The old one ends while the new one is used: that stays in use.
        if named and lease:
            await house.release("a", by=first)
        elif lease:
            await house.release("a")
        first.end()
        assert entry.in_use == 1, "the old release has given the new lease back"
        await house.release("a", by=second)
        assert (entry.in_use, entry.engine) == (0, engine)
        await house.use("b")
        house.assert_idle()

    async def test_c9_leases_of_a_request_that_asks_again(self, house: House) -> None:
        """Its own first engine is gone when it asks: two leases, one of which counts."""
        entry, request, other = house.entry("a"), request_to(CHAT), request_to(CHAT)
        await house.get("a", by=request)
        await house.pool._unload_engine("a")
        await house.get("a", by=other)
        with within(request):
            await house.get("a")
            assert entry.in_use == 2
            await house.release("a")
            await house.release("a")
        assert entry.in_use == 1
        await house.release("a", by=other)
        house.assert_idle()

    async def test_c9_a_grant_that_is_cancelled_after_its_engine_went(
        self, house: House
    ) -> None:
        for_a = await house.held_load("a")
        port = house.admission.port
        house.hold_loads = False
        await house.let_load("a")
        gone = await for_a
        await house.pool._unload_engine("a")
        await house.get("a")
        port.give_back("a", gone)
        assert house.entry("a").in_use == 1
        await house.release("a")  # the first caller's, which no request knows
        assert house.entry("a").in_use == 1
        await house.ends_idle("a")

    async def test_c9_a_release_between_the_engines_is_the_old_one_s(
        self, house: House
    ) -> None:
        """While the old engine is being closed, and while the next one loads."""
        entry, requests = house.entry("a"), [request_to(CHAT) for _ in range(3)]
        for request in requests:
            await house.get("a", by=request)
        house.hold_unloads = house.hold_loads = True
        unload = asyncio.ensure_future(house.pool._unload_engine("a"))
        await until(lambda: "unload a" in house.events)
        await house.release("a", by=requests[0])
        house.hold_unloads = False
        await house.let_unload("a")
        await unload
        house.events.clear()
        again = house.ask("a")
        await until(lambda: "load a" in house.events)
        await house.release("a", by=requests[1])
        assert entry.in_use == 0
        house.hold_loads = False
        await house.let_load("a")
        await again
        assert entry.in_use == 1
        await house.release("a", by=requests[2])
        assert entry.in_use == 1
        await house.ends_idle("a")


class TestAnAnswerThatIsNotRead:
    """The client's buffers are full, and its request stands in ``send`` with a lease."""

    async def test_c9_it_keeps_its_model_no_longer_than_the_moment(
        self, house: House, mocker: Any
    ) -> None:
        entry, request = house.entry("a"), request_to(CHAT)
        await house.get("a", by=request)
        client_reads = asyncio.Event()

        async def send(_message: Any) -> None:
            await client_reads.wait()

        sending = asyncio.ensure_future(request.noting(send)({"type": "x"}))
        for_b = house.ask("b")
        await until(lambda: entry.pending_unload_reason is not None)
        await later(2.0)
        assert not for_b.done(), "it had its moment still"
        mocker.patch.object(stalled, "AFTER_S", 0.0)
        await for_b
        assert house.resident() == {"b"}
        # The client reads on, the model is loaded again: the release is of the old one.
        await house.release("b")
        other = request_to(CHAT)
        await house.get("a", by=other)
        client_reads.set()
        await sending
        await house.release("a", by=request)
        request.end()
        assert entry.in_use == 1
        await house.release("a", by=other)
        house.assert_idle()

    @pytest.mark.parametrize("busy", ["engine", "scheduler", "another lease", "it reads"])
    async def test_c9_what_runs_is_not_touched(
        self, house: House, mocker: Any, busy: str
    ) -> None:
        """K4: what the engine makes for it still, and what it makes for others."""
        entry, request = house.entry("a"), request_to(CHAT)
        engine = await house.get("a", by=request)
        works = mocker.patch.object(
            house.pool, "_entry_has_scheduler_work", create=True, return_value=False
        )
        if busy == "engine":
            engine.has_active_requests.return_value = True
        elif busy == "scheduler":
            works.return_value = True
        elif busy == "another lease":
            await house.get("a")
        since = time.monotonic() - (0.0 if busy == "it reads" else 60.0)
        mocker.patch.dict(requests.blocked, {request: since})
        for_b = house.ask("b")
        await until(lambda: entry.pending_unload_reason is not None)
        await later(2.0)
        assert not for_b.done()
        assert entry.in_use == 1 + (busy == "another lease")
        await house.release("a", by=request)
        engine.has_active_requests.return_value = works.return_value = False
        if busy == "another lease":
            await house.release("a")
        await for_b
        await house.ends_idle("b")

    @pytest.mark.parametrize("kept", [True, False])
    async def test_c9_an_unload_by_hand_does_not_wait_for_it(
        self, house: House, mocker: Any, kept: bool
    ) -> None:
        request, by_hand = request_to(CHAT), request_to("/v1/models/a/unload")
        await house.get("a", lease=not kept, by=request)
        mocker.patch.dict(requests.blocked, {request: time.monotonic() - 60.0})
        with within(by_hand):
            await house.pool._unload_engine("a")
        assert house.resident() == set()
        if not kept:
            await house.release("a", by=request)
        request.end()
        house.assert_idle()

    async def test_c9_what_was_made_for_it_is_not_cleared_with_the_engine(
        self, house: House, mocker: Any
    ) -> None:
        """A text engine calls an answer active until it is read, and its end clears it."""
        request = request_to(CHAT)
        engine = await house.get("a", by=request)
        made, core = mocker.Mock(), mocker.Mock(_output_collectors={}, _finished_at={})
        core._output_collectors["r"] = made
        core._finished_at["r"] = time.monotonic()

        def reap(now: float, grace: float = 5.0) -> None:
            for rid in [r for r, at in core._finished_at.items() if now - at >= grace]:
                del core._output_collectors[rid], core._finished_at[rid]

        core._reap_orphaned_collectors = reap
        core._task = core._closed = None
        engine._engine = mocker.Mock(engine=core)
        engine.has_active_requests.side_effect = lambda: bool(core._output_collectors)
        mocker.patch.object(
            house.pool, "_entry_has_scheduler_work", create=True, return_value=False
        )
        mocker.patch.dict(requests.blocked, {request: time.monotonic() - 60.0})
        await house.get("b")
        assert core._output_collectors == {}
        await house.release("b")
        request.end()
        await house.release("a", by=request)
        house.assert_idle()

    async def test_c9_a_refusal_names_it(self, house: House, mocker: Any) -> None:
        request, for_b = request_to(CHAT), request_to(CHAT)
        for_b.max_wait = 0.05
        engine = await house.get("a", by=request)
        engine.has_active_requests.return_value = True
        mocker.patch.dict(requests.blocked, {request: time.monotonic() - 60.0})
        await refused(house.get("b", by=for_b))
        words = "'a' (1 running, 1 of them for a client that does not read) in use"
        assert words in for_b.refusal.message
        await house.release("a", by=request)


COUNT = "/v1/messages/count_tokens"


class TestACountOfTokens:
    """C10: it is served by what is loaded, and moves no model."""

    @pytest.mark.parametrize("a_is", ["idle", "busy", "not loaded"])
    async def test_c10_it_loads_nothing_and_nothing_leaves_for_it(
        self, house: House, a_is: str
    ) -> None:
        if a_is != "not loaded":
            await house.get("a")
        if a_is == "idle":
            await house.release("a")
        counts = [request_to(COUNT) for _ in range(4)]
        events = list(house.events)
        for count in counts:
            await refused(house.get("b", by=count))
            refusal = count.refusal
            assert (refusal.status, refusal.code) == (503, "model_busy")
            assert refusal.retry_after is not None
            assert refusal.retry_after >= 1
            assert b'"overloaded_error"' in refusal.body(count.path)
        await settle()
        assert house.events == events
        assert house.entry("a").pending_unload_reason is None
        assert house.admission.policy.waiting == 0
        assert house.admission.policy.swap is None
        if a_is == "busy":
            await house.release("a")
        house.assert_idle()

    async def test_c10_a_loaded_model_counts_at_once(self, house: House) -> None:
        """Also while it is in use, and by the lease that the route takes."""
        engine = await house.get("a")
        with within(request_to(COUNT)):
            assert await house.get("a") is engine
            assert house.entry("a").in_use == 2
            await house.release("a")
        await house.ends_idle("a")

    async def test_c10_neither_while_it_loads_nor_while_it_leaves(self, house: House) -> None:
        for_a = await house.held_load("a")
        await refused(house.get("a", by=request_to(COUNT)))
        house.hold_loads = False
        await house.let_load("a")
        await for_a
        for_b = house.ask("b")
        await until(lambda: house.entry("a").pending_unload_reason is not None)
        await refused(house.get("a", by=request_to(COUNT)))
        await house.release("a")
        await for_b
        await house.ends_idle("b")


REALTIME = "/realtime"


class TestAnOpenSession:
    """C19: a socket that may stay open for ever, under which nothing runs."""

    async def test_c19_its_model_serves_on_and_the_other_one_is_told_why(
        self, house: House, mocker: Any
    ) -> None:
        entry, socket, for_b = house.entry("a"), request_to(REALTIME), request_to(CHAT)
        mocker.patch.object(requests, "sockets", {socket})
        engine = await house.get("a", lease=False, by=socket)
        for_b.max_wait = 0.3
        asked = await house.waits("b", by=for_b)
        for _ in range(5):
            # At once: the gate is open, nothing drains.
            other = house.ask("a")
            await settle()
            assert other.done()
            assert await other is engine
            await house.release("a")
            assert entry.pending_unload_reason is None
            await later(0.05)
        await refused(asked)
        words = "'a' (1 running, 1 of them an open realtime session) in use"
        assert words in for_b.refusal.message
        waits = await house.waits("b")
        requests.sockets.clear()
        socket.end()
        await waits
        await house.ends_idle("b")

    async def test_c19_another_model_leaves_instead(self, house: House, mocker: Any) -> None:
        """A was used longest ago, and would leave first."""
        socket = request_to(REALTIME)
        mocker.patch.object(requests, "sockets", {socket})
        await house.get("a", lease=False, by=socket)
        await house.get("p")
        for_d = await house.waits("d")
        assert house.entry("a").pending_unload_reason is None
        assert house.entry("p").pending_unload_reason is not None
        await house.release("p")
        await for_d
        assert house.resident() == {"a", "d"}
        await house.release("d")
        socket.end()
        house.assert_idle()


class TestAnEngineThatSaysActive:
    """P2: for ever, though nobody holds it and its scheduler has no work."""

    async def test_p2_it_counts_as_idle_after_a_moment(
        self, house: House, mocker: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = await house.get("a", lease=False)
        engine.has_active_requests.return_value = True
        for_b = house.ask("b")
        await later(2.0)
        assert not for_b.done(), "it is believed for a moment"
        mocker.patch.object(phantom, "AFTER_S", 0.02)
        await for_b
        assert house.resident() == {"b"}
        await house.ends_idle("b")
        assert caplog.text.count("calls itself active") == 1

    @pytest.mark.parametrize("work", ["thread", "diffusion", "scheduler", "lease"])
    async def test_p2_b26_b43_work_is_believed_as_long_as_it_lasts(
        self, house: House, mocker: Any, work: str
    ) -> None:
        mocker.patch.object(phantom, "AFTER_S", 0.0)
        engine = await house.get("a", lease=work == "lease")
        engine.has_active_requests.return_value = True
        scheduler = mocker.Mock(running=[], waiting=[], prefilling=[], requests={})
        scheduler.has_requests.return_value = work == "scheduler"
        core = mocker.Mock(scheduler=scheduler, _closed=False, _task=None)
        engine._engine = mocker.Mock(engine=core)
        if work == "thread":
            engine._active_count = 1
        elif work == "diffusion":
            engine.is_diffusion_model = True
        for_b = house.ask("b")
        await later(2.0)
        assert not for_b.done()
        engine.has_active_requests.return_value = False
        if work == "lease":
            await house.release("a")
        await for_b
        await house.ends_idle("b")
