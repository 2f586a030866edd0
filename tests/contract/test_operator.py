"""What an operator sets: keys, profiles, pins, admin routes; and what is left of an API."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from standin.server import Server
from standin.tinymodels import (
    make_embedder,
    make_reranker,
    make_text_model,
)

KEY = "sesame"
COUNTED = 1_800_000_000
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for one of ``a`` and ``b``."""
    folder = tmp_path_factory.mktemp("models")
    make_text_model(folder, name="a", counted_bytes=COUNTED)
    make_text_model(folder, name="b", counted_bytes=COUNTED, seed=1)
    make_embedder(folder, name="e")
    make_reranker(folder, name="r")
    return folder


@pytest.fixture(scope="session")
def servers(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Any], Server]]:
    """Running servers, one for each oMLX: ``a`` has two profiles, ``e`` is pinned."""
    running: dict[str, Server] = {}
    with ExitStack() as stack:

        def started(target: Any) -> Server:
            if target.name not in running:
                base = tmp_path_factory.mktemp("base")
                _write_settings(base)
                server = Server(
                    models,
                    base,
                    patched=False,
                    start_s=90,
                    source=target.source,
                    python=target.python,
                    arguments=["--api-key", KEY],
                )
                running[target.name] = stack.enter_context(server)
            return running[target.name]

        yield started


def _write_settings(base: Path) -> None:
    profiles = {
        name: {
            "name": name,
            "api_name": name,
            "expose_as_model": True,
            "settings": {"index_cache_freq": value},
        }
        for name, value in (("fast", 2), ("slow", 3))
    }
    (base / "model_profiles.json").write_text(json.dumps({"profiles": {"a": profiles}}))
    settings = {"e": {"is_pinned": True}, "a": {"model_alias": "alias"}}
    (base / "model_settings.json").write_text(json.dumps({"models": settings}))
    old = {"scheduler": {"max_concurrent_requests": 3, "serialize_engine_gpu": True}}
    (base / "settings.json").write_text(json.dumps(old))


@pytest.fixture
def server(servers: Callable[[Any], Server], target: Any) -> Server:
    return servers(target)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client with the key, logged in to the admin routes."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        assert client.post("/admin/api/login", json={"api_key": KEY}).status_code == 200
        yield client


def chat(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    """One short request."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 5, **more}
    return http.post("/v1/chat/completions", json=body)


def until(condition: Callable[[], Any]) -> Any:
    """What a condition comes to give; fails after half a minute of nothing."""
    deadline = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def status(http: httpx.Client) -> dict[str, Any]:
    """The status route."""
    answer: dict[str, Any] = http.get("/api/status").json()
    return answer


class Reader(threading.Thread):
    """Reads one long chat stream to its end."""

    def __init__(self, http: httpx.Client, model: str, tokens: int = 200_000):
        super().__init__(daemon=True)
        self._http, self._model, self._tokens = http, model, tokens
        self.begun = threading.Event()
        self.text = ""
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        body = {"model": self._model, "messages": MESSAGES, "max_tokens": self._tokens}
        url = "/v1/chat/completions"
        with self._http.stream("POST", url, json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                self.text += line
                if '"delta":{"content"' in line:
                    self.begun.set()


def test_saving_loses_keys_nobody_knows(server: Server) -> None:
    """Contract section 8: the file is rewritten from the known fields."""
    settings = json.loads((server.base / "settings.json").read_text())
    assert settings["scheduler"]["max_concurrent_requests"] == 3
    assert "serialize_engine_gpu" not in settings["scheduler"]


def test_keys(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code in (200, 503)


def test_pinned_model_is_loaded_by_itself(http: httpx.Client) -> None:
    until(lambda: http.get("/health").json()["status"] == "healthy")
    assert "e" in status(http)["loaded_models"]


def test_names_of_a_model(http: httpx.Client) -> None:
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert names == ["alias", "b", "e", "r", "alias:fast", "alias:slow"]
    for name in ("a", "A", "alias", "any/a", "a:fast", "alias:slow"):
        assert chat(http, name).status_code == 200


def test_profiles_are_variants_of_one_model(http: httpx.Client) -> None:
    """Contract section 1.6: reloaded when idle, 409 when busy."""
    assert chat(http, "a:fast").status_code == 200
    reader = Reader(http, "a:fast")
    assert chat(http, "a:fast").status_code == 200
    assert chat(http, "a:slow").status_code == 409
    assert chat(http, "b").status_code == 507
    assert http.post("/admin/api/models/a/unload").status_code == 202
    reader.join(30)
    assert '"error"' in reader.text
    until(lambda: "a" not in status(http)["loaded_models"])
    assert chat(http, "a:slow").status_code == 200


def test_client_that_leaves_frees_its_model(http: httpx.Client) -> None:
    assert chat(http, "a").status_code == 200
    body = {"model": "a", "messages": MESSAGES, "max_tokens": 200_000, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert next(response.iter_lines())
    until(lambda: status(http)["active_requests"] == 0)
    until(lambda: chat(http, "b").status_code == 200)


def test_reload_unloads_everything(http: httpx.Client) -> None:
    chat(http, "a")
    assert http.post("/admin/api/reload").status_code == 200
    assert "a" not in status(http)["loaded_models"]
    assert chat(http, "a").status_code == 200


def test_rerank(http: httpx.Client) -> None:
    body = {"model": "r", "query": "cats", "documents": ["dogs", "cats", "x"], "top_n": 2}
    results = http.post("/v1/rerank", json=body).json()["results"]
    assert len(results) == 2
    assert {result["index"] for result in results} < {0, 1, 2}
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]


def test_options_of_a_generation(http: httpx.Client) -> None:
    def text(**options: Any) -> str:
        answer = chat(http, "a", max_tokens=30, **options).json()
        return str(answer["choices"][0]["message"].get("content") or "")

    assert text(temperature=0) == text(temperature=0)
    assert text(seed=1) == text(seed=1) != text(seed=2)
    whole = text(temperature=0)
    assert whole.startswith(text(temperature=0, stop=whole[10:13]))
    assert len(text(temperature=0, stop=whole[10:13])) <= 10
