"""What the changes add reads as oMLX's own: no word of this package's is in it.

Most of it is the core, copied as it is; so this is a test of the core, too.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from omlx_admission.upstream import package, register

#: Words that mean something only here.
OURS = re.compile(
    r"\b[Ss]tock|hooks|omlx_admission|OmlxPool|\([BCFP]\d|policy/|noqa|benchmarks/|status page"
)

#: What means something there as well.
THEIRS = ("runtime hooks are process-wide",)


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


#: Modules of the core that no change uses.
NOT_COPIED = {"answer", "cut", "error_event", "quiesce", "stream_hold"}


def test_the_core_is_copied_as_it_is_but_for_what_no_change_uses() -> None:
    for folder, root in package.FOLDERS.items():
        for path in root.rglob("*.py"):
            name = f"{folder}/{path.relative_to(root).as_posix()}"
            if folder == "admission" and path.stem in NOT_COPIED:
                assert name not in new_modules()
            elif path != root / "__init__.py" or folder == "admission":
                assert new_modules()[name] == package.LICENSE + path.read_text("utf-8")


def test_the_core_imports_itself_and_the_standard_library() -> None:
    for path in package.FOLDERS["admission"].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert {a.name.partition(".")[0] for a in node.names} <= sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] in sys.stdlib_module_names


def test_what_a_change_brings_imports_nothing_that_is_not_there() -> None:
    for change in register.changes().values():
        there = {path for c in register.select(change.name) for path in c.modules}
        there |= {path for c in register.select(change.name) for path in c.edits}
        for path in change.modules:
            for files in package.imported(new_modules()[path], Path(path)):
                # What is no part of the package is oMLX's own.
                ours = [f.as_posix() for f in files if f.as_posix().startswith("admission/")]
                assert not ours or there.intersection(ours), f"{change.name}: {path}: {ours}"


def test_every_phrase_that_is_let_through_is_there() -> None:
    text = "\n".join(new_modules().values())
    for phrase in THEIRS:
        assert phrase in text, phrase
