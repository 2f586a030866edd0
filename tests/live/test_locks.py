"""F4: a loaded model's streams go on while another one loads, also where memory is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from omlx_admission.surfaces.demo.client import Client
from standin.server import Server

from .conftest import said

Serve = Callable[..., Server]


async def test_f4_prefills_that_ask_for_memory_do_not_wait_for_a_load(
    serve: Serve, tmp_path: Path
) -> None:
    """Each step of D asks the pool for memory; A's load ends when all of D have ended."""
    loaded = tmp_path / "loaded"
    plan = {"evicting": ["d"], "hang": {"a": "thread"}, "hang_until": str(loaded)}
    server = serve(load_s=0.0, plan=plan)
    client = Client(server.url, timeout=120)
    assert (await client.chat("d", tokens=2)).ok
    loading = asyncio.create_task(client.chat("a", tokens=2))
    await said(server, "swapping to 'a'")
    answers = await asyncio.gather(
        *(client.chat("d", tokens=8, stream=i % 2 == 0) for i in range(20))
    )
    assert all(answer.ok for answer in answers), answers
    assert not loading.done()
    loaded.touch()
    assert (await loading).ok
    assert "admission: 'a' resident" in server.log
