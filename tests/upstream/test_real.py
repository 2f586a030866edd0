"""The changes on a copy of each real oMLX named by ``--omlx-src``."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import black
import pytest

from omlx_admission.hooks.install import State, decide
from omlx_admission.settings import Settings
from omlx_admission.surfaces.cli import main
from omlx_admission.upstream import register, style

from .conftest import git

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NAMES = (*register.changes(), "all")


def unformatted(text: str, length: int) -> Counter[str]:
    """Lines that black would change."""
    formatted = black.format_str(text, mode=black.Mode(line_length=length))
    rows = difflib.unified_diff(text.splitlines(), formatted.splitlines(), lineterm="", n=0)
    return Counter(row[1:] for row in rows if row.startswith("-") and row[:3] != "---")


@pytest.mark.parametrize("name", NAMES)
def test_a_change_alone_applies_is_seen_and_is_formatted(
    real: Path, checkout_of: Callable[[Path], Path], name: str
) -> None:
    checkout = checkout_of(real)
    before = git(checkout, "rev-parse", "HEAD")
    assert main(["upstream", "--checkout", str(checkout), "--change", name]) == 0
    everything = Settings(serialize_engine_gpu=True, keep_gpu_setting=True)
    report = decide(checkout, everything)
    for change in register.select(name):
        for feature in change.features:
            assert report.verdict(feature).state is State.NATIVE, feature
    length = style.of_checkout(checkout)
    for path in git(checkout, "diff", "--name-only", before).splitlines():
        text = (checkout / path).read_text()
        compile(text, path, "exec")
        known = Counter[str]()
        if (real / path).is_file():
            known = unformatted((real / path).read_text(), length)
        assert not unformatted(text, length) - known, path
    head = git(checkout, "rev-parse", "HEAD")
    assert main(["upstream", "--checkout", str(checkout), "--change", name]) == 0
    assert git(checkout, "rev-parse", "HEAD") == head
