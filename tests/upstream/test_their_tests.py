"""What the changes bring as tests: enough of them, and those that are ours pass there."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omlx_admission.upstream import register
from omlx_admission.upstream.apply import make
from omlx_admission.upstream.plan import Tree, plan


def added(old: bytes, new: bytes) -> int:
    """How many lines are new."""
    rows = difflib.ndiff(old.decode().splitlines(), new.decode().splitlines()) if old else ()
    return sum(row.startswith("+ ") for row in rows) if old else len(new.splitlines())


def test_a_third_of_the_lines_of_each_change_are_tests(checkout: Path) -> None:
    tree = Tree(checkout)
    for step in plan(tree, register.select("all")):
        lines = {True: 0, False: 0}
        files = step.formatted()
        for path, content in files.items():
            lines[path.startswith("tests/")] += added(tree.read(path) or b"", content)
        tree = tree.under(files)
        assert 3 * lines[True] >= sum(lines.values()), (step.change.name, lines)


def run(tree: Path, python: str) -> None:
    """Run the copied tests of an edited checkout."""
    (tree / "own.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-c", "own.ini", "tests/admission"],
        cwd=tree,
        env={**os.environ, "OMLX_ADMISSION": "0", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", [c.name for c in register.changes().values() if c.copied_tests]
)
def test_the_copied_tests_pass_with_their_change_alone(checkout: Path, name: str) -> None:
    make(checkout, name)
    run(checkout, sys.executable)


@pytest.mark.live
@pytest.mark.timeout(600)
def test_the_copied_tests_pass_in_a_real_one(
    real: Path, checkout_of: object, pytestconfig: pytest.Config
) -> None:
    tree: Path = checkout_of(real)  # type: ignore[operator]
    make(tree, "drain-queue")
    run(tree, pytestconfig.getoption("--omlx-python") or sys.executable)
