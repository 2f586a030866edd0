"""What the changes add reads as oMLX's own: no word of this package's is left."""

from __future__ import annotations

import re
from functools import cache

import pytest

from omlx_admission.upstream import register

#: Words that mean something only here.
OURS = re.compile(
    r"\b[Ss]tock|hooks|omlx_admission|OmlxPool|\(B\d\d|policy/|noqa|benchmarks/|status page"
)

#: What means something there as well.
THEIRS = (
    "stock Anthropic client",
    "stock OpenAI client",
    "Stock clients obey both",
    "runtime hooks are process-wide",
    "process-wide hooks",
)


@cache
def new_modules() -> dict[str, str]:
    """Every file that a change adds, with the path of its first change."""
    found: dict[str, str] = {}
    for change in register.changes().values():
        for path, make in change.modules.items():
            found.setdefault(path, make())
    return found


PATHS = sorted({path for c in register.changes().values() for path in c.modules})


def test_there_are_some() -> None:
    assert {path.partition("/")[0] for path in PATHS} == {"admission", "gpu_turn"}


@pytest.mark.parametrize("path", PATHS)
def test_no_word_is_left_that_only_this_package_understands(path: str) -> None:
    text = new_modules()[path]
    for phrase in THEIRS:
        text = text.replace(phrase, "")
    found = [line for line in text.splitlines() if OURS.search(line)]
    assert not found


def test_every_phrase_that_is_let_through_is_there() -> None:
    text = "\n".join(new_modules().values())
    for phrase in THEIRS:
        assert phrase in text, phrase
