"""Streams that wait long, seen by clients: oMLX's keep-alives, then the stream itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import standin
from standin.server import Server

from .conftest import Omlx, said
from .streams import ROUTES, Door, Reading

Serve = Callable[..., Server]

CHAT = "/v1/chat/completions"


async def test_who_waits_long_gets_keepalives_and_then_the_same_stream(serve: Serve) -> None:
    """And who is kept alive may leave, and is told when the server ends."""
    server = serve(load_s=0.2, plan={"keepalive_s": 0.2}, OMLX_ADMISSION_STREAM_HOLD_S="0.3")

    async def compare(door: Door) -> tuple[list[Reading], list[Reading], list[Reading]]:
        async with door.busy("a"):
            held = [door.start(path) for path in ROUTES]
            silent = [door.start(path, stream=False) for path in ROUTES]
            for reading, _ in held:
                await reading.until_kept_alive(3)
            assert [r.status for r, _ in silent] == [0] * 4, "no byte before admission"
        waited = [await task for _, task in held]
        plain = [await task for _, task in silent]
        return waited, [await door.read(path, Reading()) for path in ROUTES], plain

    async def end(door: Door) -> list[Reading]:
        async with door.busy("a"):
            held = [door.start(path) for path in ROUTES]
            leaving, left = door.start(CHAT)
            for reading in (*(r for r, _ in held), leaving):
                await reading.until_kept_alive(2)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            await said(server, "cancelled after")
            os.kill(server.pid, signal.SIGTERM)
            return [await task for _, task in held]

    async with Door(server) as door:
        waited, direct, plain, ended = (*await compare(door), await end(door))
    own = {"date", "x-omlx-admission-wait-ms"}
    for path, held, other in zip(ROUTES, waited, direct, strict=True):
        assert held.status == other.status == 200
        assert held.events == other.events, path
        assert {k: v for k, v in held.headers.items() if k not in own} == {
            k: v for k, v in other.headers.items() if k not in own
        }
        assert "x-omlx-admission-wait-ms" not in held.headers
    assert {json.loads(a.text).get("object", "message") for a in plain} == {
        "chat.completion",
        "text_completion",
        "message",
        "response",
    }
    assert all(int(a.headers["x-omlx-admission-wait-ms"]) > 0 for a in plain)
    for answer in ended:
        assert answer.status == 200
        assert "shutting_down" in answer.text
        assert answer.text.endswith("\n\n")


def responses(text: str) -> list[dict[str, Any]]:
    """The events of a stream of Responses; there is nothing but events in it (C17)."""
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in found]
    return found


def test_c17_a_held_response_is_one_response(omlx: Omlx, serve: Serve) -> None:
    """It begins at once, goes on under its id and is found by it afterwards."""
    server = serve(load_s=0.2, plan={"keepalive_s": 0.2}, OMLX_ADMISSION_STREAM_HOLD_S="0.3")
    path = "/v1/responses"

    async def accumulated(stock: Stock) -> list[Any]:
        stream, body = stock.accumulators[-1]
        return await accumulate(stream(**body))

    async def scenario(stock: Stock) -> None:
        async with Door(server) as door, stock:
            async with door.busy("a"):
                reading, held = door.start(path)
                by_client = asyncio.create_task(accumulated(stock))
                await reading.until_kept_alive(3)
            events = responses((await held).text)
            assert [e["type"] for e in events[:3]] == ["response.created"] + [
                "response.in_progress"
            ] * 2
            check(events)
            end = events[-1]["response"]
            if omlx.source != standin.PATH:
                stored = await door.http.get(f"{path}/{end['id']}")
                assert stored.json()["output"] == end["output"]
                more = await door.read(path, Reading(), previous_response_id=end["id"])
                assert more.status == 200
            check([event.to_dict(warnings=False) for event in await by_client])

    def check(events: list[dict[str, Any]]) -> None:
        kinds = [event["type"] for event in events]
        assert kinds.count("response.created") == 1
        assert kinds[-1] in ("response.incomplete", "response.completed")
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(1, len(events) + 1))
        assert len({e["response"]["id"] for e in events if "response" in e}) == 1

    asyncio.run(scenario(Stock(server, {})))


class Stock:
    """The stock clients of one server, with their default retries, each API by its call."""

    def __init__(self, server: Server, headers: dict[str, str]) -> None:
        # Here and not above: each takes seconds to import.
        import anthropic
        import openai

        self._anthropic, self._openai = anthropic, openai
        self.ours = self._openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", default_headers=headers
        )
        self.theirs = self._anthropic.AsyncAnthropic(
            base_url=server.url, api_key="x", default_headers=headers
        )
        chat, text, message, turn = ({"model": "b", **body} for body in ROUTES.values())
        self.calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (self.ours.chat.completions.create, chat),
            (self.ours.completions.create, text),
            (self.theirs.messages.create, message),
            (self.ours.responses.create, turn),
        ]
        self.accumulators: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (self.ours.chat.completions.stream, chat),
            (self.theirs.messages.stream, message),
            (self.ours.responses.stream, turn),
        ]

    async def __aenter__(self) -> Stock:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.ours.close()
        await self.theirs.close()

    def is_refusal(self, error: Any) -> bool:
        """Whether ``error`` is what the client raises for what a server says."""
        if isinstance(error, self._anthropic.APIStatusError):
            return bool(error.body["error"]["type"] == "overloaded_error")
        return isinstance(error, self._openai.APIError) and error.code == "model_swap_timeout"


async def read(call: Any) -> list[Any]:
    """All of a stream that a call returns."""
    return [event async for event in await call]


async def accumulate(manager: Any) -> list[Any]:
    """All of a stream that a client's own accumulator reads."""
    async with manager as stream:
        return [event async for event in stream]


