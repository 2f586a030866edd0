"""How real engines behave on a tiny model (``probes/engine.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omlx_admission.surfaces.demo.tinymodels import make_embedder, make_text_model

STORIES: list[tuple[str, str, Any]] = [
    (
        "5: a thread per text engine, one for all the rest",
        "threads",
        {"tokens": 12, "step": True, "global": "mlx-global", "vectors": [2, 64]},
    ),
    ("2.2", "loads_share_one_thread", {"waited": True}),
    (
        "5: the first one's arrays may be lazy, the second one evaluates them",
        "jobs_of_a_load",
        ["_load_model_sync", "materialize_lazy_state"],
    ),
    (
        "2.2",
        "embedding_waits_for_the_global_thread",
        {"waited": True, "busy": True},
    ),
    ("5", "text_does_not_wait_for_the_global_thread", {"tokens": 5}),
    (
        "1.6: outside the pool's books",
        "stopped_engine_starts_itself_again",
        {"pool": [], "tokens": 5, "loaded": True},
    ),
    (
        "2.3",
        "close_blocks_the_event_loop",
        {"blocked": True, "coroutine": False},
    ),
    (
        "2.3",
        "after_the_cores_stop_the_rest_awaits_nothing",
        {"suspended": False, "closed": True, "let go": True, "loaded": False},
    ),
    (
        "1.6",
        "activity_shows_only_with_a_mailbox",
        {"before": False, "during": True, "after": False},
    ),
    ("1.4", "unload_leaves_readers_hanging", {"hanging": True}),
    (
        "5.2",
        "burst_limits",
        {"decode_burst_max_steps": 3, "decode_burst_budget_single_s": 1},
    ),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model and an embedder."""
    folder = tmp_path_factory.mktemp("tiny")
    make_text_model(folder, name="text")
    make_embedder(folder, name="embed")
    return folder


@pytest.mark.parametrize(
    ("section", "story", "expected"), STORIES, ids=[name for _, name, _ in STORIES]
)
def test_story(
    target: Any, home: Path, tiny: Path, section: str, story: str, expected: Any
) -> None:
    assert target.probe("engine.py", home, OMLX_TINY=str(tiny))[story] == expected


def test_every_story_is_told(target: Any, home: Path, tiny: Path) -> None:
    told = target.probe("engine.py", home, OMLX_TINY=str(tiny))
    assert set(told) == {story for _, story, _ in STORIES}
