"""The routes: status, metrics, the page and its live updates, behind the server's own check.

A reading costs a fraction of a millisecond of the event loop that serves all
requests, so those of a tenth of a second share one (metrics: of a second, below
any scrape interval).
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from omlx_admission.observation.observe import Observer
from omlx_admission.observation.pool_snapshot import Facts
from omlx_admission.surfaces import metrics, page, status

#: How long one reading is shared, in seconds.
STATUS_S = 0.1
METRICS_S = 1.0

#: Live updates: how often a change is looked for, and sent without one (seconds);
#: viewers at once; seconds after which a viewer has to come again.
LOOK_S = 0.25
REPEAT_S = 1.0
MOST_VIEWERS = 32
_VIEW_S = 3600.0

_EVENTS = "text/event-stream"
_NO_STORE = {"Cache-Control": "no-store"}

Check = Callable[[Request], Awaitable[None]]
Read = Callable[[], Facts]


class Shared:
    """Makes bytes at most once in ``seconds`` per key."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._made: dict[Any, tuple[float, Any]] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gave for ``key`` a moment ago, or gives now."""
        now = self._clock()
        made = self._made.get(key)
        if made is None or now - made[0] >= self._seconds:
            made = self._made[key] = (now, make())
        return made[1]


class Surfaces:
    """The endpoints; they share the readings."""

    def __init__(self, check: Check, read: Read, observer: Observer) -> None:
        self._check = check
        self._read = read
        self._observer = observer
        self._status = Shared(STATUS_S)
        self._metrics = Shared(METRICS_S)
        self._viewers = 0

    async def status(self, request: Request) -> Response:
        """``GET /admission/status``; ``?timeline=1`` adds the last ten minutes."""
        await self._check(request)
        timeline = request.query_params.get("timeline") in ("1", "true")
        body = self._status.get(timeline, lambda: self._document(timeline))
        return Response(body, media_type="application/json", headers=_NO_STORE)

    async def schema(self, request: Request) -> Response:
        """``GET /admission/status/schema``."""
        await self._check(request)
        return Response(status.schema_text(), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """``GET /admission/metrics``: the text format, OpenMetrics where it is asked for."""
        await self._check(request)
        accept = request.headers.get("accept", "")
        try:
            # On a thread: the first call imports prometheus_client.
            render, kind = await asyncio.to_thread(metrics.format_for, accept)
        except ImportError:
            text = "prometheus-client is not installed in this Python\n"
            return Response(text, 501, media_type="text/plain")
        body = self._metrics.get(kind, lambda: render(self._read(), self._observer))
        return Response(body, headers={**_NO_STORE, "Content-Type": kind})

    async def page(self, request: Request) -> Response:
        """``GET /admission``. A browser without a key gets its form, with the same 401.

        The page itself holds no data: it fetches status with the key it was given.
        """
        try:
            await self._check(request)
        except HTTPException as error:
            if error.status_code != 401 or "text/html" not in request.headers.get("accept", ""):
                raise
            return Response(page.content(), 401, headers=page.headers())
        return Response(page.content(), headers=page.headers())

    async def events(self, request: Request) -> Response:
        """``GET /admission/events``: server-sent events, each a whole status document."""
        await self._check(request)
        if request.method == "HEAD":
            head = Response(media_type=_EVENTS, headers=_NO_STORE)
            del head.headers["content-length"]
            return head
        if self._viewers >= MOST_VIEWERS:
            return JSONResponse(
                {"detail": "too many viewers"}, 503, headers={"Retry-After": "10"}
            )
        return StreamingResponse(
            self._stream(),
            media_type=_EVENTS,
            headers={**_NO_STORE, "X-Accel-Buffering": "no"},
        )

    async def _stream(self) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            yield b"retry: 1000\n\n"
            until = time.monotonic() + _VIEW_S
            seen, sent = -1, 0.0
            while (now := time.monotonic()) < until and not shutting_down():
                if self._observer.version != seen or now - sent >= REPEAT_S:
                    seen, sent = self._observer.version, now
                    body = self._status.get(True, lambda: self._document(True))
                    yield b"event: status\ndata: " + body + b"\n\n"
                await asyncio.sleep(LOOK_S)
        finally:
            self._viewers -= 1

    def _document(self, timeline: bool) -> bytes:
        document = status.build(self._read(), self._observer, timeline=timeline)
        return json.dumps(document, separators=(",", ":")).encode()


def shutting_down() -> bool:
    """Whether the web server was told to end.

    It waits for open responses before it tells the application so; an endless one
    has to ask the server itself, which is found behind the signal that ends it.
    """
    for name in (signal.SIGTERM, signal.SIGINT):
        server = getattr(signal.getsignal(name), "__self__", None)
        if getattr(server, "should_exit", False) is True:
            return True
    return False


def make(check: Check, read: Read, observer: Observer) -> list[Route]:
    """The routes. ``check`` raises for a caller who may not; ``read`` takes a reading."""
    # Read now, and not when a server that serves is asked for the first time.
    page.headers()
    status.schema_text()
    surfaces = Surfaces(check, read, observer)
    return [
        Route("/admission", surfaces.page, methods=["GET"]),
        Route("/admission/status", surfaces.status, methods=["GET"]),
        Route("/admission/status/schema", surfaces.schema, methods=["GET"]),
        Route("/admission/metrics", surfaces.metrics, methods=["GET"]),
        Route("/admission/events", surfaces.events, methods=["GET"]),
    ]
