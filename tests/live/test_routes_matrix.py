"""Every route by every outcome, and reported cases that clients see, each under its id."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import standin
from benchmarks.routes_matrix.outcomes import OUTCOMES
from benchmarks.routes_matrix.routes import KEY, ROUTES, Reply, make_models
from benchmarks.routes_matrix.table import problems
from omlx_admission.surfaces.demo.client import Answer
from standin import tinymodels
from standin.server import Server

from .conftest import Omlx
from .house import KINDS, House, error_of, start

Open = Callable[..., House]

#: Model and wait budget in, the error and the number of tries out.
Call = Callable[[str, str | None], tuple[Any, int]]

CHAT = ROUTES[0]
EMBED = next(route for route in ROUTES if route.kind == "embed")
LOAD = next(route for route in ROUTES if route.path.startswith("/v1/models"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the table, and ``small`` and ``tiny`` that fit beside any, and ``nearly``
    that fits beside nothing at all."""
    root = make_models(tmp_path_factory.mktemp("routes"))
    tinymodels.make_text_model(root, name="small", counted_bytes=300_000_000)
    tinymodels.make_embedder(root, name="tiny", counted_bytes=100_000_000)
    tinymodels.make_text_model(root, name="nearly", counted_bytes=2_700_000_000)
    return root


