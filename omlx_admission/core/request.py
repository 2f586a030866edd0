"""The HTTP request behind a call to the pool: has its client left, was it refused?

oMLX passes nothing of the request to its pool, polls no disconnect before the
engine is there, and maps one refusal to 404, 409, 500 or 507 depending on the
route. A pure ASGI middleware closes all three at one place: it keeps the
request in a context variable, lets a waiting call watch for the client's
leaving, and replaces an error response by the refusal that caused it.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .refusal import Refusal

logger = logging.getLogger("omlx.admission")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Every HTTP request that is handled now.
live: set[Request] = set()

#: Every socket that is open now.
sockets: set[Request] = set()

#: Requests that send something which does not leave, because their clients do not read,
#: and since when (monotonic). What is sent at once is never seen in it.
blocked: dict[Request, float] = {}

current: contextvars.ContextVar[Request | None] = contextvars.ContextVar(
    "admission_request", default=None
)


def active() -> Request | None:
    """The request that is handled now; None in a job that outlives the one it began in."""
    request = current.get()
    return None if request is None or request.ended else request


#: Header that says how many milliseconds a served request waited for its model.
WAIT_HEADER = b"x-omlx-admission-wait-ms"

#: What a script of another origin may read of an answer, where the answer has it.
_FOR_SCRIPTS = (b"retry-after", b"x-should-retry", WAIT_HEADER)
_EXPOSE = (b"access-control-expose-headers", b", ".join(_FOR_SCRIPTS))

#: The client's own name of a request, taken over where it is short and harmless.
_ID_HEADER = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_numbers = itertools.count(1)

#: How much of a request a watch reads ahead, in bytes. A message counts as a kilobyte
#: more than it brings. Beyond that the server's own flow control has to hold the client.
_READ_AHEAD = 1 << 16
_MESSAGE = 1 << 10

#: Header by which a request may shorten its wait budget (seconds).
MAX_WAIT_HEADER = b"x-omlx-max-wait"


class Request:
    """One HTTP or WebSocket request, for as long as the application handles it.

    ``handed``: by model, what was handed out to it.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        #: As the routes of the application know it, whatever it is mounted below.
        self.path = _route_path(scope)
        self.method: str = scope.get("method", "")
        self.query: bytes = scope.get("query_string", b"")
        #: The task that handles it. What it starts in other tasks may outlive it.
        self.task: asyncio.Task[Any] | None = None
        self.max_wait, self.header_problem = _max_wait(scope)
        self.refusal: Refusal | None = None
        #: The refusal went out, and nothing of what the application answers does.
        self.replaced = False
        self.ended = False
        #: How its answer is ended from outside, and how its stream is kept alive while it
        #: waits, where its middleware can do that.
        self.cut: Any = None
        self.hold: Any = None
        self.handed: dict[str, Any] = {}
        self.waited_s = 0.0
        self._headers = scope.get("headers", ())
        self._id: str | None = None
        self._receive = receive
        self._buffer: deque[Message] = deque()
        self._at_end: list[Callable[[], None]] = []

    @property
    def id(self) -> str:
        """The client's ``X-Request-ID``, or a number given here; made at first use."""
        if self._id is None:
            given = next((v for name, v in self._headers if name == _ID_HEADER), b"")
            known = _ID.fullmatch(given) is not None
            self._id = given.decode("ascii") if known else f"adm-{next(_numbers)}"
        return self._id

    @property
    def explicit_load(self) -> bool:
        """Whether the route exists to load a model, so that fail-fast makes no sense."""
        return self.path.endswith("/load")

    @property
    def only_counts(self) -> bool:
        """Whether the route asks for a model to count tokens, which its client can guess."""
        return self.path.endswith("/count_tokens")

    def at_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the application is done with this request."""
        self._at_end.append(action)

    def end(self) -> None:
        """Run what was registered for the end, once; a failing action stops no other."""
        self.ended = True
        while self._at_end:
            action = self._at_end.pop()
            try:
                action()
            except Exception:
                logger.exception("admission: clean-up at the end of a request failed")

    def noting(self, send: Send) -> Send:
        """``send``, noting while it waits for the client to read."""

        async def noted(message: Message) -> None:
            blocked[self] = time.monotonic()
            try:
                await send(message)
            finally:
                blocked.pop(self, None)

        return noted

    async def receive(self) -> Message:
        """The application's ``receive``: first what a watch has read ahead."""
        return self._buffer.popleft() if self._buffer else await self._receive()

    async def gone(self) -> bool:
        """Return True when the client has left; what else arrives is kept for the application.

        False where the client sends more than may be kept: whether it has left is behind
        that, and the wait goes on unwatched. Cancelling this loses no message: an ASGI
        server builds the message only after its own wait.
        """
        while sum(map(_size, self._buffer)) < _READ_AHEAD:
            message = await self._receive()
            self._buffer.append(message)
            if message["type"] in ("http.disconnect", "websocket.disconnect"):
                return True
        return False


