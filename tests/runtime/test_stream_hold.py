"""A stream that waits is kept alive, and whatever follows ends it in its own form."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from omlx_admission.runtime import request as requests
from omlx_admission.runtime import stream_hold
from omlx_admission.runtime.admission import Admission
from omlx_admission.runtime.refusal import Refusal
from omlx_admission.runtime.stream_hold import Keepalive, Rule
from omlx_admission.settings import Settings

from .fake_pool import FakePool, Model
from .virtual import VirtualLoop

AFTER, INTERVAL = 10.0, 4.0
CHUNK = 'data: {"id":"chatcmpl-keepalive","model":"keepalive"}\n\n'
FRAMES = {
    "openai_chat": CHUNK,
    "openai_completion": CHUNK.replace("chatcmpl", "cmpl"),
    "anthropic": "event: ping\ndata: {}\n\n",
    "openai_responses": ": keep-alive\n\n",
}
BUSY = Refusal(503, "model_busy", "'a' is in use", 7)
NEVER = Refusal(507, "model_too_large", "'b' is too large")
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]

App = Callable[..., Awaitable[None]]


@pytest.fixture(autouse=True)
def _rule() -> Iterator[None]:
    stream_hold.rule = Rule(AFTER, lambda p: Keepalive(FRAMES[p].encode(), INTERVAL))
    yield
    stream_hold.rule = None


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.turn()
    asyncio.set_event_loop(None)
    loop.close()


class Exchange:
    """One request behind the middleware, on the virtual clock."""

    def __init__(
        self,
        loop: VirtualLoop,
        app: App,
        path: str = "/v1/chat/completions",
        body: Any = None,
    ) -> None:
        content = json.dumps({"model": "b", "stream": True} if body is None else body).encode()
        self.loop = loop
        self.sent: list[Any] = []
        self.blocked: asyncio.Event | None = None
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        for piece, more in ((content[:9], True), (content[9:], False)):
            self.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        self.task = loop.create_task(self._run(requests.RequestMiddleware(app), scope))
        loop.turn()

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        await app(scope, self.incoming.get, self._send)

    async def _send(self, message: Any) -> None:
        blocked, self.blocked = self.blocked, None
        if blocked is not None:
            await blocked.wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        starts = [m for m in self.sent if m["type"] == "http.response.start"]
        assert self.sent[:1] == starts, "one head, and first"
        status: int = starts[0]["status"]
        return status

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent).decode()

    @property
    def closed(self) -> bool:
        """The last frame was said to be the last, and no other was."""
        more = [m.get("more_body", False) for m in self.sent[1:]]
        return bool(more) and more == [True] * (len(more) - 1) + [False]

    @property
    def keepalives(self) -> int:
        return len(re.findall(r"keepalive\"}|event: ping|: keep-alive", self.text))


class Waiter:
    """An application that reads its body, waits as in the queue, and answers as told."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.go = asyncio.Event()
        self.answer: Callable[[Any], Awaitable[None]] = lambda send: whole(send)
        self.refusal: Refusal | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        request = requests.current.get()
        assert request is not None
        hold = request.hold
        if hold is not None:
            hold.wait_began()
        try:
            await self.go.wait()
        finally:
            if hold is not None:
                hold.wait_ended()
        request.refusal = self.refusal
        await self.answer(send)


