"""The status document: true to the state, valid by its schema, the same cost for a crowd."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from omlx_admission.observation.observe import Observer, Problem
from omlx_admission.observation.pool_snapshot import CacheBudget, Facts
from omlx_admission.surfaces import queue_view, reasons, status
from omlx_admission.surfaces.summary import listed, seconds

from .samples import DAY, GB, Sample, draining, loading


def strict(schema: Any) -> Any:
    """The schema with every undocumented field forbidden."""
    if isinstance(schema, dict):
        made = {key: strict(value) for key, value in schema.items()}
        if made.get("type") == "object" and "properties" in made:
            made["additionalProperties"] = False
        return made
    return [strict(value) for value in schema] if isinstance(schema, list) else schema


STRICT = strict(copy.deepcopy(status.schema()))
STRICT["additionalProperties"] = False
VALIDATOR = jsonschema.Draft202012Validator(STRICT)


def shown(sample: Sample, **options: Any) -> dict[str, Any]:
    document = status.build(sample.facts(), sample.observer, **options)
    VALIDATOR.validate(json.loads(json.dumps(document)))
    return document


def states(document: dict[str, Any]) -> dict[str, str]:
    return {m["model"]: m["state"] for m in document["models"]}


def empty() -> Sample:
    return Sample()


def no_queue() -> Sample:
    sample = Sample()
    sample.queue = False
    sample.resident("a", busy=True)
    return sample


def resident() -> Sample:
    sample = Sample()
    sample.observer.load_began("a", 1.0)
    sample.observer.load_ended("a", ok=True)
    sample.resident("a", leases=1, busy=True)
    sample.now += 3
    return sample


def unloading() -> Sample:
    sample = resident()
    sample.unloading("a")
    sample.observer.unload_began("a", 5.0)
    sample.now += 2
    return sample


def broken() -> Sample:
    sample = Sample()
    sample.broken = True
    return sample


def stuck() -> Sample:
    sample = loading()
    sample.now += 100
    return sample


def refused() -> Sample:
    sample = Sample()
    sample.observer.refused("x", "model_too_large", "too large", 0.0, None)
    sample.observer.refused("b", "model_swap_timeout", "too late", 30.0, None)
    return sample


def failed() -> Sample:
    sample = loading()
    sample.observer.load_ended("b", ok=False)
    sample.observer.swap_ended("b", "failed")
    return sample


def cached() -> Sample:
    sample = Sample()
    sample.cache = CacheBudget(15 * GB, 2 * GB, engines=2, shared=1)
    return sample


@pytest.mark.parametrize(
    "make",
    [
        empty,
        no_queue,
        resident,
        draining,
        loading,
        unloading,
        broken,
        stuck,
        refused,
        failed,
        cached,
    ],
)
def test_every_state_is_valid(make: Callable[[], Sample]) -> None:
    shown(make(), timeline=True)
    shown(make())


def test_the_check_is_not_empty() -> None:
    document = shown(loading())
    for spoil in (
        lambda d: d.pop("health"),
        lambda d: d["models"][0].update(state="thinking"),
        lambda d: d["queue"]["waiters"][0].update(prompt="hello"),
        lambda d: d.update(surprise=1),
        lambda d: d["swap"].pop("target"),
    ):
        bad = copy.deepcopy(document)
        spoil(bad)
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(bad)


def test_the_schema_documents_every_field() -> None:
    def walk(node: Any, name: str) -> None:
        if "type" in node or "enum" in node or "const" in node:
            assert node.get("description"), name
        for key, child in node.get("properties", {}).items():
            if "oneOf" in child:
                child = child["oneOf"][1]
            walk(child, f"{name}.{key}")
        if isinstance(node.get("items"), dict) and "properties" in node["items"]:
            walk(node["items"], f"{name}[]")

    walk(status.schema(), "status")


def test_a_drain() -> None:
    document = shown(draining())
    assert states(document) == {"a": "draining", "b": "queued", "d": "absent", "x": "absent"}
    assert document["swap"]["phase"] == "draining"
    assert document["swap"]["victims"] == ["a"]
    assert document["queue"]["closed"] == ["a"]
    waiters = document["queue"]["waiters"]
    assert [(w["request"], w["position"], w["reason"]) for w in waiters] == [
        ("agent-0", 1, "draining"),
        ("agent-1", 2, "draining"),
        ("agent-2", 3, "draining"),
        ("chat-1", 4, "gate_closed"),
    ]
    assert waiters[0]["text"] == "'a' finishes 2 running requests and makes room"
    assert waiters[3]["text"] == "it is loaded but makes room for 'b', which waited longer"
    assert waiters[0]["age_s"] == 7.0
    assert waiters[0]["budget_left_s"] == 293.0
    assert document["models"][0]["progress"]["for"] == "b"
    assert document["summary"].startswith("Making room for b: a finishes 2 running requests")


def test_a_load() -> None:
    document = shown(loading())
    assert states(document) == {"a": "queued", "b": "loading", "d": "absent", "x": "absent"}
    assert document["memory"]["reserved_bytes"] == 6 * GB
    assert document["memory"]["resident_bytes"] == 0
    assert document["models"][0]["progress"]["seconds"] == 1.5
    assert document["models"][0]["since"] == DAY + 1007.0
    assert [w["reason"] for w in document["queue"]["waiters"]] == ["loading"] * 3 + ["behind"]
    assert document["swaps"][0]["result"] == "running"
    assert document["summary"] == (
        "Loading b in place of a: 1.5 s so far, about 3.7 s expected. 3 requests wait for it. "
        "1 more request waits for a."
    )


def test_stuck_is_unhealthy_and_says_what() -> None:
    assert shown(loading())["health"] == {"ok": True, "problems": []}
    health = shown(stuck())["health"]
    assert not health["ok"]
    assert [(p["kind"], p["model"]) for p in health["problems"]] == [("load", "b")]
    assert health["problems"][0]["text"] == "the load of 'b' has lasted 102 s, limit 60 s"


def test_a_turn_of_the_gpu_is_shown_and_may_be_stuck() -> None:
    sample = Sample()
    section = {"on": False, "sites": [{"name": "decode", "covered": True, "note": "n"}]}
    sample.observer.register_section(
        "gpu_turn", lambda: section, lambda: [Problem("turn", "a", 61.0, 60.0, "held")]
    )
    document = shown(sample)
    assert document["gpu_turn"] == section
    assert document["health"]["problems"][0]["kind"] == "turn"


def test_a_broken_queue_is_unhealthy() -> None:
    document = shown(broken())
    assert document["health"]["problems"][0]["kind"] == "queue"
    assert not document["queue"]["active"]


def test_two_budgets_of_one_cache_are_told() -> None:
    cache = shown(cached())["cache"]
    assert cache["one_budget"] is False
    assert (cache["engines"], cache["shared"]) == (2, 1)


def test_a_crowd_is_counted_and_its_head_listed() -> None:
    sample = Sample(max_age=500.0)
    sample.resident("a", busy=True, leases=1)
    for i in range(6000):
        sample.wait("b" if i % 2 else "d", f"r{i}")
    sample.step()
    queue = shown(sample)["queue"]
    assert queue["waiting"] == 6000
    assert len(queue["waiters"]) == queue_view.MOST_WAITERS
    assert queue["omitted"] == 6000 - queue_view.MOST_WAITERS
    assert [m["waiting"] for m in queue["models"]] == [3000, 3000]
    assert len(json.dumps(shown(sample))) < 60_000


def test_reading_works_while_it_changes_nothing() -> None:
    sample = draining()
    before = (sample.policy.waiting, sample.policy.swap, sample.observer.version)
    first, second = shown(sample), shown(sample)
    assert first == second
    assert (sample.policy.waiting, sample.policy.swap, sample.observer.version) == before


def test_before_there_is_a_pool() -> None:
    observer = Observer()
    document = status.build(Facts(omlx="0.6.3"), observer)
    VALIDATOR.validate(json.loads(json.dumps(document)))
    assert document["models"] == []
    assert document["summary"] == "No request waits. No model is loaded."


# -- reasons --------------------------------------------------------------------


def reason_for(sample: Sample, model: str) -> tuple[str, str]:
    sample.step()
    rows = shown(sample)["queue"]["models"]
    row = next(r for r in rows if r["model"] == model)
    assert row["reason"] in reasons.CODES
    return row["reason"], row["text"]


def test_why_a_busy_resident_is_waited_for() -> None:
    sample = Sample(max_age=30.0)
    sample.resident("a", busy=True, leases=1)
    sample.wait("b")
    sample.now += 10
    code, text = reason_for(sample, "b")
    assert code == "resident_busy"
    assert text == "'a' is in use; it makes room in 20 s at the latest"


def test_why_one_behind_another_waits() -> None:
    sample = Sample(max_age=30.0)
    sample.resident("a", busy=True, leases=1)
    sample.sizes["c"] = 5 * GB
    sample.wait("b")
    sample.now += 1
    sample.wait("c")
    assert reason_for(sample, "c") == ("behind", "'b' was asked for earlier")


def test_why_memory_on_its_way_is_waited_for() -> None:
    sample = Sample()
    sample.unloading("a")
    sample.wait("b")
    assert reason_for(sample, "b")[0] == "settling"


def test_why_a_swap_that_unloads_is_waited_for() -> None:
    sample = Sample()
    sample.resident("a")
    sample.wait("b")
    assert reason_for(sample, "b") == ("making_room", "'a' is being unloaded")


# -- words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0.0 s"),
        (0.004, "4 ms"),
        (3.14, "3.1 s"),
        (42.4, "42 s"),
        (200, "3 min 20 s"),
        (7200, "2 h"),
        (864_000, "10 days"),
    ],
)
def test_durations_for_people(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_lists_for_people() -> None:
    assert [listed(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_the_summary_names_who_else_waits_and_loads() -> None:
    sample = loading()
    sample.loading("d")
    assert "oMLX loads d." in shown(sample)["summary"]
    only_resident = Sample()
    only_resident.resident("a")
    only_resident.resident("d")
    assert shown(only_resident)["summary"] == "No request waits. a and d are loaded."
    busy = Sample(max_age=30.0)
    busy.resident("a", busy=True)
    busy.wait("b")
    busy.step()
    assert shown(busy)["summary"] == "1 request waits for b."
