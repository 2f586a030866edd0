"""The middleware: disconnects, the client's own limit, and one truth about refusals."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.middleware.cors import CORSMiddleware

from omlx_admission.core import request as requests
from omlx_admission.core.refusal import Refusal

BUSY = Refusal(503, "model_busy", "'a' is in use", 7)
NEVER = Refusal(507, "model_too_large", "too large")


class Exchange:
    """One HTTP exchange with an application behind the middleware."""

    #: The middleware.
    wrap: Any = requests.RequestMiddleware

    def __init__(self, app: Callable[..., Awaitable[None]], path: str = "/v1/x") -> None:
        self.sent: list[Any] = []
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.scope: dict[str, Any] = {"type": "http", "path": path, "headers": []}
        self._app = self.wrap(app)

    async def run(self) -> None:
        async def send(message: Any) -> None:
            self.sent.append(message)

        await self._app(self.scope, self.incoming.get, send)

    @property
    def unread(self) -> deque[Any]:
        unread: deque[Any] = deque()
        while not self.incoming.empty():
            unread.append(self.incoming.get_nowait())
        return unread

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> Any:
        return json.loads(b"".join(m.get("body", b"") for m in self.sent[1:]))


def answering(status: int, refusal: Refusal | None = None) -> Callable[..., Awaitable[None]]:
    """An application that meets ``refusal`` and then answers ``status`` in two pieces."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        request.refusal = refusal
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"a":', "more_body": True})
        await send({"type": "http.response.body", "body": b"1}"})

    return app


@pytest.mark.parametrize("made_of_it", [404, 409, 500, 503, 507])
@pytest.mark.parametrize("refusal", [BUSY, NEVER])
def test_whatever_a_route_made_of_it_the_client_gets_the_refusal(
    made_of_it: int, refusal: Refusal
) -> None:
    exchange = Exchange(answering(made_of_it, refusal))
    asyncio.run(exchange.run())
    assert exchange.status == refusal.status
    assert exchange.body["error"]["code"] == refusal.code
    assert len(exchange.sent) == 2
    if refusal is BUSY:
        assert exchange.headers[b"retry-after"] == b"7"
        assert b"x-should-retry" not in exchange.headers
    else:
        assert exchange.headers[b"x-should-retry"] == b"false"
        assert b"retry-after" not in exchange.headers
    assert int(exchange.headers[b"content-length"]) == len(exchange.sent[1]["body"])


@pytest.mark.parametrize("refusal", [None, BUSY])
def test_a_success_is_never_replaced(refusal: Refusal | None) -> None:
    exchange = Exchange(answering(200, refusal))
    asyncio.run(exchange.run())
    assert exchange.status == 200
    assert exchange.body == {"a": 1}


def test_an_error_of_the_route_itself_stays() -> None:
    exchange = Exchange(answering(422))
    asyncio.run(exchange.run())
    assert exchange.status == 422


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
        ("/v1/chat/completions", {"error": {"type": "server_error", "param": None}}),
        ("/v1/responses", {"error": {"type": "server_error"}}),
        ("/admin/api/models/a/load", {"detail": "'a' is in use"}),
    ],
)
def test_the_body_has_the_routes_own_shape(path: str, expected: dict[str, Any]) -> None:
    body = json.loads(BUSY.body(path))
    for key, value in expected.items():
        if isinstance(value, dict):
            assert value.items() <= body[key].items()
        else:
            assert body[key] == value


