"""The benchmarks that no other test runs: what they show, and their errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import compare
from benchmarks.simulation import chaos
from benchmarks.table import Row, render

pytestmark = pytest.mark.slow


def test_the_table_says_for_each_row_what_it_ran_on() -> None:
    text = render(
        [
            Row("swaps", {"ours": "3", "gated": "40"}, "simulated", "<= 5", True),
            Row("wait", {"ours": "9"}, "a server", "<= 5", False),
        ]
    )
    head, rule, first, second = text.splitlines()
    assert head.split() == ["ours", "gated", "aim", "measured", "on"]
    assert set(rule) == {"-"}
    assert first.split() == ["swaps", "3", "40", "<=", "5", "(kept)", "simulated"]
    assert second.split() == ["wait", "9", "<=", "5", "(MISSED)", "a", "server"]


def hot_path(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.hot_path", "--rounds", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_folder_without_omlx_is_named() -> None:
    assert "/nowhere" in hot_path("--omlx-src", "/nowhere").stderr


def test_the_hot_path_of_the_stand_in_can_be_measured() -> None:
    found = json.loads(hot_path().stdout)
    assert found["stock"] > 0 and found["patched"] > 0 and found["ratio"] > 0


def test_simulated_rows_compare_all_rules() -> None:
    rows = list(compare._burst())
    assert {*rows[0].values} == {"ours", "exhaustive", "gated"}
    assert rows[0].kept is True


def test_a_violation_names_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(seed: int, events: int) -> int:
        if seed == 3:
            raise AssertionError("K3")
        return events

    monkeypatch.setattr(chaos, "run", broken)
    with pytest.raises(AssertionError, match="K3"):
        chaos.main(["--seeds", "5"])
    assert "seed 3, --events 100" in capsys.readouterr().err


def test_chaos_counts_what_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--seed", "1"]) == 0
    assert "over 1 seeds" in capsys.readouterr().out
