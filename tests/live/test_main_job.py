"""The main job, seen by clients: every request is served or truthfully refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.surfaces.demo.client import Client
from standin.server import Server

from .conftest import Omlx, loading, said, streaming, until

Serve = Callable[..., Server]

#: Enough tokens of A for a stream that outlasts the requests beside it.
LONG = 150


def swaps(server: Server) -> list[str]:
    """Models whose load ended, in order, as the log tells it."""
    return re.findall(r"admission: '(\w+)' resident", server.log)


async def test_b01_a_cold_model_evicts_the_resident_and_both_are_served(serve: Serve) -> None:
    server = serve(load_s=1.5)
    client = Client(server.url)
    warm = await client.chat("a")
    for_b = asyncio.create_task(client.chat("b"))
    await said(server, "swapping to 'b'")
    for_a = await client.chat("a")
    answers = [warm, await for_b, for_a]
    assert [a.status for a in answers] == [200, 200, 200]
    assert all(a.whole for a in answers)
    assert answers[1].ended < answers[2].ended
    assert swaps(server) == ["a", "b", "a"]


async def test_b02_the_busy_model_finishes_before_it_leaves(serve: Serve) -> None:
    server = serve(load_s=1.0)
    client = Client(server.url)
    await client.chat("a")
    long_a = await streaming(server)
    for_b = asyncio.create_task(client.chat("b"))
    await said(server, "waits for 'b'")
    long_a, for_b, late_a = await asyncio.gather(long_a, for_b, client.chat("a"))
    for answer in (long_a, for_b, late_a):
        assert answer.ok, answer
    assert "[DONE]" in long_a.body
    assert for_b.ended > long_a.ended
    assert swaps(server)[:2] == ["a", "b"]


async def test_b04_a_gate_that_closes_at_once_cuts_nobody(serve: Serve) -> None:
    """W = 0: the drain begins while A streams; A's stream is whole all the same."""
    server = serve(load_s=0.5, OMLX_ADMISSION_MAX_AGE_S="0")
    client = Client(server.url)
    await client.chat("a")
    long_a = await streaming(server)
    for_b = asyncio.create_task(client.chat("b"))
    await said(server, "'a' drains for 'b'")
    answers = await asyncio.gather(
        long_a, for_b, client.chat("a"), client.chat("b", stream=True)
    )
    assert all(a.ok for a in answers), answers
    # B's waiters were served by one load, then A's newcomer, queued behind the gate.
    assert swaps(server) == ["a", "b", "a"]
    assert "'a' drains for 'b'" in server.log


async def test_k2_a_model_that_never_fits_costs_nobody_anything(serve: Serve) -> None:
    server = serve(load_s=0.2)
    client = Client(server.url)
    await client.chat("a")
    answer = await client.chat("x")
    status = (await client.get("/api/status"))[1]
    assert answer.status == 507
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert json.loads(answer.body)["error"]["code"] == "model_too_large"
    assert status["loaded_models"] == ["a"]


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


async def test_b30_the_budget_ends_in_503_before_any_byte_on_every_route(serve: Serve) -> None:
    server = serve(load_s=0.2, OMLX_ADMISSION_MAX_WAIT_S="2")
    client = Client(server.url)
    await client.chat("a")
    stream = await streaming(server, tokens=4 * LONG)
    calls = [
        client.post(
            path,
            {"model": "b", "max_tokens": 8, "stream": stream_it, **body},
            label=f"{path} {'stream' if stream_it else 'json'}",
        )
        for path, body in ROUTES.items()
        for stream_it in (False, True)
    ]
    answers = await asyncio.gather(*calls)
    stream = await stream
    assert stream.ok, stream
    for answer in answers:
        assert answer.status == 503, answer
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["content-type"] == "application/json"
        body = json.loads(answer.body)
        if answer.label.startswith("/v1/messages"):
            assert body["type"] == "error"
            assert body["error"]["type"] == "overloaded_error"
        else:
            assert body["error"]["type"] == "server_error"
        assert body["error"]["code"] == "model_swap_timeout"
        assert "'a'" in body["error"]["message"]
        # B27: an agent that reads these words deletes its history.
        assert not re.search("prompt|context|token", body["error"]["message"], re.I)


@pytest.mark.parametrize("when", ["queued", "draining", "loading"])
async def test_b16_b32_a_client_that_leaves_leaves_nothing(serve: Serve, when: str) -> None:
    age = "0" if when == "draining" else "100"
    server = serve(load_s=1.5, OMLX_ADMISSION_MAX_AGE_S=age)
    client = Client(server.url)
    await client.chat("a")
    streams = [] if when == "loading" else [await streaming(server)]
    for_b = asyncio.create_task(client.chat("b"))
    if when == "loading":
        await until(loading(client, "b"))
    else:
        await said(server, "waits for 'b'" if when == "queued" else "'a' drains for 'b'")
    for_b.cancel()
    answers = [*await asyncio.gather(*streams), await client.chat("a")]
    status = (await client.get("/api/status"))[1]
    assert answers[-1].ok, answers[-1]
    if when == "loading":
        # The load could not be stopped; it ended, was accounted for, and left again.
        assert swaps(server) == ["a", "b", "a"]
        assert "0 served" in server.log
    else:
        assert answers[0].ok, answers[0]
        assert swaps(server) == ["a"]
        assert "swapping to 'b'" not in server.log
    assert status["loaded_models"] == ["a"]
    if when == "draining":
        assert "the drain of 'a' is withdrawn" in server.log