async def whole(send: Any, status: int = 200, headers: Any = SSE, *pieces: bytes) -> None:
    """A whole answer in pieces, as Starlette sends it: an empty frame is the last."""
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    for piece in pieces or (b"data: 1\n\n", b"data: [DONE]\n\n"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
def waiter(loop: VirtualLoop) -> Waiter:
    return Waiter(loop)


def end(exchange: Exchange, waiter: Waiter) -> None:
    waiter.go.set()
    exchange.loop.turn()
    assert exchange.task.done()


# -- when ---------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "b"}),
        ("/v1/chat/completions", {"model": "b", "stream": False}),
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
    stream_hold.rule = rule
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


def test_an_answer_that_has_begun_needs_its_body_no_more(
    loop: VirtualLoop, waiter: Waiter
) -> None:
    held: list[Any] = []

    async def slow(send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        assert request.hold is not None
        held.append(request.hold._body)
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        held.append(request.hold._body)

    waiter.answer = slow
    exchange = Exchange(loop, waiter)
    end(exchange, waiter)
    assert held[0] is not None
    assert held[1] is None


def test_the_hold_counts_from_the_first_wait(loop: VirtualLoop) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
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


# -- the stream ---------------------------------------------------------------


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


# -- failures -----------------------------------------------------------------


def events(text: str) -> list[tuple[str, Any]]:
    """Name and data of every event but keep-alives."""
    found = []
    for block in text.split("\n\n"):
        name = re.search("^event: (.*)$", block, re.MULTILINE)
        data = re.search("^data: (.*)$", block, re.MULTILINE)
        if data is None or "keepalive" in block or (name and name[1] == "ping"):
            continue
        value = data[1] if data[1] == "[DONE]" else json.loads(data[1])
        found.append((name[1] if name else "", value))
    return found


def openai(text: str) -> dict[str, Any]:
    (_, failed), last = events(text)
    assert last == ("", "[DONE]")
    error: dict[str, Any] = failed["error"]
    return error


def anthropic(text: str) -> dict[str, Any]:
    ((name, failed),) = events(text)
    assert (name, failed["type"]) == ("error", "error")
    error: dict[str, Any] = failed["error"]
    return error


def responses(text: str) -> dict[str, Any]:
    (first, failed), (last, ended) = events(text)
    assert (first, failed["type"]) == ("error", "error")
    assert (last, ended["type"]) == ("response.failed", "response.failed")
    assert ended["response"]["status"] == "failed"
    assert ended["response"]["model"] == "b"
    assert ended["response"]["error"]["message"] == failed["message"]
    error: dict[str, Any] = failed["error"]
    return error


FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": openai,
    "/v1/completions": openai,
    "/v1/messages": anthropic,
    "/v1/responses": responses,
}


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
    stream_hold.rule = Rule(AFTER, lambda protocol: {}[protocol])
    exchange = Exchange(loop, waiter)
    loop.advance(AFTER)
    assert exchange.sent == []
    assert caplog.text.count("cannot be kept alive") == 1
    end(exchange, waiter)
    assert exchange.text == "data: 1\n\ndata: [DONE]\n\n"


# -- with the queue -----------------------------------------------------------


class Queue:
    """The application of a route whose model 'b' waits for 'a', which is busy."""

    def __init__(self, loop: VirtualLoop, **settings: Any) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.pool = FakePool({"a": Model(6), "b": Model(6)}, ceiling=10)
        self.pool.models["a"].engine = object()
        self.pool.models["a"].leases = 1
        self.admission = Admission(self.pool, Settings(**settings), clock=loop.time)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        try:
            await self.admission.acquire(self.pool.ask("b"))
        except Exception:
            await whole(send, 500, JSON, b"{}")
        else:
            await self.go_on.wait()
            await whole(send)


def test_a_waiter_that_is_served_in_time_is_left_alone(loop: VirtualLoop) -> None:
    queue = Queue(loop)
    queue.go_on.clear()
    exchange = Exchange(loop, queue)
    loop.advance(AFTER - 1)
    queue.pool.models["a"].leases = 0
    loop.call_soon(queue.admission.released, "a")
    loop.turn()
    queue.pool.end_load("b")
    loop.turn()
    loop.advance(10 * AFTER)
    assert exchange.sent == []
    queue.go_on.set()
    loop.turn()
    assert exchange.text == "data: 1\n\ndata: [DONE]\n\n"


def test_a_waiter_of_the_queue_is_kept_alive_and_served(loop: VirtualLoop) -> None:
    queue = Queue(loop)
    exchange = Exchange(loop, queue)
    loop.advance(AFTER + INTERVAL)
    assert exchange.keepalives == 2
    queue.pool.models["a"].leases = 0
    loop.call_soon(queue.admission.released, "a")
    loop.turn()
    queue.pool.end_load("b")
    loop.turn()
    assert exchange.closed
    assert exchange.text.endswith("data: [DONE]\n\n")
    assert queue.admission.policy.waiting == 0


def test_the_budget_of_a_waiter_ends_in_an_event(loop: VirtualLoop) -> None:
    exchange = Exchange(loop, Queue(loop, max_wait_s=AFTER + INTERVAL / 2))
    loop.advance(AFTER)
    assert exchange.keepalives == 1
    loop.advance(INTERVAL)
    assert openai(exchange.text)["code"] == "model_swap_timeout"
    assert exchange.closed


def test_a_budget_below_the_hold_ends_in_a_status(loop: VirtualLoop) -> None:
    exchange = Exchange(loop, Queue(loop, max_wait_s=AFTER - 1))
    loop.advance(AFTER * 3)
    assert exchange.status == 503
    assert "retry-after" in {k.decode() for k, _ in exchange.sent[0]["headers"]}


def test_a_client_that_leaves_while_it_is_kept_alive_leaves_nothing(
    loop: VirtualLoop,
) -> None:
    queue = Queue(loop)
    exchange = Exchange(loop, queue)
    loop.advance(AFTER + INTERVAL)
    assert queue.admission.policy.waiting == 1
    exchange.incoming.put_nowait({"type": "http.disconnect"})
    loop.turn()
    assert queue.admission.policy.waiting == 0
    assert exchange.task.done()
    assert asyncio.all_tasks(loop) == set()
