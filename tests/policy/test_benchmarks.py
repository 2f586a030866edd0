"""The command line of the benchmarks: what it shows, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import compare, queue_cost
from benchmarks.simulation import chaos
from benchmarks.table import Row, render


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--omlx-src", "/nowhere"], "no omlx/engine_pool.py in it"),
        (["--omlx-python", "/nowhere/python"], "no such file"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_an_omlx_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    (tmp_path / "omlx").mkdir()
    (tmp_path / "omlx" / "__init__.py").write_text("")
    row = command.hot_path_row(tmp_path, command.sys.executable, True)
    assert row.values == {"ours": "not measured"}
    assert "holds no oMLX" in row.on


def test_the_hot_path_of_the_stand_in_can_be_measured() -> None:
    row = command.hot_path_row(command.standin.PATH, command.sys.executable, True)
    assert "->" in row.values["ours"], row


def test_the_cost_of_waiters_is_measured() -> None:
    cost = queue_cost.measure(20, 2)
    assert cost.enter_s > 0
    assert cost.wake_s > 0
    assert cost.block_s > 0


def test_simulated_rows_compare_all_rules() -> None:
    rows = list(compare._burst())
    assert {*rows[0].values} == {"ours", "exhaustive", "gated", "strict FCFS"}
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
