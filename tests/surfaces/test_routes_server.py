"""Keys, headers, log and privacy of the surfaces on whole servers.

On the stand-in always, on each real oMLX named by ``--omlx-src`` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

import standin
from omlx_admission.surfaces import routes, status
from omlx_admission.surfaces.demo.client import LOCAL, Client
from standin import tinymodels
from standin.server import Server

KEY = "server-test-key"
PROMPT = "hello"  # what Client sends
SIZES = {"a": 1_650_000_000, "b": 1_650_000_000, "x": 5_000_000_000}
PATHS = ("/admission", "/admission/status", "/admission/metrics", "/admission/events")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "omlx" in metafunc.fixturenames:
        found = [standin.PATH, *map(Path, metafunc.config.getoption("--omlx-src"))]
        names = ["stand-in", *(path.name for path in found[1:])]
        metafunc.parametrize("omlx", found, ids=names, scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, (name, size) in enumerate(SIZES.items()):
        tinymodels.make_text_model(root, name=name, counted_bytes=size, seed=seed)
    return root


@pytest.fixture
def serve(
    omlx: Path, models: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []
    python = request.config.getoption("--omlx-python")
    other = {"python": python} if python and omlx != standin.PATH else {}

    def start(*, load_s: float = 1.0, key: bool = False, **environment: str) -> Server:
        server = Server(
            models,
            tmp_path / f"base{len(running)}",
            patched=True,
            source=omlx,
            plan={"load_s": load_s},
            environment=environment,
            arguments=("--api-key", KEY) if key else (),
            **other,
        )
        server.__enter__()
        running.append(server)
        return server

    yield start
    for server in running:
        server.__exit__()


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=20, **LOCAL) as http:
        if path == "/admission/events":
            with http.stream("GET", path, headers=headers) as answer:
                if answer.status_code == 200:
                    next(answer.iter_lines())
                else:
                    answer.read()
                return answer
        return http.get(path, headers=headers)


def served(server: Server, path: str) -> tuple[int, ...]:
    """200; for metrics 501 where the Python of a real oMLX has no ``prometheus_client``."""
    other = server.python != sys.executable
    return (200, 501) if other and path == "/admission/metrics" else (200,)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}],
    ids=["missing", "wrong", "wrong-x-api-key"],
)
def test_keys(serve: Callable[..., Server], headers: dict[str, str]) -> None:
    server = serve(key=True)
    stock = get(server, "/api/status", **headers)
    assert stock.status_code == 401
    for path in PATHS:
        answer = get(server, path, **headers)
        assert answer.status_code == 401, path
        assert answer.json() == stock.json(), "as oMLX answers elsewhere"
        for right in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert get(server, path, **right).status_code in served(server, path), path


def test_open_where_omlx_checks_no_key(serve: Callable[..., Server]) -> None:
    server = serve()
    assert get(server, "/api/status").status_code == 200
    for path in PATHS:
        assert get(server, path).status_code in served(server, path)


def test_c13_a_head_leaves_its_connection_and_every_place_free(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    with contextlib.ExitStack() as kept:
        for _ in range(routes.MOST_VIEWERS + 1):
            line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            kept.callback(line.close)
            for method, path in (("HEAD", "/admission/events"), ("GET", "/health")):
                line.request(method, path)
                answer = line.getresponse()
                assert answer.status == 200
                assert bool(answer.read()) == (method == "GET")
        assert get(server, "/admission/events").status_code == 200


def test_what_is_served_says_how_long_it_waited(serve: Callable[..., Server]) -> None:
    server = serve(load_s=1.0)
    client = Client(server.url)
    first = asyncio.run(client.chat("a", headers={"X-Request-ID": "first.1"}))
    assert int(first.headers["x-omlx-admission-wait-ms"]) >= 1000
    for stream in (False, True):
        again = asyncio.run(client.chat("a", stream=stream))
        assert again.headers["x-omlx-admission-wait-ms"] == "0"
    assert "x-omlx-admission-wait-ms" not in get(server, "/v1/models").headers
    refused = asyncio.run(client.chat("x", headers={"X-Request-ID": "bad\tid"}))
    assert refused.status == 507
    assert "x-omlx-admission-wait-ms" not in refused.headers
    log = server.log
    assert re.search(r"INFO - .*admission: request first\.1 waits for 'a', 1 in the queue", log)
    assert re.search(r"request first\.1 for 'a' granted after \d+\.\d\d s", log)
    assert re.search(r"'a' resident after \d+\.\d\d s, 1 served", log)
    assert re.search(r"request adm-\d+ refused \(model_too_large\): Model 'x'", log)


def test_status_answers_during_a_load_and_nothing_private_is_in_it(
    serve: Callable[..., Server], models: Path
) -> None:
    server = serve(load_s=3.0, key=True, OMLX_SERIALIZE_ENGINE_GPU="1")
    auth = {"Authorization": f"Bearer {KEY}"}
    client = Client(server.url)

    async def swap() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, headers=auth, **LOCAL) as http:
            seen: list[dict[str, Any]] = []

            async def state(phase: str | None) -> None:
                for _ in range(400):
                    answer = await http.get("/admission/status?timeline=1")
                    seen.append(answer.json())
                    swap = seen[-1]["swap"]
                    if (swap and swap["phase"]) == phase:
                        return
                    await asyncio.sleep(0.05)
                raise AssertionError(seen[-1])

            task = asyncio.create_task(client.chat("a", headers=auth))
            await state("loading")
            await task
            many = [asyncio.create_task(client.chat("b", headers=auth)) for _ in range(4)]
            await state("loading")
            assert seen[-1]["queue"]["waiting"] == 4
            assert await client.chat("x", headers=auth)
            await asyncio.gather(*many)
            await state(None)
            return seen

    seen = asyncio.run(swap())
    validator = jsonschema.Draft202012Validator(status.schema())
    for document in seen:
        validator.validate(document)
    assert seen[-1]["gpu_turn"]["on"]
    assert seen[-1]["refusals"]
    assert [s["result"] for s in seen[-1]["swaps"]] == ["loaded", "loaded"]
    answer = get(server, "/admission/metrics", **auth)
    scraped = answer.text
    if answer.status_code != 501 or 501 not in served(server, "/admission/metrics"):
        assert len(list(text_string_to_metric_families(scraped))) > 20
    everything = json.dumps(seen) + scraped + get(server, "/admission", **auth).text
    for secret in (KEY, str(models), str(server.base), str(Path.home()), f'"{PROMPT}"'):
        assert secret not in everything
