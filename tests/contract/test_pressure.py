"""What a stock memory enforcer does at its watermarks (contract section 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

STORIES: dict[str, Any] = {
    "ok_does_nothing": {"level": "ok", "loaded": ["A"]},
    "soft_spares_the_last_model": {"level": "soft", "loaded": ["A"]},
    "soft_evicts_one_of_two": {"level": "ok", "loaded": ["B"]},
    "hard_evicts_the_last_model": {"loaded": []},
    "hard_ends_requests_and_keeps_the_model": {
        "active": False,
        "loaded": ["A"],
        "mark": None,
    },
    "emergency_marks_the_busy_model": {
        "mark": "hard memory pressure",
        "abort": True,
        "after the release": [],
    },
    "pinned_models_stay": {"loaded": ["P"]},
    "poll_waits_for_a_load": {"waited": True, "told to stop": False, "load": "ok"},
    "unlocked_load_is_told_to_stop": {"load": "ModelLoadingError", "loaded": []},
}


@pytest.mark.parametrize("story", list(STORIES))
def test_story(target: Any, home: Path, story: str) -> None:
    assert target.probe("pressure.py", home)[story] == STORIES[story]


def test_every_story_is_told(target: Any, home: Path) -> None:
    assert set(target.probe("pressure.py", home)) == set(STORIES)
