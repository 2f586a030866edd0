"""Exchanges, applications and the forms of errors for the tests of held streams."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from omlx_admission.core import request as requests
from omlx_admission.core.answer import AnswerMiddleware
from omlx_admission.core.refusal import Refusal

from ..virtual import VirtualLoop

#: What is switched on.
HANDLING = requests.Handling()

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
        self.task = loop.create_task(self._run(AnswerMiddleware(app, HANDLING), scope))
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


async def read(receive: Any) -> None:
    """Read the body and tell what it says, as the hook does for oMLX's framework."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body")
    request = requests.current.get()
    if request is not None and request.hold is not None:
        request.hold.asked(json.loads(body))


class Waiter:
    """An application that reads its body, waits as in the queue, and answers as told."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.go = asyncio.Event()
        self.answer: Callable[[Any], Awaitable[None]] = lambda send: whole(send)
        self.refusal: Refusal | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
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


def end(exchange: Exchange, waiter: Waiter) -> None:
    waiter.go.set()
    exchange.loop.turn()
    assert exchange.task.done()


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
