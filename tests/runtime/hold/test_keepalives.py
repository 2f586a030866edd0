"""When a stream that waits is kept alive, and how its real stream follows."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from omlx_admission.core import request as requests
from omlx_admission.core import stream_hold
from omlx_admission.core.refusal import Refusal
from omlx_admission.core.stream_hold import Keepalive, Rule

from ..virtual import VirtualLoop
from .rig import (
    AFTER,
    BUSY,
    HANDLING,
    INTERVAL,
    JSON,
    SSE,
    Exchange,
    Waiter,
    end,
    events,
    read,
    whole,
)


@pytest.mark.parametrize("path", sorted(stream_hold.PROTOCOLS))
def test_keepalives_come_after_the_hold_and_then_at_the_interval(
    loop: VirtualLoop, waiter: Waiter, path: str
) -> None:
    exchange = Exchange(loop, waiter, path)
    loop.advance(AFTER - 0.1)
    assert exchange.sent == []
    loop.advance(0.1)
    assert exchange.status == 200
    assert tuple(exchange.sent[0]["headers"]) == stream_hold.HEADERS
    assert exchange.keepalives == 1
    loop.advance(INTERVAL - 0.1)
    assert exchange.keepalives == 1
    loop.advance(2 * INTERVAL)
    assert exchange.keepalives == 3
    end(exchange, waiter)
    loop.advance(5 * INTERVAL)
    assert exchange.keepalives == 3
    assert exchange.text.endswith("data: 1\n\ndata: [DONE]\n\n")
    assert exchange.closed


@pytest.mark.parametrize("true", [True, 1, "true", "YES"])
def test_what_omlx_takes_for_true_is_held(
    loop: VirtualLoop, waiter: Waiter, true: object
) -> None:
    exchange = Exchange(loop, waiter, "/v1/chat/completions", {"model": "b", "stream": true})
    loop.advance(AFTER)
    assert exchange.keepalives == 1
    end(exchange, waiter)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "b"}),
        ("/v1/chat/completions", {"model": "b", "stream": False}),
        ("/v1/chat/completions", {"model": "b", "stream": "off"}),
        ("/v1/chat/completions", {"model": "b", "stream": 2}),
        ("/v1/chat/completions", {"model": "b", "tools": [{"stream": True}]}),
        ("/v1/chat/completions", {"model": "b", "x": '"stream": true'}),
        ("/v1/embeddings", {"model": "b", "stream": True}),
        ("/v1/messages/count_tokens", {"model": "b", "stream": True}),
        ("/v1/chat/completions", [True]),
    ],
)
@pytest.mark.parametrize("refusal", [None, BUSY])
def test_others_get_no_byte_before_their_answer(
    loop: VirtualLoop,
    waiter: Waiter,
    path: str,
    body: Any,
    refusal: Refusal | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange(loop, waiter, path, body)
    loop.advance(20 * AFTER)
    assert exchange.sent == []
    waiter.refusal = refusal
    if refusal is not None:
        waiter.answer = lambda send: whole(send, 500, JSON, b"{}")
    end(exchange, waiter)
    assert exchange.status == (503 if refusal else 200)
    assert exchange.keepalives == 0
    assert caplog.records == []


@pytest.mark.parametrize("rule", [None, Rule(AFTER, lambda _protocol: None)])
def test_switched_off_or_in_the_mode_off_nothing_is_sent(
    loop: VirtualLoop, waiter: Waiter, rule: Rule | None
) -> None:
    HANDLING.hold_for = None if rule is None else rule.hold_for
    exchange = Exchange(loop, waiter)
    loop.advance(20 * AFTER)
    assert exchange.sent == []
    waiter.refusal, waiter.answer = BUSY, lambda send: whole(send, 500, JSON, b"{}")
    end(exchange, waiter)
    assert exchange.status == 503


def test_a_refusal_before_the_hold_keeps_its_status(loop: VirtualLoop, waiter: Waiter) -> None:
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER - 0.1)
    waiter.refusal, waiter.answer = BUSY, lambda send: whole(send, 500, JSON, b"{}")
    end(exchange, waiter)
    loop.advance(10 * AFTER)
    assert exchange.status == 503
    assert exchange.keepalives == 0


def test_who_was_served_in_time_is_left_alone(loop: VirtualLoop, waiter: Waiter) -> None:
    """Out of the queue, the answer under way: no keep-alive comes between."""
    go_on = asyncio.Event()

    async def slow(send: Any) -> None:
        await go_on.wait()
        await whole(send)

    waiter.answer = slow
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER - 0.1)
    waiter.go.set()
    loop.advance(10 * AFTER)
    assert exchange.sent == []
    go_on.set()
    loop.turn()
    assert exchange.text == "data: 1\n\ndata: [DONE]\n\n"


def test_f8_a_body_that_is_not_understood_is_not_held(
    loop: VirtualLoop, waiter: Waiter, mocker: Any
) -> None:
    mocker.patch("omlx_admission.core.stream_hold.StreamHold.asked")
    exchange = Exchange(loop, waiter)
    loop.advance(20 * AFTER)
    assert exchange.sent == []
    end(exchange, waiter)
    assert exchange.text == "data: 1\n\ndata: [DONE]\n\n"


def test_the_hold_counts_from_the_first_wait(loop: VirtualLoop) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        request = requests.current.get()
        assert request is not None
        hold = request.hold
        assert hold is not None
        for _ in range(3):
            hold.wait_began()
            await asyncio.sleep(AFTER / 2)
            hold.wait_ended()
        await whole(send)

    exchange = Exchange(loop, app)
    loop.advance(AFTER - 0.1)
    assert exchange.sent == []
    loop.advance(0.2)
    assert exchange.keepalives == 1
    loop.advance(AFTER)
    assert exchange.closed


def test_all_chunks_of_a_completion_have_one_id(loop: VirtualLoop, waiter: Waiter) -> None:
    """openai-go drops what has another id than the first chunk; ids differ by request."""
    theirs = b'data: {"id":"chatcmpl-0123abcd","x":{"id":"chatcmpl-tool-0123abcd"}}\n\n'
    said = b'data: {"id": "chatcmpl-0123abcd", "t": "\\"id\\":\\"chatcmpl-0123abcd\\""}\n\n'
    waiter.answer = lambda send: whole(send, 200, SSE, theirs, said, b"data: [DONE]\n\n")
    two = [Exchange(loop, waiter) for _ in range(2)]
    loop.advance(AFTER + INTERVAL)
    waiter.go.set()
    loop.turn()
    ids = []
    for exchange in two:
        datas = [json.loads(d) for d in re.findall(r"data: (\{.*\})", exchange.text)]
        assert len({d["id"] for d in datas}) == 1
        assert datas[-2]["x"] == {"id": "chatcmpl-tool-0123abcd"}
        assert datas[-1]["t"] == '"id":"chatcmpl-0123abcd"'
        ids.append(datas[0]["id"])
    assert len(set(ids)) == 2
    assert all(re.fullmatch("chatcmpl-[0-9a-f]{8}", one) for one in ids)


def numbered(name: str, number: int, **content: Any) -> bytes:
    content = {"type": name, **content, "sequence_number": number}
    return f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_c17_a_response_begins_once_and_is_numbered_on(
    loop: VirtualLoop, waiter: Waiter, first: int, together: bool
) -> None:
    """Every client takes ``response.created`` first, and none has to skip a comment."""
    said = 'event: response.created\ndata: {"sequence_number": 7}\n\n'

    async def answer(send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        assert request.hold is not None
        response = {"id": request.hold.response_id}
        pieces = [
            numbered("response.created", first, response=response),
            numbered("response.in_progress", first + 1, response=response),
            numbered("response.output_text.delta", first + 2, delta=said),
            numbered("response.completed", first + 3, response=response),
        ]
        await whole(send, 200, SSE, *([b"".join(pieces)] if together else pieces))

    HANDLING.hold_for = Rule(AFTER, lambda _protocol: Keepalive(b"", INTERVAL)).hold_for
    waiter.answer = answer
    exchange = Exchange(loop, waiter, "/v1/responses")
    loop.advance(AFTER + 2 * INTERVAL)
    end(exchange, waiter)
    found = events(exchange.text)
    assert [name for name, _ in found] == [
        "response.created",
        *["response.in_progress"] * 3,
        "response.output_text.delta",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in found] == list(range(1, 7))
    assert len({data["response"]["id"] for _, data in found if "response" in data}) == 1
    assert found[0][1]["response"].items() >= {"model": "b", "status": "in_progress"}.items()
    assert found[4][1]["delta"] == said
    assert ":" not in {line[:1] for line in exchange.text.splitlines()}
    assert exchange.closed


def test_c17_a_response_that_was_not_yet_said_to_begin_is_left_alone(
    loop: VirtualLoop, waiter: Waiter
) -> None:
    HANDLING.hold_for = Rule(AFTER, lambda _protocol: Keepalive(b"", INTERVAL)).hold_for
    created = numbered("response.created", 1, response={"id": "resp_theirs"})
    waiter.answer = lambda send: whole(send, 200, SSE, created)
    exchange = Exchange(loop, waiter, "/v1/responses")
    loop.advance(AFTER - 0.1)
    end(exchange, waiter)
    assert exchange.text.encode() == created


def test_a_slow_reader_gets_its_frames_whole_and_in_order(
    loop: VirtualLoop, waiter: Waiter
) -> None:
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER)
    blocked = exchange.blocked = asyncio.Event()
    loop.advance(3 * INTERVAL)
    assert exchange.keepalives == 1
    waiter.go.set()
    loop.turn()
    assert not exchange.task.done(), "the answer waits for the frame that is being sent"
    blocked.set()
    loop.turn()
    assert exchange.task.done()
    assert exchange.keepalives == 2
    assert exchange.text.endswith('"}\n\ndata: 1\n\ndata: [DONE]\n\n')
    assert exchange.closed
