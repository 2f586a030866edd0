"""A request that is ended from outside: its client gets a whole error (C20, C21)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from omlx_admission.core import request as requests
from omlx_admission.core.answer import AnswerMiddleware
from omlx_admission.core.refusal import Refusal

from . import test_request


class Exchange(test_request.Exchange):
    """One whose answer can be ended from outside."""

    wrap = AnswerMiddleware


GONE = Refusal(503, "model_unloading", "Model 'a' was unloaded by hand", 1)

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]

#: By route: what a stream of it begins with.
STREAMS = {
    "/v1/chat/completions": [b'data: {"choices": [{"delta": {"content": "so"}}]}\n\n'],
    "/v1/completions": [b'data: {"choices": [{"text": "so"}]}\n\n'],
    "/v1/messages": [b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'],
    "/v1/responses": [
        b'event: response.created\ndata: {"response": {"id": "resp_1", "status": "queued"},'
        b' "sequence_number": 0}\n\n',
        b'event: response.output_text.delta\ndata: {"sequence_number": 7}\n\n',
    ],
}

Parts = list[bytes]


class Ended:
    """One exchange whose handler has sent ``parts`` when it is ended."""

    def __init__(self, path: str, headers: Any = None, parts: Parts = []) -> None:  # noqa: B006
        self.exchange = Exchange(self._app, path)
        self._headers, self._parts = headers, parts
        self.waits = asyncio.Event()
        self.on_cancel: Callable[[Any], Awaitable[None]] | None = None
        self.cleaned_up = False

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if self._headers is not None:
            head = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await send(head)
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.on_cancel is None:
                raise
            await self.on_cancel(send)
        finally:
            self.cleaned_up = True

    async def run(self) -> Ended:
        task = asyncio.create_task(self.exchange.run())
        await self.waits.wait()
        (request,) = requests.live
        request.cut.end_with(GONE)
        request.cut.end_with(GONE)
        await task
        assert requests.live == set()
        assert task.cancelling() == 0
        assert self.cleaned_up
        assert not self.exchange.sent[-1].get("more_body", False)
        return self

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.exchange.sent[1:]).decode()


def ended(path: str, headers: Any = None, parts: Parts = []) -> Ended:  # noqa: B006
    async def run() -> Ended:
        return await Ended(path, headers, parts).run()

    return asyncio.run(run())


@pytest.mark.parametrize("route", STREAMS)
def test_before_the_first_byte_it_is_a_refusal(route: str) -> None:
    got = ended(route)
    assert got.exchange.status == 503
    assert got.exchange.headers[b"retry-after"] == b"1"
    assert got.exchange.body == json.loads(GONE.body(route))


@pytest.mark.parametrize("blanks", [[], [b" "], [b" ", b" "]])
@pytest.mark.parametrize("route", STREAMS)
def test_behind_the_blanks_of_a_plain_answer_it_is_a_whole_body(
    route: str, blanks: Parts
) -> None:
    got = ended(route, JSON, blanks)
    assert got.exchange.status == 200
    assert json.loads(got.text) == json.loads(GONE.body(route))


def test_a_plain_answer_that_is_out_stays_what_it_is() -> None:
    assert json.loads(ended("/v1/chat/completions", JSON, [b" ", b'{"id": 1}']).text) == {
        "id": 1
    }


@pytest.mark.parametrize("route", STREAMS)
def test_a_stream_ends_with_the_error_of_its_route(route: str) -> None:
    got = ended(route, SSE, [b": keep-alive\n\n", *STREAMS[route]])
    events = [e for e in got.text.removeprefix(": keep-alive\n\n").split("\n\n") if e]
    new = events[len(STREAMS[route]) :]
    if route == "/v1/messages":
        (error,) = new
        assert error.startswith("event: error\ndata: ")
    elif route == "/v1/responses":
        error, failed = new
        assert error.startswith("event: error\ndata: ")
        assert failed.startswith("event: response.failed\ndata: ")
        last = json.loads(failed.partition("data: ")[2])
        assert last["response"]["id"] == "resp_1"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "model_unloading"
        assert last["sequence_number"] == 9
        assert '"sequence_number": 8' in error
    else:
        error, done = new
        assert done == "data: [DONE]"
    content = json.loads(error.partition("data: ")[2])
    assert content["error"]["code"] == "model_unloading"
    assert content["error"]["message"] == GONE.message


@pytest.mark.parametrize(
    "last", ["data: [DONE]\n\n", 'event: message_stop\ndata: {"type": "message_stop"}\n\n']
)
def test_a_stream_that_has_said_its_end_gets_no_other(last: str) -> None:
    got = ended("/v1/chat/completions", SSE, [b"data: {}\n\n", last.encode()])
    assert got.text == f"data: {{}}\n\n{last}"


def test_half_of_a_file_is_seen_to_be_half() -> None:
    with pytest.raises(ConnectionAbortedError, match="unloaded by hand"):
        ended("/v1/audio/speech", [(b"content-type", b"audio/wav")], [b"RIFF"])


def test_an_answer_of_known_length_needs_no_engine_any_more() -> None:
    async def test() -> None:
        begun, release = asyncio.Event(), asyncio.Event()
        body = b'{"id": 1}'

        async def app(scope: Any, receive: Any, send: Any) -> None:
            headers = [*JSON, (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            begun.set()
            await release.wait()
            await send({"type": "http.response.body", "body": body})

        exchange = Exchange(app, "/v1/embeddings")
        task = asyncio.create_task(exchange.run())
        await begun.wait()
        (request,) = requests.live
        request.cut.end_with(GONE)
        release.set()
        await task
        assert exchange.body == {"id": 1}

    asyncio.run(test())


@pytest.mark.parametrize("does", ["raises", "answers", "swallows it", "a group of errors"])
def test_what_the_handler_makes_of_its_end_does_not_count(does: str) -> None:
    async def test() -> None:
        case = Ended("/v1/chat/completions", SSE, STREAMS["/v1/chat/completions"])

        async def on_cancel(send: Any) -> None:
            if does == "raises":
                raise ZeroDivisionError
            if does == "a group of errors":
                raise BaseExceptionGroup("", [asyncio.CancelledError(), ZeroDivisionError()])
            if does == "answers":
                text = b"data: [Error: no]\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": text})

        case.on_cancel = on_cancel
        await case.run()
        assert "[Error" not in case.text
        assert case.text.endswith("data: [DONE]\n\n")
        assert '"model_unloading"' in case.text

    asyncio.run(test())


def test_a_handler_that_ends_before_the_cancel_reaches_it() -> None:
    """The cancel must not strike what comes behind the handler."""

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            (request,) = requests.live
            request.cut.end_with(GONE)

        exchange = Exchange(app, "/v1/messages")
        await exchange.run()
        assert exchange.status == 503
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(test())


def test_c9_the_handler_of_a_client_that_does_not_read_is_free_at_once() -> None:
    """Only the end of the answer waits for the client, and holds nothing of the model."""

    async def test() -> None:
        reads, free = asyncio.Event(), asyncio.Event()
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": SSE})
                await send({"type": "http.response.body", "body": b"data: 1\n\n"})
            finally:
                free.set()

        async def send(message: Any) -> None:
            if sent:
                await reads.wait()
            sent.append(message)

        scope = {"type": "http", "path": "/v1/chat/completions", "headers": []}
        middleware = AnswerMiddleware(app)
        task = asyncio.create_task(middleware(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
        while not requests.live or not sent:  # noqa: ASYNC110 - until it is stuck
            await asyncio.sleep(0)
        (request,) = requests.live
        request.cut.end_with(GONE)
        await free.wait()
        assert not task.done()
        reads.set()
        await task
        assert b"data: 1" not in sent[1]["body"]
        assert b'"model_unloading"' in sent[1]["body"]
        assert sent[1]["body"].endswith(b"data: [DONE]\n\n")

    asyncio.run(test())


def test_a_cancel_of_somebody_else_is_passed_on() -> None:
    async def test() -> None:
        case = Ended("/v1/chat/completions")
        task = asyncio.create_task(case.exchange.run())
        await case.waits.wait()
        (request,) = requests.live
        request.cut.end_with(GONE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert requests.live == set()

    asyncio.run(test())
