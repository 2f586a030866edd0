"""What a script in a browser, of another origin, gets to read of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omlx_admission.surfaces.demo.server import Server

from .streams import ROUTES, Door

Serve = Callable[..., Server]

ORIGIN = {"Origin": "http://localhost:3000"}
WAIT = {"X-OMLX-Max-Wait": "0.5"}
READABLE = {"retry-after", "x-should-retry", "x-omlx-admission-wait-ms"}


def test_c12_a_script_may_read_when_to_come_back_and_how_long_it_waited(serve: Serve) -> None:
    server = serve(load_s=0.1)

    async def scenario() -> None:
        async with Door(server) as door:
            async with door.busy("a"):
                await ask(door, "b", 503, "retry-after")
                await ask(door, "x", 507, "x-should-retry")
                await ask(door, "a", 200, "x-omlx-admission-wait-ms")
            plain = await door.http.get("/v1/models", headers=ORIGIN)
            assert "access-control-expose-headers" not in plain.headers

    async def ask(door: Door, model: str, status: int, header: str) -> None:
        path = "/v1/chat/completions"
        body = {"model": model, **ROUTES[path]}
        for origin in (ORIGIN, {}):
            answer = await door.http.post(path, json=body, headers={**WAIT, **origin})
            assert answer.status_code == status
            assert header in answer.headers
            exposed = answer.headers.get("access-control-expose-headers", "")
            names = {name.strip().lower() for name in exposed.split(",") if name}
            assert names == (READABLE if origin else set())
            if origin:
                assert answer.headers["access-control-allow-origin"] == "*"

    asyncio.run(scenario())
