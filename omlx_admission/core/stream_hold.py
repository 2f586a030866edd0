"""Keep-alives for a stream that waits long for its model.

Many agents give up after 15 to 60 s without a byte; oMLX's own keep-alives begin
only when the engine is there. A streaming request that has waited for some seconds
is sent the head that oMLX sends for every stream and then oMLX's keep-alives, until
the application answers. The application's own head is swallowed then. Any failure
from that moment on is an event: the status line is out.

What such a stream cannot have: the header that says how long it waited, and
``Warning``, in which oMLX tells of a response format that it cannot force.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import error_event
from .cut import PROTOCOLS, Cut
from .refusal import Refusal

if TYPE_CHECKING:
    from .request import Request

logger = logging.getLogger("omlx.admission")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

#: What oMLX's StreamingResponse sends on all of them, in its order.
HEADERS = (
    (b"x-accel-buffering", b"no"),
    (b"cache-control", b"no-cache"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)

#: The id of a completion where a chunk has it; within a text its quotes are escaped.
_ID = re.compile(rb'("id"\s*:\s*")(chatcmpl|cmpl)-(?:keepalive|[0-9a-f]{8,32})"')

#: Bytes kept of an error's body; oMLX's are a few hundred.
_LONGEST_ERROR = 1 << 16

#: The event that begins a response, and the number that each of its events has.
_CREATED = re.compile(rb"event: response\.created\r?\n[^\r\n]*\r?\n\r?\n")
_NUMBER = re.compile(rb'("sequence_number"\s*:\s*)(\d+)')

_TAKEN_OVER = "the answer is no event stream"


@dataclass(frozen=True, slots=True)
class Keepalive:
    """One keep-alive as it goes over the wire, and the seconds between two.

    Without a ``frame`` it is an event of a response that is in progress: numbered, and
    its first one is that of the stream.
    """

    frame: bytes
    interval_s: float


@dataclass(frozen=True, slots=True)
class Rule:
    """When and how streams are kept alive.

    Attributes:
        after_s: seconds in the queue before the first byte.
        keepalive: by protocol; None where nothing may be sent, and so nothing is:
            a head alone helps no client and costs the status of a refusal.
    """

    after_s: float
    keepalive: Callable[[str], Keepalive | None]

    def hold_for(self, request: Request, send: Send) -> StreamHold | None:
        """The hold of a request that may stream; None for all others."""
        protocol = PROTOCOLS.get(request.path)
        if protocol is None or request.method != "POST":
            return None
        return StreamHold(self, protocol, send, request.cut)


class StreamHold:
    """One request that may have to be kept alive.

    Attributes:
        began: the head is out or on its way; the answer goes through :meth:`forward`.
        response_id: what the response that is to come has to be called; empty where
            nothing has been said of it.
    """

    def __init__(self, rule: Rule, protocol: str, send: Send, cut: Cut) -> None:
        self.began = False
        self.response_id = ""
        self._rule = rule
        self._protocol = protocol
        self._send = send
        self._cut = cut
        self._streams = False
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._over: asyncio.Event | None = None
        self._complete = False
        self._model = ""
        self._id = b""
        #: Events said of a response that has yet to come, and what its own numbers lack.
        self._said = self._shift = 0
        self._status = 200
        self._error: bytearray | None = None

    # -- before anything is sent ---------------------------------------------

    def asked(self, content: Any) -> None:
        """What the application made of the body. Nothing else is known of it here."""
        if isinstance(content, dict):
            self._streams = _is_true(content.get("stream"))
            model = content.get("model")
            self._model = model if isinstance(model, str) else ""

    def wait_began(self) -> None:
        """The request queues. The time counts from its first wait."""
        if self.began:
            return
        loop = asyncio.get_running_loop()
        if self._due is None:
            self._due = loop.time() + self._rule.after_s
        self._timer = loop.call_at(self._due, self._begin)

    def wait_ended(self) -> None:
        """The request has left the queue, with an engine or without, or is answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        """Decide, in one step: from here on the head is out."""
        self._timer = None
        if not self._streams:
            return
        try:
            keepalive = self._rule.keepalive(self._protocol)
        except Exception:
            logger.exception("admission: a stream that waits cannot be kept alive")
            return
        if keepalive is None:
            return
        self.began = True
        self._over = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(
            self._keep_alive(self._with_own_id(keepalive), self._over),
            name="admission-keepalive",
        )

    def _with_own_id(self, keepalive: Keepalive) -> Keepalive:
        """A chunk bears the id of its stream, which the handler has yet to make.

        Some accumulators take the first chunk's id for that of all and drop what
        has another one; others keep messages by it. So the stream gets its id here.
        """
        found = _ID.search(keepalive.frame)
        if found is None:
            return keepalive
        self._id = rb'\g<1>%b-%b"' % (found[2], uuid.uuid4().hex[:8].encode())
        return Keepalive(_ID.sub(self._id, keepalive.frame), keepalive.interval_s)

    def _in_progress(self) -> bytes:
        if not self.response_id:
            self.response_id = error_event.new_id()
        self._said += 1
        return error_event.in_progress(self.response_id, self._model, self._said)

    async def _keep_alive(self, keepalive: Keepalive, over: asyncio.Event) -> None:
        """A task of its own: neither the queue nor another request waits for a slow reader."""
        try:
            head = {"type": "http.response.start", "status": 200, "headers": [*HEADERS]}
            await self._send(head)
            while not over.is_set():
                await self._send(_part(keepalive.frame or self._in_progress(), more=True))
                try:
                    await asyncio.wait_for(over.wait(), keepalive.interval_s)
                except TimeoutError:
                    continue
        except Exception as error:  # the client has left; the request ends by that
            logger.debug("admission: a stream could not be kept alive: %r", error)

    # -- the application's answer ---------------------------------------------

    async def run(self, answer: Awaitable[None], refusal: Callable[[], Refusal | None]) -> None:
        """Await the application; whatever it does, a stream that has begun is ended.

        Raises:
            Exception: the application's own, for the server's log.
        """
        try:
            await answer
        except Exception:
            if self.began:
                await self._fail(500, {"message": "Internal server error"}, refusal())
            raise
        else:
            if self.began:
                await self._fail(500, {"message": "No answer was given"}, refusal())
        finally:
            self.wait_ended()
            if self._task is not None:
                self._task.cancel()

    async def forward(self, message: Message, refusal: Refusal | None) -> None:
        """The application's ``send`` once the stream has begun."""
        if self._complete:
            return
        if message["type"] == "http.response.start":
            await self._head(message, refusal)
        elif self._error is not None:
            await self._error_part(message)
        else:
            body = message.get("body", b"")
            if self._id and body:
                message = {**message, "body": _ID.sub(self._id, body)}
            if self._said and body:
                message = {**message, "body": self._continued(body)}
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._complete = True
            await self._send(message)

    def _continued(self, body: bytes) -> bytes:
        """The application's events behind those already sent: begun once, and numbered on."""
        created = _CREATED.search(body)
        if created is not None and (number := _NUMBER.search(created[0])) is not None:
            self._shift = self._said - int(number[2])
            body = body.replace(created[0], b"")
        return _NUMBER.sub(lambda m: b"%b%d" % (m[1], int(m[2]) + self._shift), body)

    async def _head(self, message: Message, refusal: Refusal | None) -> None:
        await self._stop()
        self._status = message["status"]
        kind = next((v for k, v in message.get("headers", ()) if k == b"content-type"), b"")
        if self._status >= 400 and refusal is not None:
            await self._fail(self._status, {}, refusal)
        elif self._status != 200 or not kind.startswith(b"text/event-stream"):
            self._error = bytearray()

    async def _error_part(self, message: Message) -> None:
        assert self._error is not None
        if len(self._error) < _LONGEST_ERROR:
            self._error += message.get("body", b"")
        if not message.get("more_body"):
            await self._fail(self._status, _error_of(self._status, bytes(self._error)), None)

    async def _fail(self, status: int, error: dict[str, Any], refusal: Refusal | None) -> None:
        """End the stream with an error event, once; a whole stream stays as it is."""
        if self._complete:
            return
        await self._stop()
        self._complete = True
        if refusal is not None:
            status, error = refusal.status, json.loads(refusal.body("/v1/"))["error"]
        error = {"message": "", "type": "server_error", "param": None, "code": None, **error}
        events = error_event.frames(
            self._protocol, status, error, self._model, self._cut.events()
        )
        await self._send(_part(events, more=False))

    async def _stop(self) -> None:
        """No keep-alive after this; one that is being sent goes out whole."""
        assert self._over is not None
        assert self._task is not None
        self._over.set()
        await self._task


def _is_true(value: object) -> bool:
    """What oMLX's request models take for true."""
    if isinstance(value, str):
        return value.lower() in {"1", "on", "t", "true", "y", "yes"}
    return value == 1


def _part(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _error_of(status: int, body: bytes) -> dict[str, Any]:
    """What an error response says: the ``error`` object of its body, or what there is."""
    try:
        content = json.loads(body)
    except ValueError:
        content = {}
    error = content.get("error") if isinstance(content, dict) else None
    if status < 400:
        return {"message": _TAKEN_OVER}
    if isinstance(error, dict) and error.get("message"):
        return error
    detail = content.get("detail") if isinstance(content, dict) else None
    return {"message": str(detail or f"{status} {_phrase(status)}")}


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Error"
