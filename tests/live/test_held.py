"""Between hand-out and use, on whole applications (``probes/held.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.standin import tinymodels
from omlx_admission.surfaces.demo.server import variables_for

from .conftest import Omlx

PROBE = Path(__file__).parent / "probes" / "held.py"

_SIZE = 1_650_000_000

_told: dict[str, Any] = {}


@pytest.fixture
def told(omlx: Omlx, tmp_path: Path) -> dict[str, Any]:
    """What the probe found on this oMLX; it runs once."""
    if omlx.name not in _told:
        models = tmp_path / "models"
        tinymodels.make_text_model(models, name="text", counted_bytes=_SIZE)
        tinymodels.make_embedder(models, name="embed", counted_bytes=_SIZE)
        tinymodels.make_reranker(models, name="rerank", counted_bytes=_SIZE)
        tinymodels.make_audio_model(models, name="stt", kind="stt", counted_bytes=_SIZE)
        base = tmp_path / "base"
        variables = {
            **variables_for(base, omlx.source),
            "OMLX_BASE_PATH": str(base),
            "OMLX_ADMISSION_MAX_AGE_S": "0",
        }
        command = [omlx.python or sys.executable, str(PROBE), str(models)]
        run = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=400, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        _told[omlx.name] = json.loads(run.stdout.splitlines()[-1])
    found: dict[str, Any] = _told[omlx.name]
    return found


def test_b31_the_second_question_of_a_request_is_answered_whatever_came_between(
    told: dict[str, Any],
) -> None:
    """Embeddings and rerank: a drain, new settings or an unload cannot fail the answer,
    and with no wait allowed it is not refused either."""
    answers = told["the_second_question"]
    assert len(answers) == 16
    for name, answer in answers.items():
        assert answer["status"] == 200, name
        assert answer["whole"], name
        assert answer["leases"] == 0, name
        # Who drains the model waited until the answer was out.
        assert answer["waited for it"] == ([True] if "drain" in name else []), name


def test_b12_a_realtime_session_keeps_its_model_until_the_socket_ends(
    told: dict[str, Any],
) -> None:
    session = told["a_socket_holds_its_model"]
    if session is None:
        pytest.skip("this oMLX has no realtime transcription")
    for end, found in session.items():
        assert found["during"] == [1, True, False], end
        assert found["leases"] == 0, end
    assert session["stop"]["done"]


def test_a_refused_realtime_session_says_why(told: dict[str, Any]) -> None:
    refused = told["a_refused_socket_says_why"]
    if refused is None:
        pytest.skip("this oMLX has no realtime transcription")
    assert refused["types"] == ["error"]
    assert refused["why"]
    assert refused["closed"] == [1008]