@pytest.mark.parametrize(
    ("text", "limit"), [(b"0", 0.0), (b"2.5", 2.5), (b"nan", None), (b"-1", None), (b"x", None)]
)
def test_the_client_may_shorten_its_wait(text: bytes, limit: float | None) -> None:
    seen: list[float | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        seen.append(request.max_wait)
        await answering(200)(scope, receive, send)

    exchange = Exchange(app)
    exchange.scope["headers"] = [(b"x-omlx-max-wait", text)]
    asyncio.run(exchange.run())
    if limit is None:
        assert seen == []
        assert exchange.status == 400
        assert "X-OMLX-Max-Wait" in exchange.body["error"]["message"]
    else:
        assert seen == [limit]


def test_a_watch_notices_the_client_and_loses_no_message() -> None:
    async def test() -> None:
        left = asyncio.Event()
        body: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            watch = requests.Watch(requests.current.get(), left.set)
            exchange.incoming.put_nowait({"type": "http.request", "body": b"late"})
            exchange.incoming.put_nowait({"type": "http.disconnect"})
            await left.wait()
            watch.stop()
            body.append(await receive())
            body.append(await receive())

        exchange = Exchange(app)
        await exchange.run()
        assert [m["type"] for m in body] == ["http.request", "http.disconnect"]
        assert body[0]["body"] == b"late"

    asyncio.run(test())


def test_a_watch_that_is_stopped_reads_nothing_more() -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            watch = requests.Watch(requests.current.get(), lambda: pytest.fail("left"))
            await asyncio.sleep(0)
            watch.stop()
            await asyncio.sleep(0)
            exchange.incoming.put_nowait({"type": "http.request", "body": b"mine"})
            assert (await receive())["body"] == b"mine"

        exchange = Exchange(app)
        await exchange.run()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("kind", "message", "most"),
    [
        ("http", {"type": "http.request", "body": b"x" * 4096, "more_body": True}, 16),
        ("http", {"type": "http.request", "body": b"x", "more_body": True}, 64),
        ("websocket", {"type": "websocket.receive", "bytes": b"x" * 65_536}, 1),
        ("websocket", {"type": "websocket.receive", "bytes": None, "text": "x"}, 64),
    ],
)
def test_f7_a_watch_reads_ahead_no_more_than_it_may_and_takes_up_again(
    kind: str, message: Any, most: int
) -> None:
    """What a client pours in stays with the server, whose flow control then holds."""
    total = 3 * most

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            request = requests.current.get()
            assert request is not None
            watch = requests.Watch(request, lambda: pytest.fail("nobody has left"))
            await turns()
            assert 1 <= len(request._buffer) <= most
            watch.stop()
            assert [(await receive())["n"] for _ in range(total)] == list(range(total))
            assert request._buffer == exchange.unread == deque()
            left = asyncio.Event()
            watch = requests.Watch(request, left.set)
            exchange.incoming.put_nowait({"type": f"{kind}.disconnect"})
            await left.wait()
            watch.stop()

        exchange = Exchange(app)
        exchange.scope["type"] = kind
        for n in range(total):
            exchange.incoming.put_nowait({**message, "n": n})
        await asyncio.wait_for(exchange.run(), 20)

    asyncio.run(test())


async def turns() -> None:
    """Let everything run that can run at once."""
    for _ in range(1000):
        await asyncio.sleep(0)


