"""Whatever fails on a stream that was kept alive ends it in its own form."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from omlx_admission.core import request as requests
from omlx_admission.core.refusal import Refusal
from omlx_admission.core.stream_hold import Keepalive, Rule

from ..virtual import VirtualLoop
from .rig import (
    AFTER,
    BUSY,
    FORMS,
    HANDLING,
    INTERVAL,
    JSON,
    NEVER,
    SSE,
    Exchange,
    Waiter,
    end,
    events,
    whole,
)


def failed(loop: VirtualLoop, waiter: Waiter, path: str) -> dict[str, Any]:
    exchange = Exchange(loop, waiter, path)
    loop.advance(AFTER)
    waiter.go.set()
    loop.turn()
    assert exchange.status == 200
    assert exchange.keepalives == 1
    assert exchange.closed, "never a bare close"
    return FORMS[path](exchange.text)


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("refusal", [BUSY, NEVER])
@pytest.mark.parametrize("made_of_it", [404, 409, 500, 503])
def test_a_refusal_is_an_event(
    loop: VirtualLoop, waiter: Waiter, path: str, refusal: Refusal, made_of_it: int
) -> None:
    waiter.refusal = refusal
    waiter.answer = lambda send: whole(send, made_of_it, JSON, b'{"error": {"message": "no"}}')
    error = failed(loop, waiter, path)
    assert error["message"] == refusal.message
    assert error["code"] == refusal.code
    expected = "overloaded_error" if refusal is BUSY else "api_error"
    assert error["type"] == (expected if path == "/v1/messages" else "server_error")


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("status", "body", "message", "kind"),
    [
        (
            400,
            b'{"error": {"message": "too long", "type": "invalid_request_error"}}',
            "too long",
            "invalid_request_error",
        ),
        (409, b'{"error": {"message": "broken"}}', "broken", "server_error"),
        (404, b'{"detail": "gone"}', "gone", "not_found_error"),
        (502, b"<html>", "502 Bad Gateway", "server_error"),
        (599, b"[]", "599 Error", "server_error"),
        (200, b"{}", "the answer is no event stream", "server_error"),
    ],
)
def test_an_error_of_the_route_is_an_event(
    loop: VirtualLoop,
    waiter: Waiter,
    path: str,
    status: int,
    body: bytes,
    message: str,
    kind: str,
) -> None:
    waiter.answer = lambda send: whole(send, status, JSON, body[:4], body[4:])
    error = failed(loop, waiter, path)
    assert error["message"] == message
    if path == "/v1/messages":
        kind = {"server_error": "api_error"}.get(kind, kind)
    elif kind == "not_found_error":
        kind = "server_error"
    assert error["type"] == kind


@pytest.mark.parametrize("refusal", [BUSY, None])
def test_c17_a_response_that_was_said_to_begin_fails_under_its_id(
    loop: VirtualLoop, waiter: Waiter, refusal: Refusal | None
) -> None:
    HANDLING.hold_for = Rule(AFTER, lambda _protocol: Keepalive(b"", INTERVAL)).hold_for
    waiter.refusal = refusal
    waiter.answer = lambda send: whole(send, 409, JSON, b'{"error": {"message": "no"}}')
    exchange = Exchange(loop, waiter, "/v1/responses")
    loop.advance(AFTER + INTERVAL)
    end(exchange, waiter)
    found = events(exchange.text)
    assert [name for name, _ in found] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert [data["sequence_number"] for _, data in found] == [1, 2, 3, 4]
    assert len({data["response"]["id"] for _, data in found if "response" in data}) == 1
    assert found[2][1]["message"] == (refusal.message if refusal else "no")
    assert exchange.closed


async def raise_at_once(send: Any) -> None:
    raise ZeroDivisionError


async def raise_on_the_way(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": SSE})
    raise ZeroDivisionError


async def say_nothing(send: Any) -> None:
    return


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("answer", [raise_at_once, raise_on_the_way, say_nothing])
def test_an_application_that_breaks_is_an_event(
    loop: VirtualLoop, waiter: Waiter, path: str, answer: Any
) -> None:
    waiter.answer = answer
    error = failed(loop, waiter, path)
    assert error["message"] in ("Internal server error", "No answer was given")


def test_the_servers_log_gets_the_applications_error(loop: VirtualLoop, waiter: Waiter) -> None:
    waiter.answer = raise_at_once
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER)
    waiter.go.set()
    loop.turn()
    assert isinstance(exchange.task.exception(), ZeroDivisionError)


def test_a_stream_that_is_whole_is_not_touched_by_a_late_error(
    loop: VirtualLoop, waiter: Waiter
) -> None:
    async def late(send: Any) -> None:
        await whole(send)
        raise ZeroDivisionError

    waiter.answer = late
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER)
    waiter.go.set()
    loop.turn()
    assert exchange.task.exception() is not None
    assert exchange.closed
    assert exchange.text.endswith("data: [DONE]\n\n")
    assert "error" not in exchange.text


def test_a_request_that_is_cancelled_leaves_no_keepalives(
    loop: VirtualLoop, waiter: Waiter
) -> None:
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER)
    exchange.task.cancel()
    loop.turn()
    assert exchange.task.cancelled()
    loop.advance(10 * INTERVAL)
    assert exchange.keepalives == 1
    assert asyncio.all_tasks(loop) == set()


def test_a_client_that_cannot_be_reached_ends_the_keepalives_quietly(
    loop: VirtualLoop, waiter: Waiter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    exchange = Exchange(loop, waiter)

    async def broken(message: Any) -> None:
        raise OSError("gone")

    exchange._send = broken  # type: ignore[method-assign]
    loop.advance(AFTER + 5 * INTERVAL)
    assert caplog.records == []
    exchange.task.cancel()
    loop.turn()


def test_a_fault_in_asking_for_keepalives_costs_nothing(
    loop: VirtualLoop, waiter: Waiter, caplog: pytest.LogCaptureFixture
) -> None:
    HANDLING.hold_for = Rule(AFTER, lambda protocol: {}[protocol]).hold_for
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER)
    assert exchange.sent == []
    assert caplog.text.count("cannot be kept alive") == 1
    end(exchange, waiter)
    assert exchange.text == "data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("stage", ["it waits", "it answers"])
def test_a_stream_that_is_ended_from_outside_gets_the_event(
    loop: VirtualLoop, waiter: Waiter, path: str, stage: str
) -> None:
    part = b'data: {"part": 1}\n\n'

    async def endless(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*SSE]})
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.Event().wait()

    waiter.answer = endless
    exchange = Exchange(loop, waiter, path)
    loop.advance(AFTER)
    if stage == "it answers":
        waiter.go.set()
        loop.turn()
    (request,) = requests.live
    request.cut.end_with(BUSY)
    loop.turn()
    assert exchange.task.done()
    assert exchange.status == 200
    assert exchange.closed
    assert (part.decode() in exchange.text) is (stage == "it answers")
    error = FORMS[path](exchange.text.replace(part.decode(), ""))
    assert error["message"] == BUSY.message