async def test_b23_b33_one_load_for_all_though_the_first_one_leaves(serve: Serve) -> None:
    server = serve(load_s=1.5)
    client = Client(server.url)
    gone = asyncio.create_task(client.chat("d"))
    await until(loading(client, "d"))
    rest = [asyncio.create_task(client.chat("d", stream=n % 2 == 0)) for n in range(6)]
    await said(server, "waits for 'd'", 2)
    gone.cancel()
    answers = list(await asyncio.gather(*rest))
    assert all(a.ok for a in answers)
    assert swaps(server) == ["d"]


async def test_b51_a_broken_model_fails_fast_and_disturbs_nobody(serve: Serve) -> None:
    server = serve(load_s=0.5, failing=("d",))
    client = Client(server.url)
    await client.chat("a")
    together = await asyncio.gather(*(client.chat("d") for _ in range(3)))
    later = await client.chat("d")
    answers = [*together, later, await client.chat("a")]
    for answer in answers[:-1]:
        # No conflict (409), which stock clients try again: the same load would fail again.
        assert answer.status == 500
        assert answer.headers["x-should-retry"] == "false"
        assert json.loads(answer.body)["error"]["code"] == "model_load_failed"
    assert answers[-1].ok
    assert server.log.count("the plan says that loading d fails") >= 1
    assert swaps(server) == ["a"]


async def test_switched_off_it_is_stock(serve: Serve, omlx: Omlx) -> None:
    """`OMLX_ADMISSION=0`: the refusals that the queue exists to end are back.

    With the changes in oMLX itself, of which the queue alone has a switch, the refusal
    still says that it passes.
    """
    server = serve(load_s=0.5, OMLX_ADMISSION="0")
    client = Client(server.url)
    await client.chat("a")
    stream = await streaming(server)
    for_b = await client.chat("b")
    stream, for_b = [await stream, for_b]
    assert stream.ok
    assert for_b.status == (503 if omlx.native else 507)
    assert "admission:" not in server.log


async def test_a_server_that_ends_refuses_who_waits_and_finishes_who_runs(serve: Serve) -> None:
    server = serve(load_s=0.3)
    client = Client(server.url)
    await client.chat("a")

    stream = await streaming(server)
    for_b = asyncio.create_task(client.chat("b"))
    await said(server, "waits for 'b'")
    os.kill(server.pid, signal.SIGTERM)
    stream, for_b = list(await asyncio.gather(stream, for_b))
    assert stream.ok, stream
    assert for_b.status == 503
    assert json.loads(for_b.body)["error"]["code"] == "shutting_down"
    assert for_b.ended < stream.ended


@pytest.mark.parametrize("change", ["signature", "version"])
def test_an_unknown_omlx_runs_stock_and_says_so(
    omlx: Omlx, models: Path, tmp_path: Path, change: str
) -> None:
    if omlx.native:
        pytest.skip("about this package, which does not run there")
    source = tmp_path / "changed"
    ignored = shutil.ignore_patterns("eval", "__pycache__")
    shutil.copytree(omlx.source / "omlx", source / "omlx", ignore=ignored)
    if change == "signature":
        path, old, new = (
            "engine_pool.py",
            "force_lm: bool = False,",
            "force_lm: int = 0, *, z=0,",
        )
        # Only the pool's own method is changed; its callers pass keywords.
        text = (source / "omlx" / path).read_text()
        head, _, tail = text.partition("async def get_engine(")
        assert old in tail
        changed = head + "async def get_engine(" + tail.replace(old, new, 1)
    else:
        path = "_version.py"
        changed = '__version__ = "9.0.0"\nSTANDIN = True\n'
    (source / "omlx" / path).write_text(changed)
    extra = {"python": omlx.python} if omlx.python else {}
    plan = {"load_s": 0.1}
    with Server(models, tmp_path / "base", True, source=source, plan=plan, **extra) as server:
        assert asyncio.run(Client(server.url).chat("d")).ok
        said = [line for line in server.log.splitlines() if "runs stock" in line]
    assert len(said) == 1
    if change == "version":
        assert "oMLX 9.0.0 is outside the supported range" in said[0]
    else:
        # The errors pass whatever arguments on; the others bind them.
        off = "resident, queue, unloads, leases, off_loop_close, dead_engines, prompt_guard"
        assert f" {off}, stream_hold: " in said[0]
        assert "EnginePool.get_engine takes" in said[0]
