"""How a stock oMLX behaves, story by story; each is told beside its end in ``probes/``.

``pool.py``: an EnginePool with engines that are fakes. ``pressure.py``: a memory enforcer
at its watermarks. ``routes.py``: the server's routes on a pool that answers as it is told.
``engine.py``: real engines on a tiny model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from standin.tinymodels import make_embedder, make_text_model

PROBES = Path(__file__).parent / "probes"
STORIES = [
    (probe, story)
    for probe in ("pool", "pressure", "routes", "engine")
    for story in re.findall(r"async def story_(\w+)", (PROBES / f"{probe}.py").read_text())
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model and an embedder."""
    folder = tmp_path_factory.mktemp("tiny")
    make_text_model(folder, name="text")
    make_embedder(folder, name="embed")
    return folder


@pytest.mark.parametrize(("probe", "story"), STORIES, ids=lambda part: part)
def test_story(target: Any, home: Path, tiny: Path, probe: str, story: str) -> None:
    ended, expected = target.probe(f"{probe}.py", home, OMLX_TINY=str(tiny))[story]
    assert ended == expected
