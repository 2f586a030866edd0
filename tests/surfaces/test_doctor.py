"""``omlx-admission doctor`` on a checkout: each name that a feature relies on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import standin
from omlx_admission.hooks.patching import bodies, gate
from omlx_admission.surfaces import cli
from tests.hooks.drift import Edit, drifted

PACKAGE = Path(cli.__file__).parents[1]

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    def run(source: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("OMLX_SERIALIZE_ENGINE_GPU", "1")
        monkeypatch.setenv("OMLX_BASE_PATH", str(source / "none"))
        status = cli.main(["doctor", "--omlx-src", str(source), *arguments])
        return status, capsys.readouterr().out

    return run


@contextmanager
def edited(name: str, *words: tuple[str, str], **files: str) -> Iterator[Path]:
    """The stand-in with words of one file replaced, and files added by their stems."""
    edits: list[Edit] = [(f"{name}.py", re.escape(old), new) for old, new in words]
    edits += [(f"{stem}.py", "", None) for stem in files]
    edits += [(f"{stem}.py", "", code) for stem, code in files.items()]
    with drifted(standin.PATH / "omlx", *edits) as source:
        yield source


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
    server = (standin.PATH / "omlx" / "server.py").read_text("utf-8")
    with edited(
        "exceptions",
        ("class ModelBusyError", "class ModelInUseError"),
        pool_errors="class ModelBusyError(Exception):\n    pass\n",
        server=server.replace("async def verify_api_key", "def verify_api_key"),
    ) as source:
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


def test_with_the_names_the_reasons_that_are_no_names_stay(doctor: Doctor) -> None:
    with edited("_version", ("0.6.3rc2", "0.8.1")) as source:
        status, lines = doctor(source, "--needs")
    assert status == 1
    assert "oMLX 0.8.1 is outside the supported range" in lines
    assert "decode burst             covered" in lines
    assert "fits      omlx.engine_pool:EnginePool.get_engine" in lines


def test_a_changed_name_gives_its_reason_once(doctor: Doctor) -> None:
    with edited("engine_core", ("_step_burst", "_burst_of_steps")) as source:
        _, lines = doctor(source, "--needs")
    shown = lines.partition("gpu_turn ")[2].partition("exposure ")[0]
    assert shown.count("omlx.engine_core:EngineCore._step_burst is missing") == 1


@pytest.mark.parametrize("switch", ["OMLX_ADMISSION_LOAD_THREAD", "OMLX_ADMISSION_QUEUE"])
def test_the_names_of_what_is_off_are_told_too(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(switch, "0")
    _, lines = doctor(standin.PATH, "--needs")
    name = switch.removeprefix("OMLX_ADMISSION_").lower()
    shown = lines.partition(f"\n{name} ")[2].split("\n\n")[0]
    first, reason, need, *_ = shown.splitlines()
    assert first.split()[0] == "off"
    assert reason.strip() == f"- {switch}=0"
    assert need.split()[0] == "fits"


def test_without_an_omlx_no_place_is_covered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_source: Path | None = None) -> gate.Found:
        raise gate.NoOmlx("no module named 'omlx' in this Python")

    monkeypatch.setattr(gate, "find", nothing)
    assert cli.main(["doctor", "--needs"]) == 1
    shown = capsys.readouterr().out
    assert "no module named 'omlx'" in shown
    assert "covered" not in shown


def test_what_stands_on_a_refused_feature_says_so(doctor: Doctor) -> None:
    with edited("engine_pool", ("_find_lru_victim", "_find_victim")) as source:
        _, shown = doctor(source, "--json")
        _, lines = doctor(source)
        _, with_needs = doctor(source, "--needs")
    for name in ("unloads", "stream_hold"):
        assert feature(shown, name)["state"] == "refused"
        assert feature(shown, name)["reasons"] == ["needs our 'queue' (refused)"]
    for text in (lines, with_needs):
        assert text.count("- needs our 'queue' (refused)") == 3
    assert feature(shown, "leases")["state"] == "ready"


def test_a_name_that_may_be_missing_is_said_to_be(doctor: Doctor) -> None:
    name = "omlx.scheduler:Scheduler.prefilling"
    assert f"fits      {name} (name)" in doctor(standin.PATH, "--needs")[1]
    with edited("scheduler", ("prefilling", "in_prefill")) as source:
        _, lines = doctor(source, "--needs")
    assert f"fits      {name} (name, not in this release)" in lines


def test_a_body_that_no_release_had_is_named(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = gate.Source(gate.find(standin.PATH))
    own = {name: {str(code.fingerprint(name)): ("0.6.3",)} for name in bodies.known()}
    monkeypatch.setattr(bodies, "known", lambda: own)
    searches = "    def _find_lru_victim(self) -> str | None:\n"
    edit = (searches, f"{searches}        self._searches = 1\n")
    victim = "omlx.engine_pool:EnginePool._find_lru_victim"
    with edited("engine_pool", edit) as source:
        _, shown = doctor(source, "--json")
        _, lines = doctor(source)
    assert json.loads(shown)["never_run"] == [victim]
    assert feature(shown, "queue")["state"] == "ready"
    head = "never run       functions whose body is in none of the releases that were run:"
    assert f"{head}\n  {victim}\n" in lines
    # The stand-in's own are no news.
    _, shown = doctor(standin.PATH, "--json")
    assert json.loads(shown)["never_run"] == []
    assert "never run" not in doctor(standin.PATH)[1]


PROGRAM = """
import sys
sys.path += {path!r}
from omlx_admission.surfaces import doctor
print(doctor.switch_problem())
"""


def test_a_line_that_no_python_ran_switches_nothing_on(tmp_path: Path) -> None:
    """The package arrives by PYTHONPATH, in a folder that is called as Python's own are."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "omlx_admission.pth").write_text("import omlx_admission._startup\n")
    (folder / "omlx_admission").symlink_to(PACKAGE)
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM.format(path=sys.path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=tmp_path,
    )
    assert done.stdout.startswith(f"the package lies in {folder} (by PYTHONPATH?)"), done.stderr


def test_a_line_that_ran_is_what_switches_it_on() -> None:
    program = "import omlx_admission._startup as s; s.main()" + PROGRAM.format(path=[])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = (
        f"{sys.executable} -m omlx_admission.surfaces.cli doctor --omlx-src "
        f"{standin.PATH} --needs | head -1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("omlx-admission ")
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr
