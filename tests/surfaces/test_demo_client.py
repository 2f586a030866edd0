"""The demo's client and watch against canned answers, and what a server process is given."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import omlx_admission
from omlx_admission.surfaces.demo.client import Answer, Client
from omlx_admission.surfaces.demo.models import A, B
from omlx_admission.surfaces.demo.runs import plugin_in
from omlx_admission.surfaces.demo.server import Server, last_line, variables_for
from omlx_admission.surfaces.demo.stage import (
    Measures,
    Stage,
    StageError,
    TooShort,
    stream_tokens,
)
from omlx_admission.surfaces.demo.watch import Watch

STREAM = (
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
    b"data: [DONE]\n\n"
)


def ok(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """One whole HTTP answer."""
    head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\nconnection: close\r\n" % (status, kind)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@contextlib.asynccontextmanager
async def serving(reply: Callable[[str, bytes], bytes]) -> AsyncIterator[str]:
    """A server that answers each request by ``reply(path, body)``; yields its address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(x[15:]) for x in head.lower().splitlines() if x.startswith("content-length")),
            0,
        )
        body = await reader.readexactly(length)
        writer.write(reply(head.split()[1], body))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def chat(reply: bytes, *, stream: bool = False) -> Answer:
    """What the client makes of one canned answer."""

    async def ask() -> Answer:
        async with serving(lambda *_: reply) as url:
            return await Client(url).chat("m", stream=stream, label="x")

    return asyncio.run(ask())


def test_a_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy of the environment, here a dead one, must not see loopback calls.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    answer = chat(ok(b'  {"choices": []}'))
    assert (answer.status, answer.ok, answer.label, answer.model) == (200, True, "x", "m")
    assert answer.started < (answer.first_byte or 0) <= answer.ended


def test_an_error_inside_a_200_is_no_answer() -> None:
    assert not chat(ok(b'{"error": {"message": "x"}}')).ok
    assert not chat(ok(b" half a bo")).ok


def test_a_refusal_keeps_status_headers_and_body() -> None:
    answer = chat(ok(b'{"error": {"message": "x"}}', status=b"503 Service Unavailable"))
    assert (answer.status, answer.ok) == (503, False)
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body) == {"error": {"message": "x"}}


def test_a_stream_is_whole_with_its_terminator_only() -> None:
    whole = chat(ok(STREAM, b"text/event-stream"), stream=True)
    assert whole.ok
    assert whole.chunks
    cut = chat(ok(STREAM.removesuffix(b"data: [DONE]\n\n"), b"text/event-stream"), stream=True)
    assert (cut.status, cut.ok) == (200, False)


def test_a_connection_that_breaks_is_told() -> None:
    reply = ok(STREAM, b"text/event-stream").replace(b"content-length: ", b"content-length: 9")
    broken = chat(reply, stream=True)
    assert broken.status == 200
    assert not broken.ok
    assert broken.error is not None
    assert broken.error.startswith("RemoteProtocolError")
    assert chat(b"").status == 0


def test_nobody_there() -> None:
    answer = asyncio.run(Client("http://127.0.0.1:9").chat("m"))
    assert (answer.status, answer.ok) == (0, False)


# --- watch and stage -------------------------------------------------------------------


class Pool:
    """A server's models as ``/v1/models/status`` shows them; loads are instant."""

    def __init__(self, *loaded: str) -> None:
        self.loaded = set(loaded)
        self.asked: list[str] = []
        self.chat = ok(b'{"choices": []}')

    def __call__(self, path: str, body: bytes) -> bytes:
        if path == "/v1/models/status":
            models = [
                {"id": m.name, "loaded": m.name in self.loaded, "is_loading": False}
                for m in (A, B)
            ]
            return ok(json.dumps({"models": models}).encode())
        self.asked.append(path)
        if path.endswith("/unload"):
            self.loaded.discard(path.split("/")[3])
        else:
            self.loaded.add(json.loads(body)["model"])
            return self.chat
        return ok(b"{}")


def on_stage(pool: Callable[[str, bytes], bytes], act: Callable[[Stage], object]) -> Stage:
    """Run one coroutine on a stage before ``pool``."""

    async def go() -> Stage:
        async with serving(pool) as url:
            watch = Watch(url, interval=0.0)
            stage = Stage(Client(url), watch, Measures(load=2.0), lambda _text: None)
            await act(stage)  # type: ignore[misc]
            return stage

    return asyncio.run(go())


