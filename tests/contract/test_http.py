"""A whole stock server over HTTP: two chat models of which one fits, and an embedder.

The sections are those of the contract; the models are tiny and counted as 1.8 GB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from standin.server import Server
from standin.tinymodels import make_embedder, make_text_model

GUARD_GB = 2.7
COUNTED = 1_800_000_000
#: Tokens of a stream that is still going when the next request has been answered.
LONG = 20_000

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12},
    "/v1/completions": {"prompt": "hello", "max_tokens": 12},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12},
    "/v1/responses": {"input": "hello", "max_output_tokens": 12},
}
LAST = {
    "/v1/chat/completions": r"\[DONE\]",
    "/v1/completions": r"\[DONE\]",
    "/v1/messages": "message_stop",
    "/v1/responses": "response.(completed|incomplete)",
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder."""
    folder = tmp_path_factory.mktemp("models")
    make_text_model(folder, name="a", counted_bytes=COUNTED)
    make_text_model(folder, name="b", counted_bytes=COUNTED, seed=1)
    make_embedder(folder, name="e")
    return folder


@pytest.fixture(scope="session")
def clients(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Any], httpx.Client]]:
    """Clients of running servers, one for each oMLX, started when first asked for."""
    running: dict[str, httpx.Client] = {}
    with ExitStack() as stack:

        def client(target: Any) -> httpx.Client:
            if target.name not in running:
                server = stack.enter_context(
                    Server(
                        models,
                        tmp_path_factory.mktemp("base"),
                        patched=False,
                        start_s=90,
                        source=target.source,
                        python=target.python,
                        memory_gb=GUARD_GB,
                    )
                )
                new = httpx.Client(base_url=server.url, timeout=60)
                running[target.name] = stack.enter_context(new)
            return running[target.name]

        yield client


@pytest.fixture
def http(target: Any, clients: Callable[[Any], httpx.Client]) -> httpx.Client:
    """A client of this oMLX's server."""
    return clients(target)


@contextmanager
def streaming(http: httpx.Client, model: str) -> Iterator[httpx.Response]:
    """A chat stream that is under way, cut off at the end of the block."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": LONG, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
        yield response


def chat(http: httpx.Client, model: str) -> httpx.Response:
    """One short request."""
    body = {"model": model, **BODIES["/v1/chat/completions"]}
    return http.post("/v1/chat/completions", json=body)


def loaded(http: httpx.Client) -> set[str]:
    """Names of loaded models."""
    return set(http.get("/api/status").json()["loaded_models"])


def events(text: str) -> list[Any]:
    """The data of a stream's events, parsed; ``[DONE]`` as it is."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def said(path: str, body: Any, *, stream: bool) -> str:
    """The text of an answer, whatever the API."""
    if not stream:
        if path == "/v1/messages":
            return str(body["content"][0]["text"])
        if path == "/v1/responses":
            return str(body["output"][0]["content"][0]["text"])
        choice = body["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    parts = []
    for event in body:
        if not isinstance(event, dict):
            continue
        if event.get("type") == "response.output_text.delta":
            parts.append(event["delta"])
        elif event.get("type") == "content_block_delta":
            parts.append(event["delta"]["text"])
        for choice in event.get("choices", []):
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_token_arrives(http: httpx.Client, path: str, stream: bool) -> None:
    """4.2: whole bodies start with a space. 4.3: streams end in their own way."""
    answer = http.post(path, json={"model": "a", "stream": stream, **BODIES[path]})
    assert answer.status_code == 200
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.text)
        assert len(said(path, found, stream=True)) == 12
        last = found[-1] if isinstance(found[-1], str) else found[-1]["type"]
        assert re.fullmatch(LAST[path], last)
    else:
        assert answer.text.startswith(" {")
        assert len(said(path, answer.json(), stream=False)) == 12


def test_first_frames_are_keepalives(http: httpx.Client) -> None:
    """4.2: sent before anything is known, with the stream's own id."""
    body = {"model": "a", "stream": True, **BODIES["/v1/chat/completions"]}
    first, second, *_ = events(http.post("/v1/chat/completions", json=body).text)
    assert first["model"] == "keepalive"
    assert first["id"] == second["id"]
    body = {"model": "a", "stream": True, **BODIES["/v1/messages"]}
    assert http.post("/v1/messages", json=body).text.startswith("event: ping\n")


def test_idle_model_makes_room(http: httpx.Client) -> None:
    """1.10: the other model is unloaded first."""
    assert chat(http, "a").status_code == 200
    assert chat(http, "b").status_code == 200
    assert loaded(http) & {"a", "b"} == {"b"}


def test_busy_model_means_507(http: httpx.Client) -> None:
    """4.2: at once, and without a word on when to come back."""
    assert chat(http, "a").status_code == 200
    with streaming(http, "a"):
        for path, body in BODIES.items():
            answer = http.post(path, json={"model": "b", **body})
            assert answer.status_code == 507
            assert "retry-after" not in answer.headers
            assert answer.json()["error"]["type"] == "server_error"
        assert http.post("/v1/models/b/load").status_code == 507


def test_resident_embedder_serves_beside_a_stream(http: httpx.Client) -> None:
    """2.2: another thread, so a stream does not hold it up."""
    chat(http, "a")
    with streaming(http, "a"):
        answer = http.post("/v1/embeddings", json={"model": "e", "input": ["x", "yy"]})
    assert answer.text.startswith(" {")
    vectors = [item["embedding"] for item in answer.json()["data"]]
    assert [len(vector) for vector in vectors] == [64, 64]
    assert sum(value**2 for value in vectors[0]) == pytest.approx(1.0, abs=1e-4)


def test_load_and_unload_routes(http: httpx.Client) -> None:
    """4.2: their codes."""
    chat(http, "a")
    assert http.post("/v1/models/a/load").status_code == 200
    assert http.post("/v1/models/a/unload").status_code == 200
    assert http.post("/v1/models/a/unload").status_code == 400
    assert http.post("/v1/models/none/unload").status_code == 404
    assert http.post("/v1/models/none/load").status_code == 404
    assert http.post("/v1/models/b/load").json()["model_id"] == "b"
    assert "b" in loaded(http)


def test_admin_routes_want_a_session(http: httpx.Client) -> None:
    """8: 401 with a plain body."""
    for path in ("/admin/api/models/a/unload", "/admin/api/models/a/load", "/admin/api/reload"):
        answer = http.post(path)
        assert answer.status_code == 401
        assert set(answer.json()) == {"detail"}


def test_unknown_and_unfit_names(http: httpx.Client) -> None:
    """4.2: 404, and 400 for a model of another kind."""
    assert chat(http, "none").status_code == 404
    assert chat(http, "e").status_code == 400
    answer = http.post("/v1/embeddings", json={"model": "a", "input": "x"})
    assert answer.status_code == 400
    assert http.post("/v1/chat/completions", json={"model": "a"}).status_code == 422


def test_status_routes(http: httpx.Client) -> None:
    """8: sizes as the pool counts them, a twentieth above the files'."""
    chat(http, "a")
    health = http.get("/health").json()
    assert health["status"] == "healthy"
    assert health["engine_pool"]["final_ceiling"] == int(GUARD_GB * 1024**3)
    models = {m["id"]: m for m in http.get("/v1/models/status").json()["models"]}
    assert models["a"]["estimated_size"] == int(COUNTED * 1.05)
    assert models["a"]["loaded"]
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["a", "b", "e"]
