"""The benchmarks that no other test runs: what they show, and their errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.table import Row, render

pytestmark = pytest.mark.slow


def test_the_table_says_for_each_row_what_it_ran_on() -> None:
    text = render(
        [Row("swaps", {"ours": "3", "gated": "40"}, "a"), Row("wait", {"ours": "9"}, "b")]
    )
    head, rule, first, second = text.splitlines()
    assert head.split() == ["ours", "gated", "measured", "on"]
    assert set(rule) == {"-"}
    assert first.split() == ["swaps", "3", "40", "a"]
    assert second.split() == ["wait", "9", "b"]


def hot_path(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.hot_path", "--rounds", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_folder_without_omlx_is_named() -> None:
    assert "/nowhere" in hot_path("--omlx-src", "/nowhere").stderr


def test_the_hot_path_of_the_stand_in_can_be_measured() -> None:
    found = json.loads(hot_path().stdout)
    assert found["stock"] > 0 and found["patched"] > 0 and found["ratio"] > 0
