"""``omlx-admission doctor`` on a checkout: each name that a feature relies on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutations import suite
from benchmarks.mutations.model import Mutation, none
from omlx_admission import standin
from omlx_admission.surfaces import cli

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    def run(source: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("OMLX_SERIALIZE_ENGINE_GPU", "1")
        monkeypatch.setenv("OMLX_BASE_PATH", str(source / "none"))
        status = cli.main(["doctor", "--omlx-src", str(source), *arguments])
        return status, capsys.readouterr().out

    return run


def feature(text: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in json.loads(text)["features"] if f["name"] == name)
    return found


def test_every_name_of_a_release_that_was_read_fits(doctor: Doctor) -> None:
    _, text = doctor(standin.PATH, "--json")
    queue = feature(text, "queue")
    assert queue["state"] == "ready"
    assert {need["fit"] for need in queue["needs"]} == {"fits"}
    names = {need["name"] for need in queue["needs"]}
    assert "omlx.engine_pool:EnginePool.get_engine" in names


def test_a_moved_class_and_a_changed_method_are_told_apart(doctor: Doctor) -> None:
    root = standin.PATH / "omlx"
    text = (root / "exceptions.py").read_text("utf-8")
    server = (root / "server.py").read_text("utf-8")
    files: dict[str, str | None] = {
        "exceptions.py": text.replace("class ModelBusyError", "class ModelInUseError"),
        "pool_errors.py": "class ModelBusyError(Exception):\n    pass\n",
        "server.py": server.replace("async def verify_api_key", "def verify_api_key"),
    }
    mutation = Mutation("moved", "omlx.exceptions", files, none)
    with suite.checkout(root) as made, made.changed(mutation) as source:
        status, shown = doctor(source, "--json")
        _, lines = doctor(source, "--needs")
    assert status == 1
    fits = {need["name"]: need for need in feature(shown, "queue")["needs"]}
    busy = fits["omlx.exceptions:ModelBusyError"]
    assert busy["fit"] == "moved"
    assert busy["reason"].endswith("; ModelBusyError is in omlx.pool_errors")
    key = {n["name"]: n for n in feature(shown, "surfaces")["needs"]}
    assert key["omlx.server:verify_api_key"]["fit"] == "changed"
    assert "moved     omlx.exceptions:ModelBusyError is missing" in lines
    assert "fits      omlx.engine_pool:EnginePool.get_engine (coroutine function)" in lines
