"""B12: a model handed to a route that takes no lease stays until its request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from omlx_admission.runtime import request as requests

from .conftest import House, run, settle

Make = Callable[..., House]


async def never() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("cold", [True, False])
def test_b12_an_unleased_model_is_no_victim_before_its_request_ends(
    make_house: Make, cold: bool
) -> None:
    async def test() -> None:
        house = make_house(max_age_s=0.0)
        if not cold:
            await house.get("a", lease=False)
        request = requests.Request({"path": "/v1/audio/speech", "headers": []}, never)
        token = requests.current.set(request)
        engine = await house.get("a", lease=False)
        requests.current.reset(token)
        assert house.entry("a").in_use == 1
        for_b = house.ask("b")
        await settle()
        assert not for_b.done()
        assert house.entry("a").engine is engine
        request.end()
        await for_b
        await house.release("b")
        house.assert_idle()

    run(test)


def test_a_task_that_outlives_its_request_holds_nothing(make_house: Make) -> None:
    async def test() -> None:
        house = make_house()
        request = requests.Request({"path": "/admin/api/benchmark", "headers": []}, never)
        token = requests.current.set(request)
        request.end()
        await house.get("a", lease=False)
        requests.current.reset(token)
        house.assert_idle()

    run(test)


def test_switched_off_nothing_is_held(make_house: Make) -> None:
    async def test() -> None:
        house = make_house(leases=False)
        request = requests.Request({"path": "/v1/audio/speech", "headers": []}, never)
        token = requests.current.set(request)
        await house.get("a", lease=False)
        requests.current.reset(token)
        house.assert_idle()
        request.end()
        house.assert_idle()

    run(test)
