"""C9, C10: clients that stop reading, and counts of tokens, on a server of one place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from omlx_admission.surfaces.demo.client import Client
from standin.server import Server

Serve = Callable[..., Server]

#: Each event says this before the name of its model: a short stream, of more bytes than the
#: buffers between server and client hold.
_PREFIX = 100_000 * "p"


@contextlib.asynccontextmanager
async def stalled(server: Server, model: str) -> AsyncIterator[Callable[[], Any]]:
    """A stream whose client reads its head and nothing more, until the call of what is given.

    That call reads on, and returns all of the stream.
    """
    loop = asyncio.get_running_loop()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # Loopback's large segments would give the server a buffer of megabytes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.setblocking(False)
    body = json.dumps(
        {
            "model": f"{_PREFIX}/{model}",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 100,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    await loop.sock_connect(connection, (host, int(port)))
    try:
        await loop.sock_sendall(connection, head + body)
        got = await loop.sock_recv(connection, 1024)
        assert got.startswith(b"HTTP/1.1 200")

        async def read_on() -> bytes:
            whole = got
            while part := await loop.sock_recv(connection, 1 << 20):
                whole += part
            return whole

        yield read_on
    finally:
        connection.close()


def swaps(server: Server) -> list[str]:
    return re.findall(r"admission: '(\w+)' resident", server.log)


async def test_c9_a_client_that_stops_reading_keeps_no_model(serve: Serve) -> None:
    """B is served, A serves its other clients, and who reads on gets what was made."""
    server = serve(load_s=0.2, OMLX_ADMISSION_MAX_AGE_S="1")
    client = Client(server.url)
    # B is the fast one of the two: its stream is made before long.
    await client.chat("b", tokens=2)
    async with stalled(server, "b") as read_on:
        others = [asyncio.create_task(client.chat("b", tokens=2)) for _ in range(2)]
        assert [(await o).status for o in others] == [200, 200]
        served = await client.chat("a", tokens=2)
        assert served.status == 200, served.body
        assert "for 1 answer(s) that the client does not read" in server.log
        again = await client.chat("b", tokens=2)
        assert again.status == 200, again.body
        back = await client.chat("a", tokens=2)
        assert back.status == 200, back.body
        whole = await asyncio.wait_for(read_on(), 60)
        assert b"data: [DONE]" in whole or b'"error"' in whole
    last = await client.chat("b", tokens=2)
    assert last.status == 200, last.body
    assert swaps(server) == ["b", "a", "b", "a", "b"]


async def test_c10_a_count_of_tokens_moves_no_model(serve: Serve) -> None:
    server = serve(load_s=0.5, OMLX_ADMISSION_MAX_AGE_S="0")
    client = Client(server.url)
    body = {"messages": [{"role": "user", "content": "hello"}]}

    async def count(model: str) -> Any:
        return await client.post("/v1/messages/count_tokens", {"model": model, **body})

    await client.chat("a", tokens=2)
    stream = asyncio.create_task(client.chat("a", tokens=60, stream=True))
    await asyncio.sleep(0.3)
    answers = await asyncio.gather(*(count("b") for _ in range(16)))
    assert not stream.done()
    for answer in [*answers, await count("b")]:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        error = json.loads(answer.body)
        assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    assert (await stream).ok
    idle = await count("b")
    assert idle.status == 503
    there = await count("a")
    assert there.status == 200
    assert json.loads(there.body)["input_tokens"] > 0
    assert swaps(server) == ["a"]
    assert "drains" not in server.log
