"""What a change for upstream is: its edits, its files, its tests and its message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from omlx_admission.hooks.patching.gate import Need

if TYPE_CHECKING:
    from omlx_admission.upstream.code import Code

#: Edits one module of oMLX. Pure; raises :class:`AnchorMissing`.
Edit = Callable[["Code"], "Code"]

#: Makes the text of one file that is added to oMLX.
Make = Callable[[], str]


class Refused(Exception):
    """The change cannot be made there; nothing was changed. One sentence."""


class AnchorMissing(Refused):
    """A name that an edit holds on to is not there, or is not what it was."""


@dataclass(frozen=True)
class Change:
    """One change, meant to become one pull request.

    Attributes:
        name: its folder below ``patches/``.
        title: subject of the commit, 72 characters at most: ``feat(pool): add ...``.
        message: body of the commit: the problem, the change, the effect.
        issues: numbers of oMLX's public issues that it is about.
        features: features of this package that it makes unnecessary; what their
            ``native`` needs ask for is there once the change is in.
        edits: path below ``omlx/`` of a file that exists, and what edits it.
        optional: paths of ``edits`` that not every oMLX has.
        test_edits: path below ``tests/`` of a test of oMLX's that says what the change
            makes untrue, and what edits it; left out where it is not there.
        modules: path below ``omlx/`` of a file to add, and what makes its text. A
            file that an earlier change has added is left as it is.
        copied_tests: path below ``tests/`` of a test of ours, or of what such a test stands
            on, and what makes its text; added and left as ``modules`` are.
        after: changes that this one stands on, applied first where they are missing.
        native: names that are there once the change is in, besides those of ``features``.
        folder: where card, edit and tests lie; set by the register.
    """

    name: str
    title: str
    message: str
    issues: tuple[int, ...]
    features: tuple[str, ...]
    edits: Mapping[str, Edit]
    modules: Mapping[str, Make] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    test_edits: Mapping[str, Edit] = field(default_factory=dict)
    copied_tests: Mapping[str, Make] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    native: tuple[Need, ...] = ()
    folder: Path = Path()

    @property
    def card(self) -> Path:
        """The text of the pull request."""
        return self.folder / "card.md"

    @property
    def tests(self) -> tuple[Path, ...]:
        """Tests to add to oMLX's own, in order of name."""
        return tuple(sorted((self.folder / "tests").glob("test_*.py")))

    def commit_message(self) -> str:
        """Subject, body and the issues that it refers to."""
        refers = ", ".join(f"#{number}" for number in self.issues)
        return f"{self.title}\n\n{self.message.strip()}\n\nRefs: {refers}\n"
