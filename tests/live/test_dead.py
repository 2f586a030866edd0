"""P2: an engine whose loop has died, seen by the clients of it and of another model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx

from omlx_admission.surfaces.demo.client import LOCAL, Client
from standin.server import Server

from .streams import Door, Reading

Serve = Callable[..., Server]

#: Routes and whether they stream: one of each shape of an error.
ASKED = (
    ("/v1/chat/completions", True),
    ("/v1/chat/completions", False),
    ("/v1/messages", True),
    ("/v1/responses", True),
)


async def until_running(server: Server, requests: int) -> None:
    """Return when so many requests of A are under way."""
    async with httpx.AsyncClient(base_url=server.url, **LOCAL) as http:
        for _ in range(600):
            models = (await http.get("/admission/status")).json()["models"]
            if any(m["model"] == "a" and m["leases"] == requests for m in models):
                return
            await asyncio.sleep(0.05)
    raise AssertionError("they never began")


def error_of(answer: Reading) -> dict[str, str]:
    """The last error of an answer, whole."""
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    found = [json.loads(text) for text in data or [answer.text.strip()]]
    return next(content["error"] for content in reversed(found) if "error" in content)


async def test_p2_callers_of_a_dead_engine_are_told_and_its_model_comes_back(
    serve: Serve, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    server = serve(load_s=0.2, plan={"fault_file": str(fault)})
    client = Client(server.url)
    assert (await client.chat("a")).ok
    async with Door(server) as door:
        more = {"model": "a", "max_tokens": 20_000, "max_output_tokens": 20_000}
        reading = [
            door.start(route, **{**more, "stream": stream})[1] for route, stream in ASKED
        ]
        await until_running(server, len(ASKED))
        fault.touch()
        answers = await asyncio.gather(*reading)
        fault.unlink()
    for answer in answers:
        assert error_of(answer)["code"] == "engine_failed", answer.text[-500:]
    assert (await client.chat("b")).ok
    assert (await client.chat("a")).ok
    async with httpx.AsyncClient(base_url=server.url, **LOCAL) as http:
        assert (await http.get("/admission/status")).json()["health"]["ok"]
    assert server.log.count("admission: the engine of 'a' has died") == 1