def test_stock_clients_raise_a_refusal_that_comes_as_an_event(serve: Serve) -> None:
    server = serve(load_s=0.1, plan={"keepalive_s": 0.2}, OMLX_ADMISSION_STREAM_HOLD_S="0.4")

    async def scenario(stock: Stock) -> list[Any]:
        async with Door(server) as door, stock, door.busy("a"):
            return await asyncio.gather(
                *(read(call(**body, stream=True)) for call, body in stock.calls),
                *(accumulate(stream(**body)) for stream, body in stock.accumulators),
                return_exceptions=True,
            )

    stock = Stock(server, {"X-OMLX-Max-Wait": "1.2"})
    errors = asyncio.run(scenario(stock))
    assert len(errors) == 7
    for error in errors:
        assert stock.is_refusal(error), error
        assert "'a' (1 running) in use" in str(error)
    # A status would have been retried.
    assert server.log.count("refused (model_swap_timeout)") == 7


def test_stock_clients_come_back_after_a_status_and_see_no_error(
    omlx: Omlx, serve: Serve
) -> None:
    if omlx.source == standin.PATH:
        pytest.skip("ten seconds of waiting, on real oMLX")
    server = serve(load_s=0.1, OMLX_ADMISSION_MAX_WAIT_S="3")

    async def scenario(stock: Stock) -> list[Any]:
        async with Door(server) as door, stock:
            async with door.busy("a"):
                calls = [asyncio.create_task(call(**body)) for call, body in stock.calls]
                calls += [
                    asyncio.create_task(read(call(**body, stream=True)))
                    for call, body in stock.calls
                ]
                await said(server, "refused (model_swap_timeout)", 8)
            return await asyncio.gather(*calls)

    answers = asyncio.run(scenario(Stock(server, {})))
    assert all(answers)
    assert len(answers) == 8


async def test_in_the_mode_off_a_refusal_keeps_its_status(omlx: Omlx, serve: Serve) -> None:
    if omlx.source == standin.PATH:
        pytest.skip("on real oMLX; for the stand-in, the tests of the hook and the runtime")
    server = serve(
        load_s=0.1,
        arguments=["--sse-keepalive-mode", "off"],
        OMLX_ADMISSION_STREAM_HOLD_S="0.1",
    )
    wait = {"X-OMLX-Max-Wait": "0.6"}
    async with Door(server) as door, door.busy("a"):
        door.http.headers.update(wait)
        answers = await asyncio.gather(*(door.read(path, Reading()) for path in ROUTES))
    for answer in answers:
        assert answer.status == 503
        assert json.loads(answer.text)["error"]["code"] == "model_swap_timeout"
