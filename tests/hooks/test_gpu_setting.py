"""``scheduler.serialize_engine_gpu`` in oMLX's settings file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.hooks.gpu import setting as gpu_setting
from omlx_admission.settings import Settings, load

from .gpu_rig import installed


def write(folder: Path, value: Any, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    section = {"max_concurrent_requests": 4, "serialize_engine_gpu": value, **more}
    (folder / "settings.json").write_text(json.dumps({"version": "1.0", "scheduler": section}))


def decided(folder: Path, **environ: str) -> tuple[Settings, list[str]]:
    environ = {"OMLX_BASE_PATH": str(folder), **environ}
    settings, problems = load(environ)
    return gpu_setting.with_file(settings, problems, environ), problems


@pytest.mark.parametrize(
    ("value", "on"),
    [
        (True, True),
        ("on", True),
        (False, False),
        (0, False),
        ("auto", "auto"),
        ("alternate", "alternate"),
    ],
)
def test_the_file_switches_it(tmp_path: Path, value: Any, on: bool | str) -> None:
    write(tmp_path, value)
    settings, problems = decided(tmp_path)
    assert (settings.serialize_engine_gpu, settings.keep_gpu_setting) == (on, True)
    assert problems == []


@pytest.mark.parametrize("word", ["0", "1"])
def test_the_variable_goes_before_the_file(tmp_path: Path, word: str) -> None:
    write(tmp_path, word == "0")
    settings, _ = decided(tmp_path, OMLX_SERIALIZE_ENGINE_GPU=word)
    assert settings.serialize_engine_gpu is (word == "1")
    assert settings.keep_gpu_setting, "it survives saves all the same"


def test_a_value_that_is_neither_is_said_and_ignored(tmp_path: Path) -> None:
    write(tmp_path, "sometimes")
    settings, problems = decided(tmp_path)
    assert not settings.serialize_engine_gpu
    assert len(problems) == 1
    assert "'sometimes'" in problems[0]
    assert "true, false, auto or alternate" in problems[0]
    assert "settings.json" in problems[0]


@pytest.mark.parametrize("content", [None, "", "[]", '{"scheduler": 3}', "{"])
def test_no_key_no_feature(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    settings, problems = decided(tmp_path)
    assert (settings, problems) == (Settings(), [])


def test_the_folder_is_found_as_omlx_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    find = gpu_setting.base_path
    assert find([], {}) == tmp_path / ".omlx"
    note = tmp_path.joinpath("Library", "Application Support", "oMLX", "base-path")
    note.parent.mkdir(parents=True)
    note.write_text(f"{tmp_path}/moved\n")
    assert find([], {}) == tmp_path / "moved"
    assert find([], {"OMLX_BASE_PATH": "/elsewhere"}) == Path("/elsewhere")
    for words in (["serve", "--base-path", "/asked"], ["serve", "--base-path=/asked"]):
        assert find(words, {"OMLX_BASE_PATH": "/elsewhere"}) == Path("/asked")
    assert find(["serve", "--base-path"], {}) == tmp_path / "moved"


def test_the_key_survives_omlx_own_saves(tmp_path: Path) -> None:
    import omlx.settings as module

    write(tmp_path, True)

    def save() -> dict[str, Any]:
        settings = module.GlobalSettings.load(base_path=tmp_path)
        settings.scheduler.max_concurrent_requests = 7
        settings.save()
        written = json.loads((tmp_path / "settings.json").read_text())["scheduler"]
        assert written["max_concurrent_requests"] == 7
        assert isinstance(written, dict)
        return written

    with installed("omlx.settings", keep_gpu_setting=True):
        for _ in range(2):
            assert save()["serialize_engine_gpu"] is True
    # And without us it is lost, which is why all this is needed.
    assert "serialize_engine_gpu" not in save()
