"""Keep-alives are asked of oMLX itself: its frames, its mode, its interval."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from omlx_admission.core import request as requests
from omlx_admission.core import stream_hold as runtime
from omlx_admission.core.answer import AnswerMiddleware
from omlx_admission.core.cut import Cut
from omlx_admission.hooks import install
from omlx_admission.hooks.install import State
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.server import stream_hold
from omlx_admission.settings import Settings

ALL = ("openai_chat", "openai_completion", "anthropic", "openai_responses")


class Asked(BaseModel):
    """The body of a request, as far as these tests look."""

    stream: bool
    model: str = ""


@pytest.fixture
def server() -> Iterator[Any]:
    with warnings.catch_warnings():
        # oMLX's own models of requests are deprecated in form.
        warnings.simplefilter("ignore")
        try:
            import omlx.server
        except ImportError as error:
            pytest.skip(f"this Python cannot import that oMLX's server: {error}")

    before = omlx.server._server_state.global_settings
    yield omlx.server
    omlx.server._server_state.global_settings = before


@contextmanager
def applied(server: Any, **values: Any) -> Iterator[install.Report]:
    """The hooks on the pool and the server."""
    import omlx.engine_pool

    one = install.Installer(install.decide(settings=Settings(**values)))
    try:
        one.on_import(omlx.engine_pool)
        one.on_import(server)
        yield one.report
    finally:
        one.undo()


def mode(server: Any, name: str) -> None:
    settings = SimpleNamespace(server=SimpleNamespace(sse_keepalive_mode=name))
    server._server_state.global_settings = settings


def frame(server: Any, protocol: str) -> str | None:
    found = stream_hold.keepalive(server, protocol)
    return None if found is None else found.frame.decode()


def test_the_frames_are_omlxs(server: Any) -> None:
    mode(server, "chunk")
    frames = {protocol: frame(server, protocol) for protocol in ALL}
    assert frames == {
        "openai_chat": server._KEEPALIVE_CHAT_CHUNK,
        "openai_completion": server._KEEPALIVE_COMPLETION_CHUNK,
        "anthropic": server._KEEPALIVE_ANTHROPIC_PING,
        # oMLX has none there: the hold has its own.
        "openai_responses": "",
    }
    assert server._resolve_keepalive("openai_responses") is None
    mode(server, "comment")
    assert {frame(server, protocol) for protocol in ALL} == {": keep-alive\n\n"}
    mode(server, "off")
    assert {frame(server, protocol) for protocol in ALL} == {None}


def test_the_interval_is_omlxs(server: Any, mocker: Any) -> None:
    mode(server, "chunk")
    found = stream_hold.keepalive(server, "anthropic")
    assert found.interval_s == 10.0

    async def other(generator: Any, http_request: Any = None, interval: float = 3.0) -> None:
        raise AssertionError

    mocker.patch.object(server, "_with_sse_keepalive", other)
    found = stream_hold.keepalive(server, "anthropic")
    assert found.interval_s == 3.0


def test_the_id_of_a_chunk_is_found_and_replaced(server: Any) -> None:
    """What is sent is what oMLX makes itself once it knows the id."""
    mode(server, "chunk")
    found = stream_hold.keepalive(server, "openai_chat")

    async def send(message: Any) -> None: ...

    rule = runtime.Rule(1.0, lambda protocol: found)
    hold = runtime.StreamHold(rule, "openai_chat", send, Cut("/v1/chat/completions"))
    own = hold._with_own_id(found).frame.decode()
    response_id = own.partition('"id":"')[2].partition('"')[0]
    assert response_id != "chatcmpl-keepalive"
    assert own == server._chat_keepalive_chunk(response_id)


def test_c17_a_response_that_was_said_to_have_begun_keeps_its_id(server: Any) -> None:
    """It is the id that oMLX itself gives it, and stores it under."""
    from omlx.api import shared_models

    async def handler(request: requests.Request) -> None:
        assert request.hold is not None
        kinds = shared_models.IDPrefix
        request.hold.response_id = response_id
        found.append(shared_models.generate_id(kinds.RESPONSE))
        found.append(shared_models.generate_id(prefix=kinds.RESPONSE))
        found.append(shared_models.generate_id(kinds.MESSAGE))

    response_id = ""
    found: list[str] = []
    with applied(server):
        asyncio.run(post("/v1/responses", {"stream": True}, handler))
        response_id = "resp_ours"
        asyncio.run(post("/v1/responses", {"stream": True}, handler))
    assert found[3:5] == ["resp_ours"] * 2
    others = [*found[:3], found[5]]
    assert len({one.partition("_")[2] for one in others}) == 4
    assert [one.partition("_")[0] for one in others] == ["resp", "resp", "msg", "msg"]


def test_a_fault_is_noted_and_nothing_is_sent(
    server: Any, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mocker.patch.object(stream_hold.faults, "_noted", set())
    mocker.patch.object(server, "_resolve_keepalive", side_effect=ZeroDivisionError)
    assert stream_hold.keepalive(server, "openai_chat") is None
    assert stream_hold.keepalive(server, "openai_chat") is None
    assert caplog.text.count("asking for oMLX's keep-alive failed") == 1


@pytest.mark.parametrize("after_s", [2.5, 0.0])
def test_the_variable_switches_it(server: Any, after_s: float) -> None:
    with applied(server, stream_hold_s=after_s) as report:
        state = report.verdict("stream_hold").state
        assert state is (State.APPLIED if after_s else State.OFF)
        hold_for: Any = switches.handling.hold_for
        assert (hold_for and hold_for.__self__.after_s) == (after_s or None)
    assert switches.handling.hold_for is None


@pytest.mark.parametrize("path", sorted(runtime.PROTOCOLS))
def test_f8_the_framework_tells_what_a_body_says(server: Any, path: str) -> None:
    """No byte of a body is looked at by us; what was parsed is the framework's own."""
    from starlette.requests import Request

    stock = vars(Request)["json"]
    told: list[tuple[bool, str]] = []

    async def handler(request: requests.Request) -> None:
        assert request.hold is not None
        told.append((request.hold._streams, request.hold._model))

    with applied(server):
        for stream, root in ((True, ""), (False, "/omlx")):
            asyncio.run(post(path, {"model": "b", "stream": stream}, handler, root))
        asyncio.run(post("/v1/embeddings", {"stream": True}, None))
    assert told == [(True, "b"), (False, "b")]
    assert vars(Request)["json"] is stock


async def post(path: str, body: Any, handler: Any, root: str = "") -> None:
    """One request to an application of oMLX's framework, in pieces; C14 where ``root``."""
    app = FastAPI()
    app.add_middleware(AnswerMiddleware, handling=switches.handling)

    @app.post(path)
    async def route(asked: Asked) -> None:
        request = requests.active()
        assert request is not None
        if handler is None:
            assert request.hold is None
        else:
            await handler(request)

    whole = json.dumps(body).encode()
    pieces = [
        {"type": "http.request", "body": whole[:9], "more_body": True},
        {"type": "http.request", "body": whole[9:]},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": root + path, "headers": headers}
    await app({**scope, "root_path": root, "query_string": b""}, receive, send)
    assert sent[0]["status"] == 200
