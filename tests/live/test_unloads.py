"""Unloads by hand, settings and variants on whole servers, as operators and clients see it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx_admission.surfaces.demo.client import LOCAL, Answer, Client
from standin.server import Server

from .conftest import SIZES, Omlx, said
from .streams import ROUTES
from .test_main_job import LONG


@pytest.fixture(scope="module")
def server(
    omlx: Omlx, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for all tests here; each begins with A resident, or what it loads."""
    base = tmp_path_factory.mktemp("base")
    # No key and no session is asked for on the admin routes.
    settings = {"auth": {"skip_api_key_verification": True}}
    (base / "settings.json").write_text(json.dumps(settings))
    (base / "model_profiles.json").write_text(json.dumps(PROFILES))
    extra = {"python": omlx.python} if omlx.python else {}
    with Server(
        models,
        base,
        patched=True,
        source=omlx.source,
        plan={"load_s": 0.3},
        environment={"OMLX_ADMISSION_MAX_AGE_S": "1"},
        **extra,
    ) as running:
        yield running


#: Two profiles of D whose settings matter at its load, asked for as models.
PROFILES = {
    "version": 1,
    "profiles": {
        "d": {
            name: {
                "name": name,
                "display_name": name,
                "api_name": name,
                "expose_as_model": True,
                "settings": {"index_cache_freq": freq},
            }
            for name, freq in (("fast", 2), ("slow", 4))
        }
    },
}


class Log:
    """What the server's log says from now on."""

    def __init__(self, server: Server) -> None:
        self._server, self._seen = server, len(server.log)

    @property
    def text(self) -> str:
        return self._server.log[self._seen :]

    @property
    def loads(self) -> list[str]:
        """Models whose load ended, in order."""
        return re.findall(r"admission: '(\w+)' resident", self.text)


@pytest.fixture
def log(server: Server) -> Log:
    """The server with nothing loaded, and its log from here on."""
    for model in "abd":
        httpx.post(f"{server.url}/v1/models/{model}/unload", timeout=60, **LOCAL)
    return Log(server)


@pytest.fixture
def real(omlx: Omlx) -> None:
    """Skip what the tests of the pool show on the stand-in already, and faster."""
    if omlx.name == "stand-in":
        pytest.skip("needs a real oMLX: --omlx-src DIR")


async def call(
    server: Server,
    method: str,
    path: str,
    *,
    delay: float = 0.0,
    hang_up_after: float | None = None,
    **options: Any,
) -> httpx.Response | None:
    """One call of an operator; None where the client hung up."""
    await asyncio.sleep(delay)
    async with httpx.AsyncClient(timeout=60, **LOCAL) as http:
        request = http.request(method, server.url + path, **options)
        try:
            return await asyncio.wait_for(request, hang_up_after)
        except TimeoutError:
            return None


PUBLIC = "/v1/models/a/unload"


