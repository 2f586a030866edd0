"""Between hand-out and use, on whole applications (``probes/held.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.surfaces.demo.server import variables_for
from standin import tinymodels
from standin.server import on_path

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
            **on_path(variables_for(base, omlx.source)),
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


def test_c19_an_idle_realtime_socket_closes_no_gate(told: dict[str, Any]) -> None:
    """Its model serves whoever else asks for it while another one is waited for, time and
    again; that one is refused truthfully, and is served when the socket has ended."""
    found = told["an_idle_socket_closes_no_gate"]
    if found is None:
        pytest.skip("this oMLX has no realtime transcription")
    assert len(found["tries"]) == 3
    for one in found["tries"]:
        answer, beside = one["answer"], one["beside"]
        # Each was answered while the other request went on waiting; the last one may have
        # seen its end. No gate was closed.
        assert len(beside) >= 3
        assert [0 for status, _, _ in beside if status != 200] == []
        assert [0 for _, over, _ in beside[:-1] if over] == []
        assert [0 for _, _, leaves in beside if leaves] == []
        assert answer["status"] == 503
        assert int(answer["headers"]["retry-after"]) >= 1
        error = json.loads(answer["body"])["error"]
        assert error["code"] == "model_swap_timeout"
        assert "1 of them an open realtime session) in use" in error["message"]
    assert found["at its end"] == [200, True, 200, 200]
    assert found["leases"] == [0, 0]


def test_c19_beside_an_idle_realtime_socket_another_model_leaves(told: dict[str, Any]) -> None:
    found = told["beside_an_idle_socket_another_model_leaves"]
    if found is None:
        pytest.skip("this oMLX has no realtime transcription")
    assert found == [["text"], 200, ["embed", "stt"]]


def test_a_refused_realtime_session_says_why(told: dict[str, Any]) -> None:
    refused = told["a_refused_socket_says_why"]
    if refused is None:
        pytest.skip("this oMLX has no realtime transcription")
    assert refused["types"] == ["error"]
    assert refused["why"]
    assert refused["closed"] == [1008]
