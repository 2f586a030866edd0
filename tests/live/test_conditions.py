"""What the other server tests stand on: moving ceilings, and loads as they really run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from omlx_admission.surfaces.demo.client import Answer, Client
from standin import tinymodels
from standin.server import Server

from .conftest import STATIC_GB, loading, until

Serve = Callable[..., Server]

GB = 1024**3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two text models of which one fits, and an embedder beside either."""
    root = tmp_path_factory.mktemp("models")
    tinymodels.make_text_model(root, name="a", counted_bytes=1_650_000_000)
    tinymodels.make_text_model(root, name="b", counted_bytes=1_650_000_000, seed=1)
    tinymodels.make_embedder(root, name="e")
    return root


def embed(client: Client) -> Awaitable[Answer]:
    return client.post("/v1/embeddings", {"model": "e", "input": "hello"})


async def test_the_ceiling_moves_in_the_default_tier(serve: Serve) -> None:
    server = serve(ceiling_gb=2.0)
    client = Client(server.url)

    async def reads(gb: float) -> None:
        # A reading is kept for a moment.
        async def look() -> bool:
            memory = (await client.get("/admission/status"))[1]["memory"]
            return bool(memory["ceiling_bytes"] == gb * GB)

        await until(look)

    await reads(2.0)
    server.set_ceiling(1.25)
    await reads(1.25)
    # What moves is not all: it can pass the part that does not.
    server.set_ceiling(2 * STATIC_GB)
    await reads(STATIC_GB)


def test_the_metal_cap_is_a_part_of_the_ceiling(serve: Serve) -> None:
    server = serve(ceiling_gb=2.0, plan={"metal_gb": 1.5})
    status = asyncio.run(Client(server.url).get("/admission/status"))[1]
    assert status["memory"]["ceiling_bytes"] == 1.5 * GB


@pytest.mark.parametrize(
    ("hang", "own_thread", "stuck"),
    [
        pytest.param("thread", "0", True, id="on the thread of all loads"),
        pytest.param("thread", "1", False, id="on a thread of its own"),
        pytest.param("await", "0", False, id="on no thread"),
    ],
)
async def test_a_load_hangs_where_loads_run(
    serve: Serve, tmp_path: Path, hang: str, own_thread: str, stuck: bool
) -> None:
    # An embedder works on oMLX's load thread, so its answers tell what is on it.
    over = tmp_path / "over"
    server = serve(
        load_s=0.0,
        plan={"hang": {"b": hang}, "hang_until": str(over)},
        OMLX_ADMISSION_LOAD_THREAD=own_thread,
    )
    client = Client(server.url)
    assert (await embed(client)).ok
    swap = asyncio.create_task(client.chat("b"))
    await until(loading(client, "b"))
    beside = asyncio.create_task(embed(client))
    # The event loop is free whatever hangs.
    await client.get("/health")
    if stuck:
        await asyncio.sleep(0.5)
        assert not beside.done()
    else:
        assert (await beside).ok
    assert not swap.done()
    over.touch()
    assert (await beside).ok
    assert (await swap).ok


async def test_loads_of_one_model_differ(serve: Serve) -> None:
    server = serve(load_s=0.0, plan={"per_model": {"b": [0.0, 3.0]}})
    client = Client(server.url)
    assert (await client.chat("b")).ok
    assert (await client.chat("a")).ok
    again = asyncio.create_task(client.chat("b"))
    await until(loading(client, "b"))
    await asyncio.sleep(0.5)
    assert not again.done()
    assert (await again).ok