async def test_b52_b60_an_unload_drains_and_all_who_ask_share_it(
    server: Server, log: Log
) -> None:
    client = Client(server.url)

    async def look(delay: float) -> tuple[int, Any]:
        await asyncio.sleep(delay)
        health, _ = await client.get("/health")
        return health, (await client.get("/admission/status"))[1]

    await client.chat("a")
    stream, late, *rest = await asyncio.gather(
        client.chat("a", tokens=LONG, stream=True),
        client.chat("a", delay=0.5),
        call(server, "POST", PUBLIC, delay=0.3),
        call(server, "POST", "/admin/api/models/a/unload", delay=0.4),
        call(server, "POST", "/admin/api/models/b/load", delay=0.6),
        call(server, "POST", PUBLIC + "?mode=if-idle", delay=0.2),
        call(server, "POST", "/admin/api/models/a/unload?mode=if-idle", delay=0.2),
        call(server, "POST", PUBLIC + "?mode=later", delay=0.2),
        look(0.8),
    )
    *answers, idle, idle_admin, wrong, seen = rest
    assert stream.ok, stream
    assert "[DONE]" in stream.body
    assert late.ok, late
    assert late.ended > stream.ended
    for answer in answers:
        assert answer.status_code == 200, answer.text
    # Both unloads are one; A and B came back, each once, in the order of their asking.
    assert log.loads[:3] == ["a", "a", "b"]
    assert log.text.count("'a' drains, to be unloaded by hand") == 1
    # Meanwhile: healthy, and the status says what A does and who waits for it.
    health, status = seen
    assert health == 200
    shown = next(m for m in status["models"] if m["model"] == "a")
    assert (shown["state"], shown["waiting"]) == ("draining", 1)
    assert shown["progress"]["for"] == "an unload by hand"
    assert status["health"]["ok"] is True
    assert max(m["oldest_s"] for m in status["queue"]["models"]) > 0
    first = status["queue"]["models"][0]
    assert (first["reason"], first["text"]) == (
        "draining",
        "'a' finishes what runs, and is unloaded",
    )
    assert idle.status_code == 409
    assert idle.json()["error"]["code"] == "model_not_idle"
    assert "1 running" in idle.json()["error"]["message"]
    assert idle.headers["x-should-retry"] == "false"
    assert idle_admin.status_code == 409
    assert idle_admin.json()["code"] == "model_not_idle"
    assert wrong.status_code == 400
    assert "drain, now, if-idle" in wrong.json()["error"]["message"]


