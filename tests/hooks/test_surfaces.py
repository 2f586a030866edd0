"""The surfaces on the pool: what is read is true in every state, and nothing is locked."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from omlx_admission.hooks.server import surfaces
from omlx_admission.observation import observe
from omlx_admission.observation.observe import Observer
from omlx_admission.settings import Settings
from omlx_admission.surfaces import status

from .conftest import House, Make, settle, until

VALIDATOR = jsonschema.Draft202012Validator(status.schema())


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Observer:
    fresh = Observer()
    monkeypatch.setattr(observe, "observer", fresh)
    return fresh


def server(house: House) -> Any:
    return SimpleNamespace(_server_state=SimpleNamespace(engine_pool=house.pool))


def read(house: House) -> dict[str, Any]:
    document = status.build(surfaces.facts(server(house)), observe.observer, timeline=True)
    VALIDATOR.validate(json.loads(json.dumps(document)))
    return document


def states(house: House) -> dict[str, str]:
    return {m["model"]: m["state"] for m in read(house)["models"] if m["state"] != "absent"}


async def test_a_swap_from_end_to_end(make_house: Make, seen: Observer) -> None:
    house = make_house(max_age_s=0.0)
    assert states(house) == {}
    assert not read(house)["queue"]["active"]
    await house.get("a")
    assert states(house) == {"a": "resident"}
    assert read(house)["models"][0]["leases"] == 1
    house.hold_loads = house.hold_unloads = True
    task = house.ask("b")
    await until(lambda: house.entry("a").pending_unload_reason is not None)
    assert states(house) == {"a": "draining", "b": "queued"}
    assert read(house)["swap"]["phase"] == "draining"
    await house.release("a")
    await until(lambda: "unload a" in house.events)
    assert states(house) == {"a": "unloading", "b": "queued"}
    await house.let_unload("a")
    await until(lambda: house.entry("b").is_loading)
    assert states(house) == {"b": "loading"}
    document = read(house)
    assert document["swap"]["phase"] == "loading"
    assert document["models"][0]["progress"] is not None
    assert document["memory"]["reserved_bytes"] > 0
    await house.let_load("b")
    await task
    assert states(house) == {"b": "resident"}
    swap = read(house)["swaps"][0]
    told = [swap[name] for name in ("target", "victims", "result", "served")]
    assert told == ["b", ["a"], "loaded", 1]
    of_a = {kind for kind, _, _ in read(house)["timeline"]["states"]["a"]}
    assert of_a == {"loading", "resident", "draining", "unloading"}
    await house.release("b")
    assert seen.progress == {}
    assert all(level.value == 0 for level in seen.levels.values())


async def test_it_is_read_while_another_holds_the_lock(house: House) -> None:
    await house.get("a")
    async with house.pool._lock:
        assert states(house) == {"a": "resident"}


@pytest.mark.parametrize("outcome", ["expired", "cancelled", "refused", "failed"])
async def test_every_end_of_a_wait_is_counted_once(
    outcome: str, make_house: Make, seen: Observer
) -> None:
    house = make_house(max_age_s=100.0)
    if outcome == "failed":
        house.fail["b"] = RuntimeError("no weights")
    else:
        await house.get("a")
    if outcome == "expired":
        # Only now: the first load took as long as it took.
        house.admission.config = replace(house.admission.config, max_wait_s=0.02)
    task = house.ask("x" if outcome == "refused" else "b")
    await settle()
    if outcome == "cancelled":
        task.cancel()
    with pytest.raises((Exception, asyncio.CancelledError)):
        await task
    counts = {key: w.count for key, w in seen.waits.items() if key[0] != "a"}
    assert counts == {("x" if outcome == "refused" else "b", outcome): 1}
    document = read(house)
    assert document["queue"]["waiting"] == 0
    codes = [r["code"] for r in document["refusals"]]
    expected = {"expired": ["model_swap_timeout"], "refused": ["model_too_large"]}
    assert codes == expected.get(outcome, [])
    if outcome == "failed":
        assert document["swaps"][0]["result"] == "failed"
        assert document["totals"]["load_failures"] == 1
        # The pool's own error may name files.
        assert "no weights" not in json.dumps(document)
    assert all(level.value == 0 for level in seen.levels.values())


async def test_loads_and_unloads_of_others_are_seen_too(
    make_house: Make, seen: Observer
) -> None:
    house = make_house(features={"resident"})
    await house.use("d")
    async with house.pool._lock:
        await house.pool._unload_engine("d")
    assert seen.loads["d"].count == 1
    assert seen.unloads["d"].count == 1
    assert seen.eviction_age.count == 1
    assert seen.swaps.maxlen
    assert not seen.swaps, "no queue, no swap"
    await house.pool._unload_engine("d")
    assert seen.unloads["d"].count == 1, "there was nothing to unload"


async def test_a_broken_queue_is_told(house: House) -> None:
    await house.get("a")
    house.admission.broken = True
    document = read(house)
    assert [p["kind"] for p in document["health"]["problems"]] == ["queue"]


async def test_the_cache_budget_is_checked_engine_by_engine(house: House) -> None:
    budget = SimpleNamespace(max_bytes=1000, _total_bytes=10)
    house.pool._scheduler_config = SimpleNamespace(hot_cache_budget=budget)
    for model, mine in (("a", budget), ("d", SimpleNamespace())):
        scheduler = SimpleNamespace(config=SimpleNamespace(hot_cache_budget=mine))
        core = SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler))
        (await house.get(model))._engine = core
    cache = {"limit_bytes": 1000, "used_bytes": 10, "engines": 2, "shared": 1}
    assert read(house)["cache"] == {**cache, "one_budget": False}


def fake_server() -> Any:
    async def verify_api_key(request: Any, credentials: Any) -> bool:
        return True

    async def security(request: Any) -> None:
        return None

    return SimpleNamespace(
        __name__="omlx.server",
        app=SimpleNamespace(router=SimpleNamespace(routes=["stock"])),
        init_server=lambda: "made",
        verify_api_key=verify_api_key,
        security=security,
    )


def wanted(**values: Any) -> Any:
    return SimpleNamespace(settings=Settings(**values), features=frozenset({"queue"}))


def test_the_routes_come_first_and_go_again(seen: Observer) -> None:
    from omlx_admission.hooks.patching.ledger import Ledger

    module, ledger = fake_server(), Ledger()
    surfaces.apply_server(module, ledger, wanted(stuck_s=7.0, max_wait_s=40.0))
    paths = ["", "/status", "/status/schema", "/metrics", "/events"]
    found = [getattr(r, "path", r) for r in module.app.router.routes]
    assert found == [*(f"/admission{path}" for path in paths), "stock"]
    assert (seen.stuck_s, seen.budget_s) == (7.0, 40.0)
    assert set(seen.sections()) == {"gpu_turn", "exposure"}
    assert module.init_server() == "made"
    assert seen._watching is not None
    ledger.undo()
    seen.reset()  # as install does, for all features
    assert module.app.router.routes == ["stock"]
    assert seen.sections() == {}
    assert seen._watching is None


def test_routes_that_cannot_be_added_cost_nothing_else(
    seen: Observer, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from omlx_admission.core import faults
    from omlx_admission.hooks.patching.ledger import Ledger
    from omlx_admission.surfaces import routes

    mocker.patch.object(faults, "_noted", set())
    mocker.patch.object(routes, "make", side_effect=RuntimeError("no"))
    module, ledger = fake_server(), Ledger()
    surfaces.apply_server(module, ledger, wanted())
    assert module.app.router.routes == ["stock"]
    assert "routes of /admission failed" in caplog.text
    ledger.undo()


async def test_a_drain_that_hangs_is_told(
    make_house: Make, seen: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(max_age_s=0.0)
    seen.stuck_s = 20.0
    await house.get("a")
    task = house.ask("b")
    await until(lambda: ("drain", "a") in seen.progress)
    assert read(house)["health"]["ok"]
    later = seen.clock() + 21.0
    seen.clock = lambda: later
    seen.check_stuck()
    (problem,) = read(house)["health"]["problems"]
    assert (problem["kind"], problem["model"]) == ("drain", "a")
    assert "admission: stuck: the drain of 'a' for 'b'" in caplog.text
    await house.release("a")
    await task
    assert read(house)["health"]["ok"]
    await house.release("b")


def test_g1_a_turn_that_hangs_is_told_without_its_stack(
    seen: Observer, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from omlx_admission.gpu_turn import turn as gpu_turn
    from omlx_admission.hooks.server import surface_sections

    now = 100.0
    turn = gpu_turn.GpuTurn(stuck_s=60.0, clock=lambda: now)
    mocker.patch.object(gpu_turn, "current", turn)
    surface_sections.register(seen)
    facts = surfaces.Facts()
    hold = turn.acquire("a", "decode burst")
    now = 1000.0
    # However long a prompt is: no work waits, and nothing is wrong.
    assert status.build(facts, seen)["health"]["ok"]
    mocker.patch.object(gpu_turn, "LOOK_S", 0.001)
    waiter = threading.Thread(target=lambda: turn.acquire("b", "decode burst").release())
    waiter.start()
    while not turn.snapshot().waiting:
        assert waiter.is_alive()
    now = 1060.0
    assert status.build(facts, seen)["health"]["ok"]
    now = 1061.5
    while "has held the GPU turn" not in caplog.text:
        assert waiter.is_alive()
    seen.check_stuck()
    document = status.build(facts, seen)
    VALIDATOR.validate(json.loads(json.dumps(document)))
    (problem,) = document["health"]["problems"]
    assert (problem["kind"], problem["model"], problem["limit_s"]) == ("turn", "a", 60.0)
    assert document["gpu_turn"]["stuck"]
    assert document["gpu_turn"]["site"] == "decode burst"
    # The stack goes to the log: it names files.
    assert "test_surfaces" not in json.dumps(document)
    assert "'a' (decode burst) has held the GPU turn for 62 s while others" in caplog.text
    hold.release()
    waiter.join()
    seen.check_stuck()
    assert status.build(facts, seen)["health"]["ok"]
    assert "the turn of 'a' goes on" in caplog.text
    assert seen.turn_holds["a"].count == 1


def test_g10_the_places_of_the_turn_are_those_of_the_code_that_runs(mocker: Any) -> None:
    """An upgrade under a running server changes the sources, and a poll must not read them."""
    from omlx_admission.hooks import install
    from omlx_admission.hooks.gpu import sites
    from omlx_admission.hooks.server import surface_sections

    found = [sites.Site("decode burst", True, "as it was at the start")]
    mocker.patch.object(install, "current", return_value=mocker.Mock(sites=found))
    mocker.patch.object(sites, "present", side_effect=AssertionError)
    mocker.patch("builtins.open", side_effect=AssertionError)
    for _ in range(2):
        section = surface_sections.turn_section()
        assert [place["name"] for place in section["sites"]] == ["decode burst"]
