"""The demo as it is called, on the stand-in: stock and patched servers, all outputs."""

import dataclasses
import json
from pathlib import Path

import pytest

import standin
from omlx_admission.surfaces import cli
from omlx_admission.surfaces.demo import runs
from omlx_admission.surfaces.demo.server import Server
from tests.surfaces.demo_runs import half_an_omlx

pytest.importorskip("mlx_lm")

#: Four servers are started here; on a loaded machine each takes its time.
pytestmark = pytest.mark.timeout(300)


def _statuses(run: dict) -> dict[str, int]:  # type: ignore[type-arg]
    return {
        request["label"]: request["status"]
        for scenario in run["scenarios"]
        for request in scenario["requests"]
    }


def test_stock_refuses_what_patched_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "out", tmp_path / "all.json"
    call = ["demo", "--only", "busy", "--only", "too-large", "--load-seconds", "1"]
    call += ["--omlx-src", str(standin.PATH), "--out", str(out), "--json", str(file)]
    status = cli.main(call)
    results = json.loads(file.read_text())
    # Whether a loaded machine kept the demo's times is no matter of this test.
    assert status == (1 if results["problems"] else 0)
    stock, patched = (_statuses(results["runs"][mode]) for mode in ("stock", "patched"))
    assert stock == {
        "A streams": 200,
        "B while A streams": 507,
        "A again, B waiting": 200,
        "C, larger than the memory": 507,
        "A afterwards": 200,
    }
    assert patched == {**stock, "B while A streams": 200}
    assert results["omlx"]["standin"] is True
    assert results["runs"]["patched"]["plugin_seen"] is True
    assert results["runs"]["stock"]["plugin_seen"] is False
    output = capsys.readouterr()
    assert "1. busy: Memory for one" in output.out
    assert max(map(len, output.out.split("on        ")[0].splitlines())) <= 100
    assert "the stand-in, shaped like oMLX" in output.err
    assert "(1/8) stock: starting the server" in output.err
    assert sorted(p.name for p in out.iterdir()) == [
        "omlx-admission-demo.png",
        "patched.log",
        "stock.log",
    ]
    states = results["runs"]["patched"]["scenarios"][0]["states"]
    assert [(s["model"], s["state"]) for s in states if s["model"] == "demo-b"] == [
        ("demo-b", "loading"),
        ("demo-b", "resident"),
    ]


def test_a_server_on_which_the_plugin_is_not_active_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runs.Setup.server

    def off(setup: runs.Setup, mode: str) -> Server:
        return dataclasses.replace(real(setup, mode), patched=False)

    monkeypatch.setattr(runs.Setup, "server", off)
    call = ["demo", "--only", "too-large", "--load-seconds", "0.5"]
    assert cli.main([*call, "--omlx-src", str(standin.PATH), "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert "shows no sign of the plugin: run omlx-admission doctor" in failed[0]
    assert any("too-large: A was evicted for a model that never fits" in x for x in failed)


def test_a_server_that_does_not_start_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half_an_omlx(tmp_path / "src", "0.6.3")
    call = ["demo", "--omlx-src", str(tmp_path / "src"), "--out", str(tmp_path / "out")]
    assert cli.main(call) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("omlx-admission demo: the server ended at once (status 1): ")
    assert "No module named 'omlx." in last
    assert last.endswith(f"(log in {tmp_path / 'out'})")