@pytest.fixture(scope="module")
def house(omlx: Omlx, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    running: dict[str, Server] = {}

    def open_house(kind: str = "plain") -> House:
        if kind not in running:
            base = tmp_path_factory.mktemp(kind.replace(" ", "-"))
            running[kind] = start(kind, omlx, models, base)
        return House(running[kind], len(running[kind].log))

    yield open_house
    for server in running.values():
        server.__exit__()


async def test_b11_residents_answer_while_another_model_loads(house: Open) -> None:
    here = house()
    await here.chat("small")
    await here.ask(EMBED, "tiny")
    load = asyncio.create_task(here.chat("any"))
    await here.said("swapping to 'any'")
    beside = [here.chat("small", tokens=4) for _ in range(5)]
    vectors = [here.ask(EMBED, "tiny") for _ in range(5)]
    answers = await asyncio.gather(*beside, *vectors)
    # Order, not time: the load is still under way.
    assert "'any' resident" not in here.log
    answers, load = list(answers), await load
    assert [a.status for a in answers] == [200] * 10
    assert load.ok


async def test_b28_never_is_said_at_once_and_costs_nobody(house: Open) -> None:
    """On an idle server, beside a pinned model, and with an idle one resident."""
    here = house("settings")
    replies = [await here.ask(CHAT, "text-never"), await here.ask(CHAT, "nearly")]
    assert (await here.ask(CHAT, "text")).status == 200
    replies.append(await here.ask(CHAT, "text-never"))
    loaded = await here.loaded()
    for reply in replies:
        assert reply.status == 507, reply
        assert "retry-after" not in reply.headers
    assert "'small'" in error_of(replies[1])["message"]
    assert loaded == ["small", "text"]


async def test_b29_a_full_queue_says_so_at_once_and_a_place_is_free_again(house: Open) -> None:
    here = house("short queue")
    stream = await here.busy()
    first = asyncio.create_task(here.ask(CHAT, "text"))
    await here.said("waits for 'text'")
    refused = [await here.ask(CHAT, "text") for _ in range(3)]
    # Who is loaded has no queue of ours.
    beside = [await here.chat("busy", tokens=2) for _ in range(2)]
    first.cancel()
    await here.said("for 'text' cancelled after")
    again = asyncio.create_task(here.ask(CHAT, "text"))
    await here.said("waits for 'text'", 2)
    await here.hang_up(stream)
    served = await again
    for reply in refused:
        assert reply.status == 503
        assert error_of(reply)["code"] == "admission_queue_full"
        assert int(reply.headers["retry-after"]) >= 1
    assert served.status == 200
    assert all(answer.ok for answer in beside)


async def test_b31_nothing_is_sent_before_a_model_is_there(house: Open) -> None:
    """A client bounds its wait by its read timeout; an embedder behind a busy model."""
    here = house()
    stream = await here.busy()
    body = {"model": "text", **CHAT.body}
    asked = [
        asyncio.create_task(here.post("/v1/embeddings", {"model": "embed", "input": "hello"})),
        asyncio.create_task(here.post("/v1/chat/completions", body)),
    ]
    for model in ("embed", "text"):
        await here.said(f"waits for '{model}'")
    early = [task.done() for task in asked]
    await here.hang_up(stream)
    answers = list(await asyncio.gather(*asked))
    assert early == [False, False]
    for answer in answers:
        assert answer.ok, answer
        # Whole milliseconds between the question and the first byte were the wait.
        waited = int(answer.headers["x-omlx-admission-wait-ms"]) / 1000
        assert answer.first_byte is not None
        assert 0 < waited <= answer.first_byte - answer.started
        json.loads(answer.body)


async def test_b32_who_sends_again_is_served_once_and_no_wait_is_no_wait(house: Open) -> None:
    here = house()
    stream = await here.busy()
    for turn in range(1, 4):
        calls = [asyncio.create_task(here.chat("text")) for _ in range(5)]
        await here.said("waits for 'text'", 5 * turn)
        for call in calls:
            call.cancel()
        await here.said("for 'text' cancelled after", 5 * turn)
    last = asyncio.gather(*(here.chat("text") for _ in range(5)))
    await here.said("waits for 'text'", 20)
    at_once = await here.ask(CHAT, "any", max_wait=0)
    loaded = await here.loaded()
    await here.hang_up(stream)
    answers = await last
    assert all(answer.ok for answer in answers)
    assert here.swaps.count("text") == 1
    assert re.search(r"'text' resident after [0-9.]+ s, 5 served", here.log)
    assert at_once.status == 503
    assert error_of(at_once)["code"] == "model_busy"
    assert int(at_once.headers["retry-after"]) >= 1
    # No eviction and no load for it.
    assert "busy" in loaded
    assert "swapping to 'any'" not in here.log


async def test_b46_an_unknown_name_gets_the_default_model_or_its_refusal(house: Open) -> None:
    here = house("settings")
    stream = await here.busy()
    text = [route for route in ROUTES if route.kind == "text"]
    calls = [here.ask(route, "nobody", max_wait=0.3) for route in text]
    refused = list(await asyncio.gather(*calls))
    await here.hang_up(stream)
    turns: list[Answer] = []
    for _ in range(3):
        main = asyncio.create_task(here.chat("busy", tokens=10))
        await asyncio.sleep(0.05)
        turns += await asyncio.gather(main, *(here.chat("nobody") for _ in range(3)))
    assert len(refused) == 9
    for reply in refused:
        assert reply.status == 503, reply
        assert int(reply.headers["retry-after"]) >= 1
        assert error_of(reply)["code"] in ("model_swap_timeout", "model_busy")
    assert [answer.status for answer in turns] == [200] * 12
    # Batched: three requests of a turn share one swap.
    assert 1 <= here.swaps.count("text") <= 3


async def test_b50_a_failed_load_leaves_its_room_to_the_next(house: Open) -> None:
    here = house()
    fails = asyncio.create_task(here.ask(CHAT, "any-broken"))
    await here.said("swapping to 'any-broken'")
    following = await here.ask(CHAT, "text")
    first, again, following = [await fails, await here.ask(CHAT, "any-broken"), following]
    for reply in (first, again):
        assert reply.status == 500
        assert reply.headers["x-should-retry"] == "false"
        assert error_of(reply)["code"] == "model_load_failed"
    assert following.status == 200
    # Once and never again: the second request did not try.
    assert here.log.count("swapping to 'any-broken'") == 1


async def test_b57_the_same_swap_however_the_model_was_loaded(house: Open) -> None:
    """Loaded by a load route; then one place for two models that would fit together."""
    here = house("one model")
    answers: list[Any] = [await here.ask(LOAD, "busy")]
    answers.append(await here.ask(CHAT, "text"))
    answers.append(await here.ask(CHAT, "small"))
    assert await here.loaded() == ["small"]
    stream = await here.busy()
    waiting = asyncio.create_task(here.ask(LOAD, "small"))
    await here.said("waits for 'small'", 2)
    assert await here.loaded() == ["busy"]
    await here.hang_up(stream)
    answers = [*answers, await waiting]
    assert [answer.status for answer in answers] == [200] * 4
    assert here.swaps == ["busy", "text", "small", "busy", "small"]


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_b27_stock_clients_read_each_refusal_as_what_it_is(house: Open, name: str) -> None:
    package: Any = pytest.importorskip(name)
    here = house()

    async def scenario(call: Call) -> dict[str, tuple[Any, int]]:
        seen = {}
        for model in ("text-never", "text-broken", "nobody", "embed"):
            seen[model] = await asyncio.to_thread(call, model, None)
        stream = await here.busy()
        seen["text"] = await asyncio.to_thread(call, "text", "0.2")
        await here.hang_up(stream)
        return seen

    with stock_client(package, here) as call:
        seen = asyncio.run(scenario(call))
    status = {model: error.status_code for model, (error, _) in seen.items()}
    expected = {
        "text-never": 507,
        "text-broken": 500,
        "nobody": 404,
        "embed": 400,
        "text": 503,
    }
    assert status == expected
    # What passes is tried again, twice by default; nothing else is.
    tries = {model: count for model, (_, count) in seen.items()}
    assert tries == {**dict.fromkeys(status, 1), "text": 3}
    assert isinstance(seen["text"][0], package.InternalServerError)
    for model, (error, _) in seen.items():
        if model != "nobody":
            assert not re.search("prompt|context|token", str(error.body), re.I), model
    kinds = {"openai": "model_swap_timeout", "anthropic": "overloaded_error"}
    assert kinds[name] in str(seen["text"][0].body)


@contextmanager
def stock_client(package: Any, here: House) -> Iterator[Call]:
    """A call that counts the tries of a stock client and skips the pauses between them."""
    tries = 0

    def counted(_request: object) -> None:
        nonlocal tries
        tries += 1

    http = package.DefaultHttpxClient(event_hooks={"request": [counted]}, trust_env=False)
    openai = package.__name__ == "openai"
    kind = package.OpenAI if openai else package.Anthropic
    url = here.server.url + ("/v1" if openai else "")
    client = kind(api_key=KEY, base_url=url, http_client=http)
    client._sleep_for_retry = lambda **_: None
    messages = [{"role": "user", "content": "hi"}]

    def call(model: str, max_wait: str | None) -> tuple[Any, int]:
        nonlocal tries
        tries = 0
        create = client.chat.completions.create if openai else client.messages.create
        headers = {"x-omlx-max-wait": max_wait} if max_wait else None
        with pytest.raises(package.APIStatusError) as caught:
            create(model=model, messages=messages, max_tokens=4, extra_headers=headers)
        return caught.value, tries

    with client:
        yield call


def test_what_is_uploaded_is_asked_for_and_the_best_document_comes_first(house: Open) -> None:
    here = house()

    async def scenario() -> tuple[list[Reply], Reply]:
        uploads = [replace(route, form=False) for route in ROUTES if route.form]
        without = [await here.ask(route, route.kind) for route in uploads]
        rerank = next(route for route in ROUTES if route.kind == "rerank")
        body = {"query": "cats", "documents": ["dogs", "cats", "x"], "top_n": 2}
        return without, await here.ask(replace(rerank, body=body), "rerank")

    without, ranked = asyncio.run(scenario())
    assert [reply.status for reply in without] == [422, 422]
    best, second = json.loads(ranked.body)["results"]
    assert best["relevance_score"] >= second["relevance_score"]
    assert {best["index"], second["index"]} < {0, 1, 2}
    if here.server.source == standin.PATH:  # whose scores say how much two texts share
        assert best["index"] == 1
        assert best["relevance_score"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kind", ["short queue", "plain"])
def test_every_door_gives_the_right_answer(house: Open, kind: str) -> None:
    """B01 B02 B27 B28 B29 B30 B50 B51 on 16 routes: what docs/outcomes.md says.

    The last test: the last outcome is that the server ends.
    """
    found = []
    for outcome in OUTCOMES:
        if dict(outcome.environment) == KINDS[kind][0]:
            found += problems(outcome, asyncio.run(outcome.moment(house(kind).server)))
    assert found == []
