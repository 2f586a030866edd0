"""What README and ``docs/`` say of variables, commands and outputs is what the code has.

Run as a script it writes the table of variables anew.
"""

import argparse
import re
from pathlib import Path

import pytest

from omlx_admission import settings
from omlx_admission.surfaces.cli import COMMANDS
from omlx_admission.surfaces.demo import add_arguments

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OPERATION = ROOT / "docs" / "operation.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
_TABLE = re.compile(r"(<!-- variables:.*?-->\n)(.*?)(<!-- /variables -->)", re.DOTALL)


def table() -> str:
    """The README's table of variables."""
    rows = ["| name | default | allowed | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{v.name}` | {settings.default_of(v)} | {v.allowed} | {v.meaning} |"
        for v in settings.VARIABLES
    ]
    return "\n".join(rows) + "\n"


def _shown(text: str) -> str:
    found = _TABLE.search(text)
    assert found is not None
    return found.group(2)


def test_the_table_of_variables_is_the_registers() -> None:
    shown = _shown(README.read_text("utf-8"))
    assert shown == table(), "run: python tests/surfaces/test_readme.py"


def test_every_variable_that_is_named_exists() -> None:
    # oMLX's own, which `top` reads too.
    known = {v.name for v in settings.VARIABLES} | {"OMLX_API_KEY"}
    for page in PAGES:
        named = set(re.findall(r"\bOMLX_[A-Z_]+\b", page.read_text("utf-8")))
        assert named <= known, page


def test_every_command_and_option_that_is_named_exists() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    commands = re.findall(r"(?:`|bin/|surfaces\.cli |: `)omlx-admission ([a-z]+)", text)
    assert {"doctor", "demo"} <= set(commands) <= set(COMMANDS)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for option in ("--omlx-src", "--omlx-python"):
        assert f"`{option}" in text
        assert option in parser.format_help()


def test_the_readme_fits_four_screens_with_the_installation_on_the_first() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 4 * 55
    first = "\n".join(lines[:55])
    assert "/pip install " in first
    assert "omlx-admission doctor" in first


@pytest.mark.parametrize(
    "code",
    [
        "model_swap_timeout",
        "admission_queue_full",
        "model_busy",
        "shutting_down",
        "model_too_large",
    ],
)
def test_every_code_of_a_refusal_is_told_and_used(code: str) -> None:
    assert f"| `{code}` |" in OPERATION.read_text("utf-8")
    core = (ROOT / "omlx_admission" / "core").rglob("*.py")
    assert f'"{code}"' in "".join(p.read_text("utf-8") for p in core)


def write() -> None:
    """Put the table of variables into the README."""
    text = README.read_text("utf-8")
    README.write_text(_TABLE.sub(lambda m: m[1] + table() + m[3], text), "utf-8")


if __name__ == "__main__":
    write()
