"""C9: a lease belongs to an engine, and a client that stops reading keeps no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from .conftest import House, run, until
from .test_leases import request_to, within

Make = Callable[..., House]

CHAT = "/v1/chat/completions"


class TestALeaseBelongsToAnEngine:
    """The engine is torn down under a lease: cut by hand, or by stock's own unload."""

    @pytest.mark.parametrize("features", [None, {"queue"}, {"resident"}])
    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("lease", [True, False])
    def test_c9_it_does_not_count_on_the_next_engine(
        self, make_house: Make, features: set[str] | None, named: bool, lease: bool
    ) -> None:
        if not (named or lease):
            pytest.skip("nothing is held for a caller outside of requests")

        async def test() -> None:
            house = make_house(features=features, max_age_s=0.0)
            entry, first, second = house.entry("a"), request_to(CHAT), request_to(CHAT)
            if named:
                with within(first):
                    await house.get("a", lease)
            else:
                await house.get("a")
            assert entry.in_use == 1
            await house.pool._unload_engine("a")
            assert entry.in_use == 0
            with within(second):
                engine = await house.get("a")
            assert entry.in_use == 1, "the old lease counts on the new engine"
            # The old one ends while the new one is used: that stays in use.
            if named and lease:
                with within(first):
                    await house.release("a")
            elif lease:
                await house.release("a")
            first.end()
            assert entry.in_use == 1, "the old release has given the new lease back"
            with within(second):
                await house.release("a")
            assert (entry.in_use, entry.engine) == (0, engine)
            await house.get("b")
            await house.release("b")
            house.assert_idle()

        run(test)

    def test_c9_leases_of_a_request_that_asks_again(self, make_house: Make) -> None:
        """Its own first engine is gone when it asks: two leases, one of which counts."""

        async def test() -> None:
            house = make_house()
            entry, request, other = house.entry("a"), request_to(CHAT), request_to(CHAT)
            with within(request):
                await house.get("a")
            await house.pool._unload_engine("a")
            with within(other):
                await house.get("a")
            with within(request):
                await house.get("a")
                assert entry.in_use == 2
                await house.release("a")
                await house.release("a")
            assert entry.in_use == 1
            with within(other):
                await house.release("a")
            house.assert_idle()

        run(test)

    def test_c9_a_grant_that_is_cancelled_after_its_engine_went(self, make_house: Make) -> None:
        async def test() -> None:
            house = make_house(max_age_s=0.0)
            house.hold_loads = True
            for_a = house.ask("a")
            await until(lambda: "load a" in house.events)
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
            await house.release("a")
            house.assert_idle()

        run(test)

    def test_c9_a_release_between_the_engines_is_the_old_one_s(self, make_house: Make) -> None:
        """While the old engine is being closed, and while the next one loads."""

        async def test() -> None:
            house = make_house()
            entry, requests = house.entry("a"), [request_to(CHAT) for _ in range(3)]
            for request in requests:
                with within(request):
                    await house.get("a")
            house.hold_unloads = house.hold_loads = True
            unload = asyncio.ensure_future(house.pool._unload_engine("a"))
            await until(lambda: "unload a" in house.events)
            with within(requests[0]):
                await house.release("a")
            house.hold_unloads = False
            await house.let_unload("a")
            await unload
            house.events.clear()
            again = house.ask("a")
            await until(lambda: "load a" in house.events)
            with within(requests[1]):
                await house.release("a")
            assert entry.in_use == 0
            house.hold_loads = False
            await house.let_load("a")
            await again
            assert entry.in_use == 1
            with within(requests[2]):
                await house.release("a")
            assert entry.in_use == 1
            await house.release("a")
            house.assert_idle()

        run(test)