def test_settle_unloads_the_others_and_loads_a() -> None:
    pool = Pool(B.name)
    on_stage(pool, Stage.settle)
    assert pool.loaded == {A.name}
    assert pool.asked == [f"/v1/models/{B.name}/unload", "/v1/chat/completions"]


def test_settle_does_nothing_where_a_is_alone() -> None:
    pool = Pool(A.name)
    stage = on_stage(pool, Stage.settle)
    assert pool.asked == []
    assert [s.state(A.name) for s in stage.watch.samples] == ["resident"]


def test_the_stream_is_made_to_last_seconds_on_any_machine() -> None:
    # 152 tokens in 0.5 s are 304 a second.
    assert stream_tokens(0.1, 0.6) == 912
    assert stream_tokens(0.1, 100.0) == 64
    assert stream_tokens(0.1, 0.1) == 20_000


def test_measure_takes_the_runs_yardsticks() -> None:
    stage = on_stage(Pool(), Stage.measure)
    assert stage.measures.tokens > 0
    assert stage.measures.swap > 0
    assert stage.measures.alone > 0


def test_measure_says_why_a_server_cannot_serve() -> None:
    pool = Pool()
    pool.chat = ok(b'{"error": {"message": "no Metal"}}', status=b"500 Internal Server Error")
    with pytest.raises(StageError, match="ended with 500: no Metal"):
        on_stage(pool, Stage.measure)


def test_a_stream_that_is_over_too_soon_is_told_after_the_others_have_ended() -> None:
    pool = Pool()
    pool.chat = ok(STREAM, b"text/event-stream")
    seen: list[Answer] = []

    async def act(stage: Stage) -> None:
        try:
            await stage.beside_stream(stage.ask(B, "other", stream=True))
        finally:
            seen.extend(stage.answers)

    with pytest.raises(TooShort):
        on_stage(pool, act)
    assert sorted(a.label for a in seen) == ["A streams", "other"]


def test_a_watch_survives_a_server_that_does_not_answer() -> None:
    async def go() -> list[object]:
        async with serving(lambda *_: ok(b"<html>")) as url:
            watch = Watch(url)
            return [await watch.look(), *watch.samples]

    assert asyncio.run(go()) == [None]


# --- the process -------------------------------------------------------------------------


def test_a_server_sees_this_package_and_nothing_else_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMLX_ADMISSION_MAX_WAIT_S", "1")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    source = tmp_path / "src"
    variables = variables_for(tmp_path, source)
    assert not [name for name in variables if name.startswith("OMLX_")]
    assert "HF_HOME" not in variables
    # oMLX writes to ~/.omlx whatever its base path is.
    assert variables["HOME"] == str(tmp_path.resolve())
    first, ours, last = variables["PYTHONPATH"].split(os.pathsep)
    assert (first, last) == (str(source), "/mine")
    assert os.listdir(ours) == ["omlx_admission"]
    package = Path(omlx_admission.__file__).parent
    assert (Path(ours) / "omlx_admission").samefile(package)


@pytest.mark.parametrize("patched", [True, False])
def test_the_command_and_the_switch(tmp_path: Path, patched: bool) -> None:
    server = Server(
        tmp_path / "m", tmp_path, patched=patched, load_s=1.5, memory_gb=3.4, port=1
    )
    command = server._command()
    assert command[:4] == [
        sys.executable,
        "-m",
        "omlx_admission.surfaces.demo.launch",
        "1.5",
    ]
    assert command[-2:] == ["--memory-guard-gb", "3.4"]
    assert server._environment()["OMLX_ADMISSION"] == str(int(patched))
    assert server.url == "http://127.0.0.1:1"


def test_the_last_line_that_says_something() -> None:
    assert last_line("a\nb\n\n") == "b"
    assert last_line("\n") == "it printed nothing"


def test_signs_of_the_plugin_in_a_log() -> None:
    line = "2026-01-01 10:00:00,000 - omlx.admission - INFO - admission: swapping to 'a'\n"
    assert plugin_in("x\n" + line) == (True, None)
    assert plugin_in("omlx.admission is mentioned\n") == (False, None)
    complaint = "omlx-admission: not active, oMLX runs stock: ValueError('x')"
    assert plugin_in(f"{complaint}\nx\n") == (False, complaint)
