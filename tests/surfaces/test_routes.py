"""The routes: who may ask, what is shared, how live updates end. In this process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request

from omlx_admission.surfaces import page, routes

from .samples import Sample, draining

PATHS = ("/admission", "/admission/status", "/admission/metrics", "/admission/events")


class Site:
    """An application with the routes; counts readings, and refuses other keys than its own."""

    def __init__(self, sample: Sample, key: str | None = None) -> None:
        self.sample = sample
        self.readings = 0

        async def check(request: Request) -> None:
            if key is not None and request.headers.get("authorization") != f"Bearer {key}":
                raise HTTPException(401, "API key required")

        def read() -> Any:
            self.readings += 1
            return sample.facts()

        self.routes = routes.make(check, read, sample.observer)
        self.app = Starlette(routes=self.routes)

    async def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.request(method, path, headers=headers)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_each_answers_in_its_own_kind() -> None:
    async def test() -> None:
        site = Site(draining())
        status = await site.get("/admission/status")
        assert status.json()["queue"]["waiting"] == 4
        assert "timeline" not in status.json()
        assert "timeline" in (await site.get("/admission/status?timeline=1")).json()
        assert (await site.get("/admission/status/schema")).json()["title"]
        text = await site.get("/admission/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=")
        assert "omlx_admission_queue_depth" in text.text
        html = await site.get("/admission")
        assert html.headers["content-type"] == "text/html; charset=utf-8"
        for answer in (status, text, html):
            assert answer.status_code == 200
            assert answer.headers["cache-control"] == "no-store"

    run(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_without_the_key_there_is_nothing(path: str, headers: dict[str, str]) -> None:
    async def test() -> None:
        site = Site(draining(), key="right")
        answer = await site.get(path, **headers)
        assert answer.status_code == 401
        assert "agent-0" not in answer.text
        assert "html" not in answer.headers["content-type"], "no browser asked"
        assert site.readings == 0

    run(test)


def test_a_browser_without_a_key_gets_the_form_and_no_data() -> None:
    async def test() -> None:
        site = Site(draining(), key="right")
        answer = await site.get("/admission", accept="text/html,*/*;q=0.8")
        assert answer.status_code == 401
        assert answer.content == page.content()
        assert site.readings == 0
        # Only the page: data is refused to a browser like to anybody.
        status = await site.get("/admission/status", accept="text/html")
        assert status.headers["content-type"].startswith("text/plain")

    run(test)


def test_readings_are_shared_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        now = 0.0
        site = Site(draining())
        endpoint = site.routes[1].endpoint.__self__  # type: ignore[attr-defined]
        for shared in (endpoint._status, endpoint._metrics):
            monkeypatch.setattr(shared, "_clock", lambda: now)
        for _ in range(50):
            await site.get("/admission/status")
        assert site.readings == 1
        for _ in range(50):
            await site.get("/admission/metrics")
        assert site.readings == 2
        now = routes.STATUS_S - 0.001
        await site.get("/admission/status")
        assert site.readings == 2
        now = routes.STATUS_S
        await site.get("/admission/status")
        await site.get("/admission/metrics")
        assert site.readings == 3
        now = routes.METRICS_S
        await site.get("/admission/metrics")
        assert site.readings == 4

    run(test)


ACCEPTS = (
    "text/plain; version=1.x",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    *(f"text/plain; version=1.{n}" for n in range(50)),
    *(f"application/openmetrics-text; version=1.{n}; escaping=x{n}" for n in range(50)),
)


def test_f9_two_readings_are_kept_whatever_a_client_asks_for() -> None:
    async def test() -> None:
        site = Site(draining())
        endpoint = site.routes[1].endpoint.__self__  # type: ignore[attr-defined]
        kinds = set()
        for accept in ACCEPTS:
            answer = await site.get("/admission/metrics", accept=accept)
            assert answer.status_code == 200
            kinds.add(answer.headers["content-type"])
            assert kinds >= set(endpoint._metrics._made)
        assert len(kinds) == 2
        assert site.readings == 2

    run(test)


def test_c13_a_head_of_the_events_is_over_at_once_and_takes_no_place() -> None:
    async def test() -> None:
        site = Site(draining())
        endpoint = site.routes[-1].endpoint.__self__  # type: ignore[attr-defined]
        for _ in range(routes.MOST_VIEWERS + 1):
            answer = await site.get("/admission/events", method="HEAD")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.content == b""
            assert "content-length" not in answer.headers, "that of a stream is not known"
        assert endpoint._viewers == 0
        refused = await Site(draining(), key="right").get("/admission/events", method="HEAD")
        assert refused.status_code == 401

    run(test)


async def events(site: Site, count: int) -> list[dict[str, Any]]:
    endpoint = site.routes[-1].endpoint.__self__  # type: ignore[attr-defined]
    stream = endpoint._stream()
    found: list[dict[str, Any]] = []
    async for chunk in stream:
        for line in chunk.decode().splitlines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
        if len(found) >= count:
            break
    await stream.aclose()
    assert endpoint._viewers == 0
    return found


def test_live_updates_come_with_a_change_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(routes, "LOOK_S", 0.001)
        monkeypatch.setattr(routes, "STATUS_S", 0.0)
        site = Site(draining())

        async def change() -> None:
            await asyncio.sleep(0.01)
            site.sample.wait("b", "late")

        task = asyncio.create_task(change())
        monkeypatch.setattr(routes, "REPEAT_S", 1e9)
        first, second = await events(site, 2)
        await task
        assert (first["queue"]["waiting"], second["queue"]["waiting"]) == (4, 5)
        assert "timeline" in first
        monkeypatch.setattr(routes, "REPEAT_S", 0.001)
        assert len(await events(site, 3)) == 3

    run(test)


def test_viewers_are_limited_and_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(draining())
        endpoint = site.routes[-1].endpoint.__self__  # type: ignore[attr-defined]
        streams = [endpoint._stream() for _ in range(routes.MOST_VIEWERS)]
        for stream in streams:
            await anext(stream)
        answer = await site.get("/admission/events")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "10"
        for stream in streams:
            await stream.aclose()
        assert endpoint._viewers == 0

    run(test)


class WebServer:
    """What uvicorn puts behind a signal."""

    def __init__(self) -> None:
        self.should_exit = False

    def handle_exit(self, _signal: int, _frame: Any) -> None:
        self.should_exit = True


def test_live_updates_end_when_the_web_server_shall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(routes, "LOOK_S", 0.001)
        server = WebServer()
        old = signal.signal(signal.SIGTERM, server.handle_exit)
        try:
            site = Site(draining())
            endpoint = site.routes[-1].endpoint.__self__  # type: ignore[attr-defined]
            stream = endpoint._stream()
            await anext(stream)
            await anext(stream)
            server.should_exit = True
            assert [chunk async for chunk in stream] == []
        finally:
            signal.signal(signal.SIGTERM, old)
        assert not routes.shutting_down()

    run(test)


def test_without_prometheus_client_metrics_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
        answer = await Site(draining()).get("/admission/metrics")
        assert answer.status_code == 501
        assert "prometheus-client" in answer.text

    run(test)


def test_the_page_allows_its_own_script_and_nothing_else() -> None:
    policy = page.headers()["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = page.content().decode()
    for word in ("http://", "https://", "src=", "@import", "url(//"):
        found = [
            line
            for line in text.splitlines()
            if word in line and "www.w3.org/2000/svg" not in line
        ]
        assert found == [], word