class Cut:
    """An answer that is read until something of it is there, and then to its end."""

    def __init__(self, server: Server, route: str, stream: bool) -> None:
        self.route, self.stream, self.model = route, stream, "a"
        self.status, self.text = 0, ""
        self.begun = asyncio.Event()
        self._url = server.url + route
        limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
        self._body = {**ROUTES[route], "stream": stream, limit: 50 * LONG}

    async def read(self) -> Cut:
        async with (
            httpx.AsyncClient(timeout=60, **LOCAL) as http,
            http.stream(
                "POST", self._url, json={**self._body, "model": self.model}
            ) as response,
        ):
            self.status = response.status_code
            async for text in response.aiter_text():
                self.text += text
                # Of a plain answer the first thing is a blank.
                if not self.stream or re.search(
                    r"\"(content|text|delta)\": ?\"[^\"]", self.text
                ):
                    self.begun.set()
        return self

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Name and data of each event."""
        found = re.findall(r"(?:event: (\S+)\n)?data: (.+)\n\n", self.text)
        return [(name, d if d == "[DONE]" else json.loads(d)) for name, d in found]

    def assert_is_an_error(self) -> None:
        """Whole, in the shape of its route."""
        assert self.status == 200
        if not self.stream:
            content = json.loads(self.text)
            error = content["error"]
            assert (content.get("type") == "error") == (self.route == "/v1/messages")
        elif self.route == "/v1/messages":
            name, content = self.events[-1]
            error = content["error"]
            assert (name, content["type"]) == ("error", "error")
            assert "message_stop" not in self.text
            assert "end_turn" not in self.text
        elif self.route == "/v1/responses":
            *before, (name, content), (last, failed) = self.events
            error = content["error"]
            assert (name, last) == ("error", "response.failed")
            created = next(data for n, data in before if n == "response.created")
            assert failed["response"]["id"] == created["response"]["id"]
            assert failed["response"]["status"] == "failed"
            numbers = [data["sequence_number"] for _, data in self.events]
            assert numbers == sorted(set(numbers))
        else:
            (_, content), (_, done) = self.events[-2:]
            error = content["error"]
            assert done == "[DONE]"
        assert "[Error" not in self.text
        assert error["code"] == "model_unloading"
        assert "unloaded by hand" in error["message"]


DOORS = ["/v1/models/a/unload", "/admin/api/models/a/unload"]


@pytest.mark.parametrize("door", DOORS)
async def test_c20_c21_now_ends_every_answer_with_an_error_of_its_route(
    server: Server, log: Log, door: str
) -> None:
    client = Client(server.url)
    cuts = [Cut(server, route, stream) for route in ROUTES for stream in (False, True)]
    await client.chat("a")
    async with asyncio.TaskGroup() as group:
        for cut in cuts:
            group.create_task(cut.read())
        for cut in cuts:
            await cut.begun.wait()
        unload = await call(server, "POST", f"{door}?mode=now")
        late = await client.chat("a")
    assert (unload.status_code, unload.json()["status"]) == (200, "ok")
    assert late.ok, late
    for cut in cuts:
        cut.assert_is_an_error()
    assert log.loads == ["a", "a"]
    assert "Traceback" not in log.text


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("end", ["budget", "hang up"])
async def test_an_unload_that_ends_early_leaves_the_model_serving(
    server: Server, log: Log, end: str
) -> None:
    client = Client(server.url)
    await client.chat("a")
    options: dict[str, Any] = {"headers": {"X-OMLX-Max-Wait": "0.3"}}
    if end == "hang up":
        options = {"hang_up_after": 0.3}
    stream, unload, late = await asyncio.gather(
        client.chat("a", tokens=LONG, stream=True),
        call(server, "POST", PUBLIC, delay=0.2, **options),
        client.chat("a", delay=0.3),
    )
    assert stream.ok, stream
    assert late.ok, late
    assert late.ended < stream.ended, "it waits behind the gate only while the unload does"
    assert log.loads == ["a"]
    if end == "budget":
        assert unload.status_code == 503
        assert 1 <= int(unload.headers["retry-after"]) <= 60
        assert unload.json()["error"]["code"] == "model_busy"
        assert "mode=now" in unload.json()["error"]["message"]
    else:
        assert unload is None
    assert "the unload of 'a' is withdrawn" in log.text


async def test_b13_b14_two_profiles_of_a_model_take_turns(server: Server, log: Log) -> None:
    """Four clients without a pause on one, one on the other, one on another model."""
    client = Client(server.url)
    await client.chat("d:fast")
    done = asyncio.Event()
    answers: list[Answer] = []

    async def loop() -> None:
        while not done.is_set():
            answers.append(await client.chat("d:fast", tokens=4))

    clients = [asyncio.create_task(loop()) for _ in range(4)]
    others = []
    for _ in range(2):
        calls = [client.chat("d:slow", label="slow") for _ in range(3)]
        others += await asyncio.gather(*calls, client.chat("a", tokens=2))
    done.set()
    await asyncio.gather(*clients)
    assert all(a.ok for a in (*answers, *others)), [a for a in (*answers, *others) if not a.ok]
    # Not one reload for each request: the slow ones came together, twice.
    loads = log.loads.count("d")
    assert 3 <= loads <= 7, log.loads
    assert len(answers) > 2 * loads


@pytest.mark.usefixtures("real")
async def test_b13_identical_requests_of_a_profile_share_one_load(
    server: Server, log: Log
) -> None:
    client = Client(server.url)
    together = await asyncio.gather(*(client.chat("d:fast") for _ in range(4)))
    answers = [*together, await client.chat("d:fast"), await client.chat("d:fast")]
    assert all(a.ok for a in answers)
    assert log.loads == ["d"]


@pytest.mark.usefixtures("real")
async def test_a_settings_change_waits_for_what_runs(server: Server, log: Log) -> None:
    client = Client(server.url)
    path = "/admin/api/models/a/settings"
    await client.chat("a")
    stream, change, late = await asyncio.gather(
        client.chat("a", tokens=LONG, stream=True),
        call(server, "PUT", path, delay=0.3, json={"index_cache_freq": 2}),
        client.chat("a", delay=0.6),
    )
    # And one whose budget ends: the route says that it unloaded nothing.
    held, refused = await asyncio.gather(
        client.chat("a", tokens=LONG, stream=True),
        call(
            server,
            "PUT",
            path,
            delay=0.3,
            json={"index_cache_freq": 4},
            headers={"X-OMLX-Max-Wait": "0.2"},
        ),
    )
    answers = [stream, late, held, await client.chat("a")]
    assert all(a.ok for a in answers), answers
    assert change.json()["auto_unloaded"] is True
    assert refused.status_code == 200
    assert refused.json()["auto_unloaded"] is False
    # At first, with the first change, and with the second one when A was idle.
    assert log.loads == ["a", "a", "a"]


@pytest.mark.usefixtures("real")
async def test_b19_a_reload_of_the_models_leaves_no_engine_behind(
    server: Server, log: Log
) -> None:
    """Everything is unloaded and forgotten; meanwhile nothing is cut and nothing loads."""
    client = Client(server.url)
    await client.chat("a")
    stream, for_d, reload, late = await asyncio.gather(
        client.chat("a", tokens=LONG, stream=True),
        client.chat("d", delay=0.2),
        call(server, "POST", "/admin/api/reload", delay=0.4),
        client.chat("d", delay=0.8),
    )
    after = await client.chat("b")
    answers, status = [stream, for_d, late, after], (await client.get("/api/status"))[1]
    assert all(a.ok for a in answers), answers
    assert reload.status_code == 200, reload.text
    assert "b" in status["loaded_models"]
    # D served on until everything was forgotten, or came back after it.
    assert log.loads in (["a", "d", "b"], ["a", "d", "d", "b"])
    # What the pool counts is what is there: no engine is left that no entry knows.
    counted = sum(SIZES[m] for m in status["loaded_models"])
    assert status["model_memory_used"] == pytest.approx(counted * 1.05, rel=0.05)


@pytest.mark.parametrize("door", DOORS)
def test_c22_now_acts_while_another_model_loads(
    omlx: Omlx, models: Path, tmp_path: Path, door: str
) -> None:
    """The load of D does not end before all that is looked at has happened."""
    loads = tmp_path / "loads"
    settings = {"auth": {"skip_api_key_verification": True}}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "settings.json").write_text(json.dumps(settings))
    plan = {"hang": {"d": "await"}, "hang_until": str(loads)}
    extra = {"python": omlx.python} if omlx.python else {}
    with Server(
        models, tmp_path / "base", patched=True, source=omlx.source, plan=plan, **extra
    ) as server:
        client = Client(server.url)
        cut = Cut(server, "/v1/messages", stream=True)

        async def scenario() -> tuple[httpx.Response | None, Answer, Answer]:
            await client.chat("a")
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(cut.read())
                await cut.begun.wait()
                for_d = group.create_task(client.chat("d"))
                await said(server, "swapping to 'd'")
                unload = await call(server, "POST", f"{door}?mode=now")
                await reading
                late = group.create_task(client.chat("a"))
                assert not for_d.done()
                loads.touch()
            return unload, for_d.result(), late.result()

        unload, for_d, late = asyncio.run(scenario())
    assert (unload.status_code, unload.json()["status"]) == (200, "ok")
    cut.assert_is_an_error()
    assert for_d.ok, for_d
    assert late.ok, late


@pytest.mark.usefixtures("real")
async def test_p3_two_reloads_at_once_leave_no_engine_behind(server: Server, log: Log) -> None:
    """The stream does not end within the budget of the reloads."""
    cut = Cut(server, "/v1/messages", stream=True)
    cut.model = "d"
    client = Client(server.url)
    hasty = {"X-OMLX-Max-Wait": "1"}
    async with asyncio.TaskGroup() as group:
        group.create_task(cut.read())
        await cut.begun.wait()
        reloads = [
            group.create_task(call(server, "POST", "/admin/api/reload", headers=hasty))
            for _ in range(2)
        ]
    after = await client.chat("a")
    status = (await client.get("/api/status"))[1]
    reloads = [r.result() for r in reloads]
    assert [r.status_code for r in reloads] == [200, 200]
    cut.assert_is_an_error()
    assert after.ok, after
    assert status["loaded_models"] == ["a"]
    assert status["model_memory_used"] == pytest.approx(SIZES["a"] * 1.05, rel=0.05)
    assert len(re.findall(r"Unloading model: d\b", log.text)) == 1
