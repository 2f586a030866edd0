"""The outcomes: for each one a moment in a server's life, and every route tried in it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.routes_matrix.routes import COUNT, KEY, ROUTES, Reply, Route, ask
from omlx_admission.surfaces.demo.client import Client
from standin.server import Server

#: Tokens of ``busy``, a few dozen a second: a stream that outlasts any moment.
_LONG = 5000

#: A wait budget that ends well before that stream, in seconds.
_SHORT_S = 1.0

Replies = dict[str, Reply]
Moment = Callable[[Server], Awaitable[Replies]]


@dataclass(frozen=True)
class Outcome:
    """One outcome.

    Attributes:
        name: what becomes of the request.
        text: how the moment is made.
        status: what a patched server has to answer.
        code: machine-readable reason that a patched server has to give; None for none.
        moment: tries every route.
        but: kinds of routes, or routes, that cannot meet this outcome.
        waits: whether the model is not loaded, so that it is refused to a mere count.
        environment: variables of the server that it needs.
    """

    name: str
    text: str
    status: int
    code: str | None
    moment: Moment
    but: Sequence[str] = ()
    environment: tuple[tuple[str, str], ...] = ()
    waits: bool = False

    @property
    def routes(self) -> list[Route]:
        """The routes that can meet it."""
        return [d for d in ROUTES if d.kind not in self.but and d.name not in self.but]


async def _all(server: Server, suffix: str = "", **options: Any) -> Replies:
    """Every route for its own kind of model, all at once."""
    calls = [ask(server.url, route, route.kind + suffix, **options) for route in ROUTES]
    return dict(zip((d.name for d in ROUTES), await asyncio.gather(*calls), strict=True))


@asynccontextmanager
async def _busy(server: Server) -> Any:
    """``busy`` streams for as long as the block lasts, and holds the room."""
    client, key = Client(server.url), {"Authorization": f"Bearer {KEY}"}
    await client.chat("busy", tokens=2, headers=key)
    stream = asyncio.create_task(client.chat("busy", tokens=_LONG, stream=True, headers=key))
    await asyncio.sleep(0.5)
    try:
        yield stream
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def served(server: Server) -> Replies:
    """One after the other on an idle server: whoever is loaded is idle and leaves."""
    return {route.name: await ask(server.url, route, route.kind) for route in ROUTES}


async def waited(server: Server) -> Replies:
    """``busy`` streams for some seconds more; each route's model needs its room."""
    async with _busy(server) as stream:
        answers = asyncio.create_task(_all(server))
        await asyncio.sleep(3.0)
        stream.cancel()
        return await answers


async def expired(server: Server) -> Replies:
    """The same, and the request allows a wait of a second (``X-OMLX-Max-Wait: 1``)."""
    async with _busy(server):
        return await _all(server, max_wait=_SHORT_S)


async def queue_full(server: Server) -> Replies:
    """The same, and the one place in the queue is taken."""
    async with _busy(server):
        waiting = asyncio.create_task(ask(server.url, ROUTES[0], "text"))
        await asyncio.sleep(0.3)
        try:
            return await _all(server)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def never_fits(server: Server) -> Replies:
    """A model larger than the ceiling."""
    return await _all(server, "-never")


async def failed_load(server: Server) -> Replies:
    """A model whose load fails."""
    return await _all(server, "-broken")


async def unknown_model(server: Server) -> Replies:
    """A name that nobody knows."""
    calls = [ask(server.url, route, "nobody") for route in ROUTES]
    return dict(zip((d.name for d in ROUTES), await asyncio.gather(*calls), strict=True))


async def wrong_kind(server: Server) -> Replies:
    """A model of another kind, while ``busy`` streams and so cannot leave for it.

    A server that has to load the model first says that it has no room.
    """
    other = {"text": "embed", "embed": "text"}
    async with _busy(server):
        routes = [route for route in ROUTES if route.kind != "any"]
        calls = [
            ask(server.url, route, other.get(route.kind, "text"), max_wait=_SHORT_S)
            for route in routes
        ]
        return dict(zip((d.name for d in routes), await asyncio.gather(*calls), strict=True))


async def shutting_down(server: Server) -> Replies:
    """``busy`` streams, all the others wait, and the server is told to end."""
    async with _busy(server):
        answers = asyncio.create_task(_all(server))
        await asyncio.sleep(1.5)
        os.kill(server.pid, signal.SIGTERM)
        return await answers


#: In this order on one server; the last one ends it.
OUTCOMES: tuple[Outcome, ...] = (
    Outcome("served", "on an idle server", 200, None, served),
    Outcome(
        "waited",
        "while another model is in use for seconds more",
        200,
        None,
        waited,
        waits=True,
    ),
    Outcome(
        "expired",
        "the same, and the request allows a wait of one second",
        503,
        "model_swap_timeout",
        expired,
        waits=True,
    ),
    Outcome(
        "queue full",
        "the same, and nobody else may wait",
        503,
        "admission_queue_full",
        queue_full,
        environment=(("OMLX_ADMISSION_MAX_QUEUE", "1"),),
        waits=True,
    ),
    Outcome("never fits", "larger than the ceiling", 507, "model_too_large", never_fits),
    Outcome(
        "failed load",
        "the weights are damaged",
        500,
        "model_load_failed",
        failed_load,
        but=(COUNT,),  # loads nothing; it hears of a failure only afterwards
    ),
    Outcome("unknown model", "a name that nobody knows", 404, None, unknown_model),
    Outcome(
        "wrong kind",
        "a model that the route cannot serve, while there is no room to load it",
        400,
        "wrong_model_kind",
        wrong_kind,
        but=("any",),
    ),
    Outcome(
        "shutting down",
        "the server ends while the request waits for another model",
        503,
        "shutting_down",
        shutting_down,
        waits=True,
    ),
)
