"""Wrong calls of the demo: one clear line, exit status 2, no traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import standin
from omlx_admission.surfaces import cli, demo
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.demo import probe, target
from omlx_admission.surfaces.demo.server import Server, ServerError
from tests.surfaces.demo_runs import half_an_omlx


def _one_line(capsys: pytest.CaptureFixture[str], *call: str) -> str:
    """What ``demo`` with these arguments says when it refuses them."""
    assert cli.main(["demo", *call]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("omlx-admission demo: ")
    return line


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("--omlx-src {tmp}/none", "no such directory"),
        ("--omlx-src {tmp}/file", "no such directory"),
        ("--omlx-src {tmp}", "holds no oMLX"),
        ("--omlx-python {tmp}/python", "--omlx-python {tmp}/python: no such file"),
        ("--omlx-python {tmp}/file", "cannot be run: Permission denied"),
        ("--omlx-python /bin/echo", "could not be asked"),
        ("--out {tmp}/file/x", "Not a directory"),
        ("--out {tmp}/file", "--out"),
        ("--json {tmp}/x/y.json", "no such directory"),
        ("--json {tmp}", "is a directory"),
    ],
)
def test_a_path_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, said: str
) -> None:
    (tmp_path / "file").touch()
    assert said.format(tmp=tmp_path) in _one_line(capsys, *call.format(tmp=tmp_path).split())


def test_a_path_without_the_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "not readable" in _one_line(capsys, "--omlx-src", str(tmp_path))
    assert "not writable" in _one_line(capsys, "--json", str(tmp_path / "y.json"))


def test_a_python_without_omlx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "python"
    answer = {"root": None, "problem": "no module named 'omlx'", "missing": [], "refused": []}
    script.write_text(f"#!/bin/sh\necho '{json.dumps(answer).replace(chr(39), '.')}'\n")
    script.chmod(0o755)
    line = _one_line(capsys, "--omlx-python", str(script))
    assert line.endswith("name its folder with --omlx-src")


def test_missing_packages_name_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "mlx" else object())
    line = _one_line(capsys)
    assert line.endswith("mlx missing: pip install '/path/to/omlx-admission[demo]'")


def test_packages_missing_in_the_other_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    line = _one_line(capsys, "--omlx-src", str(standin.PATH), "--omlx-python", str(script))
    assert "mlx, mlx_lm" in line
    assert line.endswith(f"{script} -m pip install '/path/to/omlx-admission[demo]'")


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = _one_line(capsys, "--port", str(port))
    assert f"--port {port}: Address already in use" in line


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["--port", "x"], "'x' is not a port, 0 to 65535"),
        (["--port", "65536"], "'65536' is not a port"),
        (["--port", "-1"], "'-1' is not a port"),
        (["--load-seconds", "x"], "'x' is not a number of seconds, 0.5 to 30"),
        (["--load-seconds", "nan"], "'nan' is not a number of seconds"),
        (["--load-seconds", "0"], "'0' is not a number of seconds"),
        (["--only", "x"], "invalid choice: 'x'"),
    ],
)
def test_values_out_of_range(
    call: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *call])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_module_run_as_a_script_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "omlx_admission.surfaces.cli", "demo"]
    done = subprocess.run(
        [*command, "--omlx-src", "/nonexistent"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "omlx-admission demo: --omlx-src /nonexistent: no such directory\n"


def test_the_stand_in_is_taken_where_there_is_no_omlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm")
    monkeypatch.setattr(target, "_probe", _without_own_omlx(target._probe))
    chosen = target.find(None, None, tmp_path)
    assert chosen.standin
    assert chosen.refused == ()
    assert chosen.label.startswith("the stand-in, shaped like oMLX 0.6.3rc2")


def test_without_an_omlx_or_a_checkout_it_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel, which has no stand-in: asked first, and again of a half oMLX."""
    monkeypatch.setattr(demo, "STANDIN", tmp_path / "none")
    monkeypatch.setattr(demo, "_has_omlx", lambda: False)
    assert "has no oMLX: name one with --omlx-src, or run" in _one_line(capsys)
    pytest.importorskip("mlx_lm")
    monkeypatch.setattr(target, "_probe", _without_own_omlx(target._probe))
    with pytest.raises(CommandError, match="has no oMLX"):
        target.find(None, None, tmp_path)


def _without_own_omlx(ask):  # type: ignore[no-untyped-def]
    def probed(python: str, source: Path | None, base: Path) -> dict[str, object]:
        if source is None:
            return {"root": None, "problem": "none", "missing": [], "refused": []}
        return dict(ask(python, source, base))

    return probed


def test_the_package_folder_may_be_named_as_well(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    chosen = target.find(standin.PATH / "omlx", None, tmp_path)
    assert chosen.source == standin.PATH
    assert chosen.standin


def test_an_omlx_of_another_release_is_told_as_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    package = half_an_omlx(tmp_path / "src", "9.1")
    chosen = target.find(tmp_path / "src", None, tmp_path)
    assert chosen.label == f"oMLX 9.1 in {package}"
    assert [text.split("'")[1] for text in chosen.refused] == list(probe.SHOWN)
    assert "oMLX 9.1 is outside the supported range" in chosen.refused[0]


def test_an_interpreter_without_wrapt_is_not_asked_for_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda _name: None)
    answer = probe.look()
    assert answer["missing"] == list(probe.SERVER_NEEDS)
    assert answer["root"] is None


def test_a_server_that_ends_at_once_says_its_last_line(tmp_path: Path) -> None:
    package = half_an_omlx(tmp_path / "src", "0.6.3")
    (package / "__init__.py").write_text("raise ImportError('this one is broken')\n")
    server = Server(tmp_path, tmp_path / "base", patched=False, source=tmp_path / "src")
    with pytest.raises(ServerError, match=r"ended at once .*this one is broken"), server:
        pass


def test_a_server_whose_python_is_gone(tmp_path: Path) -> None:
    server = Server(tmp_path, tmp_path / "base", patched=False, python=str(tmp_path / "no"))
    with pytest.raises(ServerError, match=r"cannot run .*No such file"), server:
        pass


def test_a_bad_call_leaves_no_folder_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _one_line(capsys, "--omlx-src", "/nonexistent")
    assert list(tmp_path.iterdir()) == []
