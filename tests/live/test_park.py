"""Parked answers, seen by their clients: the same answer, in one stream.

On a real oMLX only: the stand-in decodes each request by itself, and has no batch of
mlx-lm's that could be taken out.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx_admission.surfaces.demo.client import LOCAL, Client
from standin.server import Server

from .conftest import Omlx, said, until
from .streams import Door, Reading
from .test_dead import error_of, until_running

#: Several answers of some seconds, one after the other.
pytestmark = pytest.mark.timeout(400)

Serve = Callable[..., Server]

CHAT = "/v1/chat/completions"
#: Long enough to be parked, on a fast machine too. One letter is one token.
TOKENS = 140
#: Each next letter depends on all that were said.
VARIED = {"model": "a", "max_tokens": TOKENS, "max_output_tokens": TOKENS}
PENALTIES = {"frequency_penalty": 0.7, "repetition_penalty": 1.1}
USAGE = {"stream_options": {"include_usage": True}}

_SAID = re.compile(r'"(?:content|text|delta)": ?"((?:[^"\\]|\\.)*)"')
_ENDS = re.compile(
    r'"((?:finish|stop)_reason|(?:prompt|completion|input|output|total)_tokens)": ?("\w+"|\d+)'
)

#: One answer of each kind, all at the same time.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**VARIED, **PENALTIES, **USAGE}),
    (CHAT, {**VARIED, **PENALTIES, "stream": False}),
    ("/v1/completions", {**VARIED, **PENALTIES, **USAGE}),
    ("/v1/messages", VARIED),
    ("/v1/responses", {**VARIED, "stream": False}),
]
SEEDED = {**VARIED, "temperature": 1.0, "top_p": 1.0, "seed": 7}


@pytest.fixture
def parking(omlx: Omlx, serve: Serve) -> Serve:
    if omlx.python is None:
        pytest.skip("the stand-in has no batch of mlx-lm's")

    def start(**options: Any) -> Server:
        return serve(
            **{
                "load_s": 0.0,
                "OMLX_ADMISSION_PARK": "1",
                "OMLX_ADMISSION_MAX_AGE_S": "0",
                **options,
            }
        )

    return start


async def warm(server: Server) -> Client:
    """Both models have been loaded, so how long that takes is known; A is loaded."""
    client = Client(server.url, timeout=90)
    for model in "aba":
        assert (await client.chat(model, tokens=2)).ok
    return client


Content = tuple[str, dict[str, str]]


def content(answer: Reading) -> Content:
    """What it says, why it ended and what it cost; how it came in pieces is a matter of
    time."""
    return "".join(_SAID.findall(answer.text)), dict(_ENDS.findall(answer.text))


async def answers(
    door: Door, asked: list[tuple[str, dict[str, Any]]]
) -> tuple[list[Reading], asyncio.Task[list[Reading]]]:
    begun = [door.start(path, **body) for path, body in asked]
    tasks = asyncio.gather(*(task for _, task in begun))
    return [reading for reading, _ in begun], asyncio.ensure_future(tasks)


async def interrupted(
    server: Server, client: Client, asked: list[tuple[str, dict[str, Any]]]
) -> list[Content]:
    """The answers where B is asked for while they run: it is served before they end."""
    since = len(server.log)
    async with Door(server) as door:
        _, whole = await answers(door, asked)
        await until_running(server, len(asked))
        served = await asyncio.gather(*(client.chat("b", tokens=2) for _ in asked))
        assert all(answer.ok for answer in served), served
        assert not whole.done()
        found = [content(answer) for answer in await whole]
    await said(server, "parked answer(s) of 'a' go on", since=since)
    return found


async def undisturbed(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> list[Content]:
    async with Door(server) as door:
        _, whole = await answers(door, asked)
        return [content(answer) for answer in await whole]


async def status(server: Server) -> Any:
    async with httpx.AsyncClient(base_url=server.url, **LOCAL) as http:
        return (await http.get("/admission/status")).json()


async def idle(server: Server) -> bool:
    found = await status(server)
    leases = sum(model["leases"] for model in found["models"])
    return not (leases or found["queue"]["waiting"] or found["queue"]["parked"]["answers"])


@pytest.mark.parametrize(
    "asked", [TOGETHER, [(CHAT, SEEDED)]], ids=["all routes together", "one with a seed"]
)
def test_an_answer_that_was_parked_is_the_same(
    parking: Serve, asked: list[tuple[str, dict[str, Any]]]
) -> None:
    server = parking()

    async def scenario() -> None:
        client = await warm(server)
        alone = await undisturbed(server, asked)
        assert await interrupted(server, client, asked) == alone
        # The engine that they went on in is as any other.
        assert await interrupted(server, client, asked) == alone
        await until(lambda: idle(server))

    asyncio.run(scenario())


def test_a_request_that_had_not_begun_begins_again(parking: Serve) -> None:
    """With one slot the second one stands in the engine, and has sent nothing."""
    server = parking(arguments=["--max-concurrent-requests", "1"])
    asked = [(CHAT, {**VARIED, **PENALTIES}), (CHAT, {**VARIED, **PENALTIES, "max_tokens": 9})]

    async def scenario() -> None:
        client = await warm(server)
        alone = await undisturbed(server, asked)
        assert await interrupted(server, client, asked) == alone

    asyncio.run(scenario())
    assert "2 answer(s) of 'a' parked" in server.log


def test_a_client_that_leaves_while_it_is_parked_leaves_nothing(
    parking: Serve, tmp_path: Path
) -> None:
    server = parking(plan={"per_model": {"b": [0.1, 1.5]}})

    async def scenario() -> None:
        await warm(server)
        alone = await undisturbed(server, [(CHAT, SEEDED)])
        for stream in (True, False):
            since = len(server.log)
            async with Door(server) as door:
                _, leaving = door.start(CHAT, **{**VARIED, "stream": stream})
                _, staying = await answers(door, [(CHAT, SEEDED)])
                await until_running(server, 2)
                for_b = [door.start(CHAT, model="b")[1] for _ in range(2)]
                await said(server, "of 'a' parked", since=since)
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                assert all(r.status == 200 for r in await asyncio.gather(*for_b))
                (stayed,) = await staying
                assert stayed.status == 200
                assert "[DONE]" in stayed.text
            await until(lambda: idle(server))
        assert await undisturbed(server, [(CHAT, SEEDED)]) == alone

    asyncio.run(scenario())


def test_nobody_left_brings_nothing_back(parking: Serve) -> None:
    server = parking(plan={"per_model": {"b": [0.1, 1.5]}})

    async def scenario() -> None:
        await warm(server)
        since = len(server.log)
        async with Door(server) as door:
            _, leaving = door.start(CHAT, **VARIED)
            await until_running(server, 1)
            _, for_b = door.start(CHAT, model="b")
            await said(server, "of 'a' parked", since=since)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert (await for_b).status == 200
        await until(lambda: idle(server))
        models = (await status(server))["models"]
        assert [m["model"] for m in models if m["state"] == "resident"] == ["b"]

    asyncio.run(scenario())


def test_answers_whose_model_does_not_come_back_end_with_the_routes_error(
    parking: Serve, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    server = parking(plan={"per_model": {"b": [0.1, 1.5]}, "failing_file": str(fails)})
    asked = [
        (path, {**body, "stream": streams})
        for path, body in TOGETHER
        for streams in (True, False)
    ][::3]

    async def scenario() -> None:
        client = await warm(server)
        since = len(server.log)
        async with Door(server) as door:
            _, whole = await answers(door, asked)
            await until_running(server, len(asked))
            served = [door.start(CHAT, model="b")[1] for _ in asked]
            await said(server, "of 'a' parked", since=since)
            fails.write_text("a")
            await asyncio.gather(*served)
            for answer in await whole:
                assert error_of(answer)["code"] == "answer_lost", answer.text[-500:]
        await until(lambda: idle(server))
        fails.unlink()
        assert (await client.chat("b")).ok

    asyncio.run(scenario())


def test_the_end_of_the_server_ends_them(parking: Serve) -> None:
    server = parking(plan={"per_model": {"b": [0.1, 3.0]}})

    async def scenario() -> None:
        await warm(server)
        since = len(server.log)
        async with Door(server) as door:
            _, whole = await answers(
                door, [(CHAT, VARIED), (CHAT, {**VARIED, "stream": False})]
            )
            for_b = [door.start(CHAT, model="b")[1] for _ in range(2)]
            await said(server, "of 'a' parked", since=since)
            os.kill(server.pid, signal.SIGTERM)
            for answer in await whole:
                assert error_of(answer)["code"] == "shutting_down", answer.text[-500:]
            await asyncio.gather(*for_b, return_exceptions=True)

    asyncio.run(scenario())


def test_b_does_not_wait_for_the_rest_of_an_answer(parking: Serve) -> None:
    """The order that a drain cannot have: B's answer ends before A's, though A's began first
    and the memory is for one; without parking it ends after it."""
    for park, first in (("1", "b"), ("0", "a")):
        server = parking(OMLX_ADMISSION_PARK=park)

        async def scenario(server: Server = server) -> str:
            client = await warm(server)
            async with Door(server) as door:
                _, for_a = door.start(CHAT, **VARIED)
                await until_running(server, 1)
                for_b = asyncio.create_task(client.chat("b", tokens=2))
                done, _ = await asyncio.wait(
                    [for_a, for_b], return_when=asyncio.FIRST_COMPLETED
                )
                await asyncio.gather(for_a, for_b)
                return "a" if for_a in done else "b"

        assert asyncio.run(scenario()) == first
    assert "parked" not in server.log
