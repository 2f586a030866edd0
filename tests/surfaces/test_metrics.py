"""The metrics: what Prometheus can read, by its conventions, with bounded labels."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from omlx_admission.gpu.exposure import Cell, Record
from omlx_admission.gpu.faults import GpuFault
from omlx_admission.observation.history import OTHER
from omlx_admission.observation.observe import MAX_NAMES
from omlx_admission.observation.pool_snapshot import CacheBudget
from omlx_admission.surfaces import metrics

from .samples import GB, Sample, draining, loading

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def everything() -> Sample:
    """A sample in which every family has a value."""
    sample = loading()
    seen = sample.observer
    sample.resident("d")
    seen.refused("x", "model_too_large", "text", 0.0, None)
    waiter = sample.policy.waiters(sample.policy.targets[0])[0]
    sample.policy.leave(waiter, type(waiter.outcome).EXPIRED, sample.now)
    seen.left(waiter, sample.now, 3, True)
    seen.load_ended("b", ok=True)
    seen.swap_ended("b", "loaded", 2)
    seen.load_began("a", 1.0)
    seen.load_ended("a", ok=False)
    seen.turn("a", 1.0, 1.5, 2.0)
    sample.cache = CacheBudget(15 * GB, GB, 1, 1)
    turn = {"on": True, "waiting": [1, 2], "timeouts": 3}
    seen.register_section("gpu_turn", lambda: turn)
    exposure = {
        "busy_s": {"0": 1.0, "1": 2.0, "2": 3.5},
        "lockups": 1,
        "faults": [
            {"fault": "hang", "engine": "a", "count": 1},
            {"fault": "hang", "engine": "b", "count": 2},
        ],
        "replays": {"count": 2, "tokens": 222_000, "seconds": 240.0, "failed": 1},
    }
    seen.register_section("exposure", lambda: exposure)
    return sample


def scrape(sample: Sample, accept: str = "") -> str:
    render, kind = metrics.format_for(accept)
    assert kind.startswith("application/openmetrics" if accept else "text/plain")
    return render(sample.facts(), sample.observer).decode()


def families(sample: Sample) -> dict[str, Metric]:
    return {f.name: f for f in text_string_to_metric_families(scrape(sample))}


def test_both_formats_are_valid_and_say_the_same() -> None:
    sample = everything()
    plain = list(text_string_to_metric_families(scrape(sample)))
    strict = list(openmetrics.text_string_to_metric_families(scrape(sample, OPENMETRICS)))
    assert {f.name for f in strict} <= {re.sub("_total$", "", f.name) for f in plain} | {
        f.name.removesuffix("_info") for f in plain
    }
    assert len(strict) > 25


def test_names_and_units_follow_the_convention() -> None:
    text = scrape(everything(), OPENMETRICS)
    for family in openmetrics.text_string_to_metric_families(text):
        assert family.name.startswith("omlx_admission_")
        assert re.fullmatch(r"[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|minutes|mb|gb|count|sum)$", family.name)
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == family.name + "_total"


def test_no_series_appears_twice() -> None:
    series = Counter(
        (s.name, tuple(sorted(s.labels.items())))
        for family in text_string_to_metric_families(scrape(everything()))
        for s in family.samples
    )
    assert {name: n for name, n in series.items() if n > 1} == {}


def test_every_promised_family_has_a_value() -> None:
    found = families(everything())
    filled = {name.removeprefix("omlx_admission_") for name, f in found.items() if f.samples}
    assert filled >= {
        "queue_depth",
        "wait_seconds",
        "load_seconds",
        "drain_seconds",
        "unload_seconds",
        "swaps",
        "load_failures",
        "eviction_age_seconds",
        "refusals",
        "model_resident_bytes",
        "model_reserved_bytes",
        "memory_ceiling_bytes",
        "gpu_turn_wait_seconds",
        "gpu_turn_hold_seconds",
        "gpu_overlap_seconds",
        "gpu_faults",
        "cache_limit_bytes",
        "healthy",
    }


def test_the_values_are_the_observers() -> None:
    sample = everything()
    found = families(sample)

    def one(name: str, **labels: str) -> float:
        samples = [s for f in found.values() for s in f.samples]
        (hit,) = [
            s for s in samples if s.name == f"omlx_admission_{name}" and s.labels == labels
        ]
        return float(hit.value)

    assert one("queue_depth", model="b") == 2
    assert one("wait_seconds_count", model="b", outcome="expired") == 1
    assert one("wait_seconds_sum", model="b", outcome="expired") == 8.5
    assert one("wait_seconds_bucket", model="b", outcome="expired", le="5.0") == 0
    assert one("wait_seconds_bucket", model="b", outcome="expired", le="10.0") == 1
    assert one("swaps_total", reason="age", result="loaded") == 1
    assert one("refusals_total", reason="model_too_large") == 1
    assert one("load_failures_total", model="a") == 1
    assert one("drain_seconds_sum", model="a") == 1.0
    assert one("model_reserved_bytes", model="b") == 6 * GB
    assert one("memory_ceiling_bytes") == 10 * GB
    assert one("gpu_turn_wait_seconds_sum", engine="a") == 0.5
    assert one("gpu_turn_waiting") == 2
    assert one("gpu_overlap_seconds_total") == 3.5
    assert one("gpu_busy_seconds_total", engines="1") == 2.0
    assert one("gpu_faults_total", fault="hang") == 3
    assert one("mtp_replays_total") == 2
    assert one("mtp_replayed_tokens_total") == 222_000
    assert one("mtp_replay_seconds_total") == 240.0
    assert one("healthy") == 1
    assert one("build_info", version=metrics.__version__, omlx="0.6.3") == 1


def test_stuck_is_unhealthy() -> None:
    sample = draining()
    sample.now += 1000
    found = families(sample)
    assert found["omlx_admission_healthy"].samples[0].value == 0
    stuck = {s.labels["kind"]: s.value for s in found["omlx_admission_stuck"].samples}
    assert stuck == {"load": 0, "unload": 0, "drain": 1, "swap": 0, "turn": 0}


def test_labels_are_bounded() -> None:
    sample = Sample()
    for i in range(1000):
        model = f"m{i}"
        sample.sizes[model] = 1
        sample.resident(model)
        sample.observer.load_began(model, 1.0)
        sample.observer.load_ended(model, ok=True)
        sample.observer.turn(model, 1.0, 1.0, 2.0)
        waiter = sample.wait(model)
        sample.observer.left(waiter, sample.now, 0, True)
    labels: dict[str, set[str]] = {}
    for family in families(sample).values():
        for s in family.samples:
            for name, text in s.labels.items():
                labels.setdefault(name, set()).add(text)
    assert len(labels["model"]) == MAX_NAMES + 1
    assert OTHER in labels["model"]
    assert labels.keys() <= {
        *("model", "outcome", "le", "kind", "engine", "engines", "reason", "result"),
        *("fault", "version", "omlx"),
    }
    resident = families(sample)["omlx_admission_model_resident_bytes"].samples
    assert sum(s.value for s in resident) == 1000, "summed, not lost"


def test_a_model_name_cannot_break_the_format() -> None:
    sample = Sample()
    name = 'q"uo\\te\nline'
    sample.sizes[name] = 1
    sample.wait(name)
    depth = families(sample)["omlx_admission_queue_depth"].samples
    assert [s.labels["model"] for s in depth] == [name]


def test_the_real_sections_fit(mocker: Any) -> None:
    from omlx_admission.gpu_turn import turn as gpu_turn
    from omlx_admission.hooks.server import surface_sections

    turn = gpu_turn.GpuTurn()
    mocker.patch.object(gpu_turn, "current", turn)
    cell = Cell(2, 0, True)
    record = Record({cell: 5.0}, {cell: 1}, {(GpuFault.HANG, "a", cell): 2})
    recorder = SimpleNamespace(totals=lambda: record)
    mocker.patch.object(surface_sections.watch, "recorder", recorder)
    sample = Sample()
    surface_sections.register(sample.observer)
    turn.acquire("a", "decode").release()
    sample.observer.check_stuck()
    found = families(sample)
    assert found["omlx_admission_gpu_overlap_seconds"].samples[0].value == 5.0
    assert found["omlx_admission_gpu_faults"].samples[0].value == 2
    assert found["omlx_admission_gpu_turn_hold_seconds"].samples
    sample.observer.reset()
    assert "omlx_admission_gpu_overlap_seconds" not in families(sample)


DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "omlx-admission.json"


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    known: dict[str, set[str]] = {}
    for family in families(everything()).values():
        for s in family.samples:
            known.setdefault(s.name, set()).update(s.labels)
    asked = 0
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            for name in re.findall(r"omlx_admission_\w+", target["expr"]):
                asked += 1
                assert name in known, target["expr"]
            labels = re.findall(r"by \(([^)]*)\)", target["expr"])
            labels += re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            wanted = {part.strip() for group in labels for part in group.split(",")}
            names = re.findall(r"omlx_admission_\w+", target["expr"])
            assert wanted <= set().union(*(known[n] for n in names)), target["expr"]
    assert asked > 20
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids))
