"""C1: the ceiling falls for a moment at every stage of a request; nobody is told never.

Each dip lasts until the server has looked at it, and then as long as the test says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from omlx_admission.surfaces.demo.client import Client
from standin.server import Server

from .conftest import loading, said, streaming, until
from .test_main_job import LONG, swaps

Serve = Callable[..., Server]

#: In GB: one of A and B fits below the first, A runs on under the second, B never loads.
ROOM, DIP = 2.7, 1.3


async def waits_for_the_ceiling(client: Client, model: str) -> None:
    """Until the queue has looked at a ceiling that is too low for ``model``."""

    async def look() -> bool:
        status = (await client.get("/admission/status"))[1]
        return any(
            q["model"] == model and q["reason"] == "ceiling" for q in status["queue"]["models"]
        )

    await until(look)


@pytest.mark.parametrize("lasts", [0.1, 3.0])
async def test_c1_a_dip_behind_a_busy_model(serve: Serve, lasts: float) -> None:
    """(a) and (c): one plain, one streaming, both kept waiting past the first keep-alive."""
    server = serve(ceiling_gb=ROOM, load_s=0.5, OMLX_ADMISSION_STREAM_HOLD_S="0.5")
    client = Client(server.url)
    await client.chat("a")
    long = await streaming(server, tokens=2 * LONG)
    others = [asyncio.create_task(client.chat("b", stream=stream)) for stream in (False, True)]
    await said(server, "waits for 'b'", 2)
    server.set_ceiling(DIP)
    await waits_for_the_ceiling(client, "b")
    await asyncio.sleep(lasts)
    server.set_ceiling(ROOM)
    answers = await asyncio.gather(long, *others)
    assert all(a.ok for a in answers), answers
    assert swaps(server) == ["a", "b"]


async def test_c1_a_dip_while_the_other_idles(serve: Serve) -> None:
    """(b): nothing leaves in it, and the loaded model serves on."""
    server = serve(ceiling_gb=ROOM, load_s=0.2)
    client = Client(server.url)
    await client.chat("a")
    server.set_ceiling(DIP)
    for_b = asyncio.create_task(client.chat("b"))
    await waits_for_the_ceiling(client, "b")
    for_a = await client.chat("a")
    loaded = (await client.get("/api/status"))[1]["loaded_models"]
    server.set_ceiling(ROOM)
    for_b = await for_b
    assert for_a.ok, for_a
    assert loaded == ["a"]
    assert for_b.ok, for_b


async def test_c1_a_dip_during_a_drain_and_during_a_load(serve: Serve) -> None:
    server = serve(ceiling_gb=ROOM, load_s=2.0, OMLX_ADMISSION_MAX_AGE_S="0")
    client = Client(server.url)
    await client.chat("a")
    long = await streaming(server, tokens=LONG)
    for_b = asyncio.create_task(client.chat("b"))
    await said(server, "'a' drains for 'b'")
    late = asyncio.create_task(client.chat("a"))
    server.set_ceiling(DIP)
    answers = [await long]
    await waits_for_the_ceiling(client, "b")
    assert (await client.get("/api/status"))[1]["loaded_models"] == ["a"]
    server.set_ceiling(ROOM)
    await until(loading(client, "b"))
    server.set_ceiling(DIP)
    await asyncio.sleep(1.0)
    server.set_ceiling(ROOM)
    answers = [*answers, await for_b, await late]
    assert all(a.ok for a in answers), answers


async def test_c1_a_dip_that_outlasts_the_budget(serve: Serve) -> None:
    server = serve(ceiling_gb=ROOM, load_s=0.2, OMLX_ADMISSION_MAX_WAIT_S="1")
    client = Client(server.url)
    server.set_ceiling(DIP)
    refused = await client.chat("b")
    never = await client.chat("x")
    server.set_ceiling(ROOM)
    after = await client.chat("b")
    assert refused.status == 503, refused
    assert int(refused.headers["retry-after"]) >= 1
    error = json.loads(refused.body)["error"]
    assert error["code"] == "model_swap_timeout"
    assert "ceiling, 1.30 GB at the moment and 4.00 GB at most" in error["message"]
    assert never.status == 507
    assert "4.00 GB" in json.loads(never.body)["error"]["message"]
    assert after.ok, after
