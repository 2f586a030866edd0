"""How a stock EnginePool answers, story by story (``probes/pool.py``).

Each row: contract section, story, and how it ends. Where releases differ, several
endings say from which one each holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

NO_ROOM = "InsufficientMemoryError"
ANY = "0"

STORIES: list[tuple[str, str, dict[str, Any]]] = [
    ("1.2", "resident_waits_for_a_load", {ANY: {"waited": True, "then": "ok"}}),
    ("2.1", "release_waits_for_a_load", {ANY: {"waited": True, "leases": 0}}),
    (
        "2.1",
        "prefill_eviction_waits_for_a_load",
        {ANY: {"waited": True, "freed": True, "loaded": ["B"]}},
    ),
    ("1.2", "ttl_waits_for_a_load", {ANY: {"waited": True, "gone": []}}),
    (
        "1.6",
        "busy_model_is_refused_not_waited_for",
        {ANY: {"error": NO_ROOM, "loaded": ["A"], "locked": False}},
    ),
    (
        "1.6",
        "model_above_the_ceiling_costs_others_their_place",
        {ANY: {"error": "ModelTooLargeError", "loaded": []}},
    ),
    (
        "1.6",
        "refused_model_has_evicted_the_idle_ones",
        {ANY: {"error": NO_ROOM, "loaded": ["A"]}},
    ),
    (
        "1.10",
        "least_recently_used_goes_first",
        {ANY: {"stopped": ["F"], "loaded": ["B", "D"]}},
    ),
    (
        "1.6",
        "pinned_leased_and_active_are_no_victims",
        {ANY: {"victim": None, "loaded": ["L", "P", "R", "U"]}},
    ),
    (
        "1.10",
        "soft_target_evicts_the_idle",
        {ANY: {"loaded": ["E", "N"]}, "0.5.3": {"loaded": ["N"]}},
    ),
    (
        "1.10",
        "soft_target_does_not_refuse",
        {ANY: {"answer": "ok", "loaded": ["E", "N"]}},
    ),
    (
        "1.10",
        "guard_off_evicts_and_never_refuses",
        {
            ANY: {"answer": "ok", "loaded": ["A", "X"]},
            "0.5.3": {"answer": "ok", "loaded": ["X"]},
        },
    ),
    (
        "1.10",
        "counted_memory_beats_live_memory",
        {ANY: {"A": 60, "A, then B": 60, "loaded": ["B"]}},
    ),
    (
        "1.6",
        "dying_engine_is_handed_out",
        {ANY: {"same": True, "starts": ["A"], "loaded": []}},
    ),
    (
        "1.4",
        "second_unload_stops_the_engine_again",
        {ANY: {"stops": 2, "memory": -60}, "0.6.0": {"stops": 2, "memory": 0}},
    ),
    (
        "1.6",
        "variant_of_a_busy_model",
        {ANY: {"error": "ModelBusyError", "same variant": "ok", "starts": 1}},
    ),
    ("1.6", "variant_of_an_idle_model", {ANY: {"starts": 2, "stops": 1}}),
    (
        "1.6",
        "pending_model_and_newcomers",
        {
            ANY: {"marked": True, "newcomer": "ok"},
            "0.6.2": {"marked": True, "newcomer": "ModelBusyError"},
        },
    ),
    (
        "1.4",
        "last_release_unloads_a_pending_model",
        {ANY: {"before": ["A"], "after": [], "reason": None}},
    ),
    (
        "1.3",
        "pinned_or_loading_models_take_no_mark",
        {ANY: {"pinned": False, "unloaded": False}},
    ),
    (
        "1.6",
        "cancelled_load_leaves_no_trace",
        {
            ANY: {
                "loading": False,
                "failed": False,
                "leases": 0,
                "memory": 0,
                "locked": False,
                "again": "ok",
            }
        },
    ),
    (
        "1.6",
        "failed_load_is_remembered",
        {ANY: {"errors": ["ModelUnavailableError"] * 2, "starts": 1, "loading": False}},
    ),
    (
        "1.6",
        "failed_load_has_evicted_others",
        {ANY: {"error": "ModelUnavailableError", "loaded": []}},
    ),
    (
        "1.10",
        "missing_folder_is_not_found",
        {ANY: {"error": "ModelNotFoundError", "known": ["B"]}},
    ),
    (
        "1.10",
        "one_load_for_many_requests",
        {ANY: {"starts": 1, "engines": 1, "leases": 5}},
    ),
    (
        "1.10",
        "waiters_are_served_in_order",
        {ANY: {"order": ["B", "A", "C"], "loaded": ["C"]}},
    ),
    ("1.3", "release_outlives_its_caller", {ANY: {"leases": 1}, "0.5.3": {"leases": 0}}),
    ("1.11", "release_never_goes_below_zero", {ANY: {"leases": 0}}),
    (
        "1.5",
        "rescan_replaces_entries_at_rest",
        {
            ANY: {
                "same": {"gone": False, "loaded": True, "loading": False, "rest": False},
                "load": "ModelLoadingError",
                "loaded": ["loaded"],
            },
            "0.5.3": {
                "same": {"gone": False, "loaded": True, "loading": True, "rest": False},
                "load": "ok",
                "loaded": ["loaded", "loading"],
            },
        },
    ),
    (
        "1.4",
        "entry_wiped_during_its_load",
        {
            ANY: {"error": "KeyError", "memory": 60, "stops": []},
            "0.5.3": {"error": "ModelLoadingError", "memory": 0, "stops": ["A"]},
        },
    ),
    (
        "1.6",
        "aborted_load_is_not_remembered",
        {ANY: {"error": "ModelLoadingError", "again": "ok"}},
    ),
    ("1.2", "settle_waits_for_a_large_model", {ANY: {"seconds": 8.0}}),
    ("1.2", "settle_gives_up_while_others_work", {ANY: {"seconds": 0}}),
    ("1.2", "small_models_settle_at_once", {ANY: {"seconds": 0}}),
    (
        "1.2",
        "ttl_unloads_the_idle_and_refreshes_the_busy",
        {ANY: {"gone": ["A"], "loaded": ["B", "P"], "busy one is fresh": True}},
    ),
    ("1.2", "unload_if_idle_spares_the_leased", {ANY: {"leased": False, "idle": True}}),
    (
        "1.9",
        "manual_unload_aborts_and_drains",
        {
            ANY: None,
            "0.6.2": {
                "at once": False,
                "reason": "manual admin unload",
                "newcomer": "ModelBusyError",
                "loaded": [],
            },
        },
    ),
    (
        "4.2",
        "names_of_one_model",
        {
            ANY: {
                "Some-Model": "Some-Model",
                "some-model": "Some-Model",
                "any/Some-Model": "Some-Model",
                "any/some-model": "Some-Model",
                "other": "other",
            }
        },
    ),
    ("1.2", "shutdown_unloads_everything", {ANY: {"loaded": [], "memory": 0}}),
]


@pytest.mark.parametrize(
    ("section", "story", "endings"), STORIES, ids=[f"{s}-{name}" for s, name, _ in STORIES]
)
def test_story(
    target: Any, home: Path, section: str, story: str, endings: dict[str, Any]
) -> None:
    holding = [version for version in endings if target.since(version)]
    expected = endings[max(holding, key=Version)]
    assert target.probe("pool.py", home)[story] == expected


def test_every_story_is_told(target: Any, home: Path) -> None:
    assert set(target.probe("pool.py", home)) == {story for _, story, _ in STORIES}
