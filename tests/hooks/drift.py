"""An oMLX that has moved on: a copy of a checkout with words of its files changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from omlx_admission.hooks.features import FEATURES
from omlx_admission.settings import Settings

#: But for parking: it is about mlx-lm's batches, and the stand-in decodes without them.
_OFF: dict[str, Any] = {
    f.field: True for f in FEATURES if not getattr(Settings(), f.field) and f.name != "park"
}
#: Everything is wanted, so that everything is judged.
ALL = Settings(**_OFF)

#: (file, regular expression, what takes its place everywhere); an expression that is
#: empty puts the text at the file's end, a text that is None removes the file.
Edit = tuple[str, str, str | None]


@contextmanager
def drifted(root: Path, *edits: Edit) -> Iterator[Path]:
    """A checkout like that of the package ``root``, with ``edits`` made in it.

    A release that does not have the words which an edit changes skips the test.
    """
    texts: dict[str, str | None] = {}
    for path, old, new in edits:
        text = texts[path] if path in texts else _text(root / path)
        if text is None or new is None or not old:
            texts[path] = new if text is None or new is None else f"{text}\n{new}\n"
            continue
        texts[path], count = re.subn(old, new, text)
        if not count:
            pytest.skip(f"{old} is not in {path} of this release")
    with TemporaryDirectory(prefix="omlx-drifted-") as name:
        source = Path(name)
        for file in root.rglob("*.py"):
            place = source / "omlx" / file.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file, place)
        for path, text in texts.items():
            place = source / "omlx" / path
            place.unlink(missing_ok=True)
            if text is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, "utf-8")
        yield source


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None