def test_f7_a_server_holds_a_client_that_pours_into_a_wait() -> None:
    """With a real server: it stops reading, and goes on when the route reads."""
    piece, whole = b"x" * 65_536, 64 << 20

    async def test() -> None:
        waiting, go_on = asyncio.Event(), asyncio.Event()
        held: list[requests.Request] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            request = requests.current.get()
            assert request is not None
            held.append(request)
            watch = requests.Watch(request, lambda: pytest.fail("nobody has left"))
            waiting.set()
            await go_on.wait()
            watch.stop()
            read, more = 0, True
            while more:
                message = await receive()
                read, more = read + len(message["body"]), message["more_body"]
            text = str(read).encode()
            length = [(b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": length})
            await send({"type": "http.response.body", "body": text})

        config = uvicorn.Config(
            requests.RequestMiddleware(app),
            port=0,
            log_level="critical",
            lifespan="off",
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/models/a/load HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % whole
        )
        poured = 0

        async def pour() -> None:
            nonlocal poured
            while poured < whole:
                writer.write(piece)
                await writer.drain()
                poured += len(piece)

        pouring = asyncio.create_task(pour())
        await waiting.wait()
        (connection,) = server.server_state.connections
        while not (connection.flow.read_paused and watch_is_over()):
            assert poured < whole, "the server took it all"
            await asyncio.sleep(0)
        kept = sum(len(message["body"]) for message in held[0]._buffer)
        assert kept < 1 << 20
        assert poured < whole
        go_on.set()
        await pouring
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(str(whole))) == str(whole).encode()
        writer.close()
        server.should_exit = True
        await serving

    def watch_is_over() -> bool:
        return not any("Request.gone" in repr(task.get_coro()) for task in asyncio.all_tasks())

    asyncio.run(asyncio.wait_for(test(), 60))


EXPOSED = {"retry-after", "x-should-retry", "x-omlx-admission-wait-ms"}


def exposed(headers: Any) -> set[str]:
    """The headers that a browser lets a script of another origin read."""
    values = [v.decode().lower() for name, v in headers if name == requests._EXPOSE[0]]
    return {name.strip() for name in ", ".join(values).split(",") if name.strip()}


@pytest.mark.parametrize("origin", [True, False])
@pytest.mark.parametrize("refusal", [BUSY, NEVER, None])
def test_c12_a_script_of_another_origin_may_read_what_the_headers_say(
    refusal: Refusal | None, origin: bool
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        request.waited_s = 0.2
        await answering(503 if refusal else 200, refusal)(scope, receive, send)

    exchange = Exchange(app)
    if origin:
        exchange.scope["headers"] = [(b"origin", b"http://localhost:3000")]
    asyncio.run(exchange.run())
    assert exchange.status == (refusal.status if refusal else 200)
    assert exposed(exchange.sent[0]["headers"]) == (EXPOSED if origin else set())


def test_c12_an_answer_without_them_exposes_nothing() -> None:
    exchange = Exchange(answering(200), "/health")
    exchange.scope["headers"] = [(b"origin", b"http://localhost:3000")]
    asyncio.run(exchange.run())
    assert exchange.sent[0]["headers"] == []


@pytest.mark.parametrize("outside", [True, False])
def test_c12_what_a_cors_middleware_allows_stays_allowed(outside: bool) -> None:
    """oMLX adds its own after ours, so that it lies outside."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        request.waited_s = 0.2
        await answering(200)(scope, receive, send)

    exchange = Exchange(app)
    inside: Any = app if outside else CORSMiddleware(app, ["*"], expose_headers=["X-Own"])
    exchange._app = requests.RequestMiddleware(inside)
    if outside:
        exchange._app = CORSMiddleware(exchange._app, ["*"])  # type: ignore[assignment]
    exchange.scope.update(method="GET", headers=[(b"origin", b"http://localhost:3000")])
    asyncio.run(exchange.run())
    headers = exchange.sent[0]["headers"]
    assert (b"access-control-allow-origin", b"*") in headers
    assert exposed(headers) == EXPOSED | (set() if outside else {"x-own"})


@pytest.mark.parametrize(
    ("root", "path", "route"),
    [
        ("", "/v1/messages", "/v1/messages"),
        ("/omlx", "/omlx/v1/messages", "/v1/messages"),
        ("/omlx/", "/omlx/v1/messages", "/v1/messages"),
        # A proxy has taken the prefix away already.
        ("/omlx", "/v1/messages", "/v1/messages"),
        ("/omlx", "/omlxx/v1/messages", "/omlxx/v1/messages"),
        ("/v1", "/v1/v1/messages", "/v1/messages"),
    ],
)
def test_c14_a_route_is_known_whatever_the_application_is_mounted_below(
    root: str, path: str, route: str
) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        seen.append(request.path)
        await answering(500, BUSY)(scope, receive, send)

    exchange = Exchange(app, path)
    exchange.scope["root_path"] = root
    asyncio.run(exchange.run())
    assert seen == [route]
    shape = "overloaded_error" if route == "/v1/messages" else None
    assert exchange.body.get("error", {}).get("type") == shape


def test_what_is_registered_for_the_end_runs_once_even_after_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = requests.current.get()
        assert request is not None
        request.at_end(lambda: ran.append(1))
        request.at_end(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        request.at_end(lambda: ran.append(2))
        raise RuntimeError("the route failed")

    with pytest.raises(RuntimeError, match="the route failed"):
        asyncio.run(Exchange(app).run())
    assert ran == [2, 1]
    assert caplog.text.count("clean-up at the end of a request failed") == 1
    assert requests.current.get() is None


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_connections_pass(kind: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], requests.current.get() is not None))

    exchange = Exchange(app)
    exchange.scope["type"] = kind
    asyncio.run(exchange.run())
    assert seen == [(kind, kind == "websocket")]
