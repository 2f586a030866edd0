"""Requests as clients make them: from a browser's script, with a body that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from standin.server import Server

from .streams import ROUTES, Door

Serve = Callable[..., Server]

ORIGIN = {"Origin": "http://localhost:3000"}
WAIT = {"X-OMLX-Max-Wait": "0.5"}
READABLE = {"retry-after", "x-should-retry", "x-omlx-admission-wait-ms"}


async def test_c12_a_script_may_read_when_to_come_back_and_how_long_it_waited(
    serve: Serve,
) -> None:
    server = serve(load_s=0.1)

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

    async with Door(server) as door:
        async with door.busy("a"):
            await ask(door, "b", 503, "retry-after")
            await ask(door, "x", 507, "x-should-retry")
            await ask(door, "a", 200, "x-omlx-admission-wait-ms")
        plain = await door.http.get("/v1/models", headers=ORIGIN)
        assert "access-control-expose-headers" not in plain.headers


async def test_f7_a_client_that_pours_into_a_wait_is_held_by_the_server(serve: Serve) -> None:
    """The route reads no body, so that nothing but the wait could take it."""
    server = serve(load_s=0.1)
    whole, piece = 256 << 20, b"x" * (1 << 20)
    poured = 0

    async def pour(writer: asyncio.StreamWriter) -> None:
        nonlocal poured
        while poured < whole:
            writer.write(piece)
            await writer.drain()
            poured += len(piece)

    async with Door(server) as door, door.busy("a"):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/models/b/load HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % whole
        )
        pouring = asyncio.create_task(pour(writer))
        waited = 0
        while waited < 50:
            status = (await door.http.get("/admission/status")).json()
            waited += status["queue"]["waiting"]
        assert not pouring.done()
        assert poured < whole
        pouring.cancel()
        writer.transport.abort()
