"""Loads that are slow, stuck or hung, and loads by hand, seen by clients."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from omlx_admission.surfaces.demo.client import Answer, Client
from standin.server import Server

from .conftest import loading, until

Serve = Callable[..., Server]


def swaps(server: Server) -> list[str]:
    """Models whose load ended, in order, as the log tells it."""
    return re.findall(r"admission: '(\w+)' resident", server.log)


def ask_for_no_key(folder: Path) -> None:
    """Nor for a session, on the admin's routes of the first server."""
    base = folder / "base0"
    base.mkdir()
    settings = {"auth": {"skip_api_key_verification": True}}
    (base / "settings.json").write_text(json.dumps(settings))


async def patiently(client: Client, model: str, tries: int) -> list[Answer]:
    """Ask until it is served, coming back exactly when told to."""
    answers = [await client.chat(model)]
    while not answers[-1].ok and len(answers) < tries:
        assert answers[-1].status == 503, answers[-1]
        await asyncio.sleep(int(answers[-1].headers["retry-after"]))
        answers.append(await client.chat(model))
    return answers


async def test_p1_a_load_that_nothing_works_for_is_given_up(
    serve: Serve, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    server = serve(
        load_s=0.1,
        plan={"hang": {"b": "await"}, "hang_until": str(over)},
        OMLX_ADMISSION_MAX_WAIT_S="3",
    )
    client = Client(server.url)
    hung = await client.chat("b")
    others = await patiently(client, "a", 4)
    over.touch()
    again = (await patiently(client, "b", 4))[-1]
    assert hung.status == 503
    assert others[-1].ok
    assert again.ok
    assert "no thread works for the load of 'b'" in server.log


async def test_p1_c4_a_load_at_work_is_loaded_once(serve: Serve) -> None:
    """It takes many times what the one before took, and four times the budget."""
    server = serve(
        load_s=0.1, plan={"per_model": {"b": [0.2, 14.0]}}, OMLX_ADMISSION_MAX_WAIT_S="3"
    )
    client = Client(server.url)
    assert (await client.chat("b")).ok
    assert (await client.chat("a")).ok
    answers = await patiently(client, "b", 10)
    assert answers[-1].ok
    assert len(answers) > 2, "the load was not slow at all"
    assert swaps(server) == ["b", "a", "b"]
    assert server.log.count("swapping to 'b'") == 2
    # It waited when the load ended, or came a moment later.
    hints = [int(a.headers["retry-after"]) for a in answers[:-1]]
    assert max(hints) <= 3, hints
    texts = [json.loads(a.body)["error"]["message"] for a in answers[:-1]]
    assert all("it is loading now" in text for text in texts), texts
    assert "s already" in texts[-1]


async def test_p1_a_stuck_load_costs_nobody_else_a_place(serve: Serve, tmp_path: Path) -> None:
    over = tmp_path / "over"
    server = serve(
        load_s=0.1,
        plan={"hang": {"b": "thread"}, "hang_until": str(over)},
        OMLX_ADMISSION_MAX_WAIT_S="6",
        OMLX_ADMISSION_MAX_AGE_S="0",
        OMLX_ADMISSION_MAX_MODELS="2",
        OMLX_ADMISSION_STUCK_S="2",
    )
    client = Client(server.url)
    assert (await client.chat("d")).ok
    stuck = asyncio.create_task(client.chat("b"))
    await until(loading(client, "b"))
    # It has no place, and could have one only once B has ended.
    beside = asyncio.create_task(client.chat("a"))
    served = []
    while not beside.done():
        served.append(await client.chat("d"))
    refused = [await stuck, await beside]
    served.append(await client.chat("d"))
    status = (await client.get("/admission/status"))[1]
    assert not status["health"]["ok"]
    assert {p["model"] for p in status["health"]["problems"]} == {"b"}, status["health"]
    states = {m["model"]: m["state"] for m in status["models"]}
    assert states["b"] == "loading"
    over.touch()
    assert (await patiently(client, "b", 4))[-1].ok
    assert [a.status for a in refused] == [503, 503]
    assert "'b'" in json.loads(refused[1].body)["error"]["message"]
    assert all(a.ok for a in served), served
    assert "evicting 'd'" not in server.log
    assert server.log.count("swapping to 'b'") == 1


@pytest.mark.parametrize("door", ["/v1/models", "/admin/api/models"])
async def test_c6_load_of_a_model_that_drains_waits_until_it_serves_again(
    serve: Serve, tmp_path: Path, door: str
) -> None:
    ask_for_no_key(tmp_path)
    server = serve(
        load_s=0.5,
        OMLX_ADMISSION_MAX_AGE_S="0",
        OMLX_ADMISSION_LINGER_S="0",
    )
    client = Client(server.url)
    assert (await client.chat("a")).ok
    stream = asyncio.create_task(client.chat("a", tokens=150, stream=True))
    for_b = asyncio.create_task(client.chat("b", delay=0.3))

    async def drains() -> bool:
        return "'a' drains for 'b'" in server.log

    await until(drains)
    loaded = await client.post(f"{door}/a/load", {})
    assert swaps(server) == ["a", "b", "a"]
    answers = [await stream, await for_b, loaded, await client.chat("a")]
    assert all(a.ok for a in answers), answers
    assert answers[2].body.count("Loaded a") == 1, answers[2]
    assert swaps(server) == ["a", "b", "a"]


@pytest.mark.parametrize("door", ["/v1/models", "/admin/api/models"])
async def test_c24_a_load_joins_a_load(serve: Serve, tmp_path: Path, door: str) -> None:
    ask_for_no_key(tmp_path)
    server = serve(load_s=3.0)
    client = Client(server.url)
    first = asyncio.create_task(client.post(f"{door}/b/load", {}))
    await until(loading(client, "b"))
    answers = [await client.post(f"{door}/b/load", {}), await first]
    assert [a.status for a in answers] == [200, 200], answers
    assert swaps(server) == ["b"]


async def test_c5_what_was_loaded_by_hand_is_there_at_its_first_use(serve: Serve) -> None:
    """Three clients keep A wanted all the time."""
    server = serve(load_s=0.5, OMLX_ADMISSION_MAX_AGE_S="1", OMLX_ADMISSION_LINGER_S="0")
    client = Client(server.url)
    over = asyncio.Event()
    others: list[Answer] = []

    async def use() -> None:
        while not over.is_set():
            others.append(await client.chat("a", tokens=20))

    users = [asyncio.create_task(use()) for _ in range(3)]

    async def in_use() -> bool:
        return len(others) >= 3

    await until(in_use)
    loaded = await client.post("/v1/models/b/load", {})
    await asyncio.sleep(0.5)
    assert swaps(server)[-1] == "b", "it stays though A is wanted"
    used = await client.chat("b")
    assert swaps(server).count("b") == 1
    over.set()
    await asyncio.gather(*users)
    answers = [loaded, used, *others]
    assert all(a.ok for a in answers), answers