def _route_path(scope: Scope) -> str:
    """The path without what the application is mounted below, where it bears that."""
    path: str = scope.get("path", "")
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _size(message: Message) -> int:
    return _MESSAGE + sum(len(message.get(part) or b"") for part in ("body", "bytes", "text"))


def _max_wait(scope: Scope) -> tuple[float | None, str | None]:
    for name, value in scope.get("headers", ()):
        if name == MAX_WAIT_HEADER:
            text = value.decode("latin-1")
            try:
                seconds = float(text)
            except ValueError:
                seconds = math.nan
            if math.isfinite(seconds) and seconds >= 0:
                return seconds, None
            return None, f"X-OMLX-Max-Wait: {text!r} is not a number of seconds, 0 or more"
    return None, None


class Handling:
    """What is done for all requests beyond the plain: nothing, until it is switched on.

    Attributes:
        counts_waits: a request that did not wait is told so, so that 0 means "resident"
            and not "unknown".
        hold_for: makes what keeps a stream alive while it waits, from the request and
            its ``send``; None for a request that is no stream.
    """

    __slots__ = ("counts_waits", "hold_for")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Everything off."""
        self.counts_waits = False
        self.hold_for: Callable[[Request, Send], Any] | None = None


class RequestMiddleware:
    """Pure ASGI middleware; see the module's text."""

    def __init__(self, app: App, handling: Handling | None = None) -> None:
        self.app = app
        self.handling = Handling() if handling is None else handling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; anything but HTTP and WebSocket passes untouched."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        request.task = asyncio.current_task()
        send = request.noting(send)
        token = current.set(request)
        try:
            if scope["type"] == "http":
                live.add(request)
                await self._http(request, scope, send)
            else:
                sockets.add(request)
                await self.app(scope, request.receive, send)
        finally:
            current.reset(token)
            live.discard(request)
            sockets.discard(request)
            request.end()

    async def _http(self, request: Request, scope: Scope, send: Send) -> None:
        if request.header_problem is not None:
            problem = Refusal(400, "invalid_max_wait", request.header_problem)
            await respond(problem, request.path, scope, send)
            return
        await self.answer(request, scope, send)

    async def answer(self, request: Request, scope: Scope, send: Send) -> None:
        """Let the application answer."""
        await self.app(scope, request.receive, self.mapping(request, scope, send))

    def mapping(self, request: Request, scope: Scope, send: Send) -> Send:
        """``send`` that replaces an error by the refusal that caused it."""

        async def send_or_replace(message: Message) -> None:
            if request.replaced:
                return
            if message["type"] == "http.response.start":
                refusal = request.refusal
                if refusal is not None and message["status"] >= 400:
                    request.replaced = True
                    await respond(refusal, request.path, scope, send)
                    return
                if message["status"] < 400:
                    _tell_wait(request, self.handling.counts_waits, message)
                _expose(scope, message)
            await send(message)

        return send_or_replace


def _tell_wait(request: Request, counts: bool, message: Message) -> None:
    """Say on a served request how long it waited: whole milliseconds, 0 when resident.

    Only the queue knows. A route that needs no engine says nothing.
    """
    served = request.method == "POST" and request.path.startswith("/v1/")
    if request.waited_s > 0 or (served and counts):
        waited = str(round(request.waited_s * 1000)).encode()
        message["headers"] = [*message.get("headers", ()), (WAIT_HEADER, waited)]


def _expose(scope: Scope, message: Message) -> None:
    """Let a script in a browser read what an answer says of waits and retries."""
    names = {name.lower() for name, _ in message.get("headers", ())}
    if names.isdisjoint(_FOR_SCRIPTS) or b"origin" not in dict(scope.get("headers", ())):
        return
    message["headers"] = [*message["headers"], _EXPOSE]


async def respond(refusal: Refusal, path: str, scope: Scope, send: Send) -> None:
    """Send a refusal as the whole answer."""
    body = refusal.body(path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *refusal.headers(),
    ]
    head = {"type": "http.response.start", "status": refusal.status, "headers": headers}
    _expose(scope, head)
    await send(head)
    await send({"type": "http.response.body", "body": body})


class Watch:
    """Calls back once when a request's client leaves; a no-op without a request."""

    def __init__(self, request: Request | None, callback: Callable[[], None]) -> None:
        self._task: asyncio.Task[bool] | None = None
        if request is not None and not request.ended:
            self._task = asyncio.get_running_loop().create_task(request.gone())
            self._task.add_done_callback(lambda task: self._done(task, callback))

    @staticmethod
    def _done(task: asyncio.Task[bool], callback: Callable[[], None]) -> None:
        if task.cancelled():
            return
        if task.exception() is not None:
            # The server's own receive failed: the request ends by itself.
            logger.debug("admission: watching for a disconnect failed: %r", task.exception())
            return
        if task.result():
            callback()

    def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
