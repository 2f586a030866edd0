"""The state folder: one file per release, which several processes may write at once."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

#: By part what came of it and what it was measured on; under "where" the checkout and
#: the Python, so that what is there now can be looked at again.
Row = dict[str, Any]


class Busy(Exception):
    """Another process has it."""


def read(path: Path) -> Row:
    """What is kept of a release; a file that is none has nothing in it."""
    try:
        row = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def put(path: Path, part: str, result: Row | None, where: Mapping[str, str]) -> None:
    """Keep the result of one part (None: drop it) and leave the others as they are."""
    with _lock(path.with_name(f"{path.stem}.lock"), fcntl.LOCK_EX):
        # Read again: another process may have kept another part meanwhile.
        row = read(path)
        row.pop(part, None)
        row["where"] = dict(where)
        if result is not None:
            row[part] = result
        _replace(path, json.dumps(row, indent=1))


@contextmanager
def only_here(state: Path, name: str, part: str) -> Iterator[None]:
    """Hold one part of one release; the system lets go of it however the process ends.

    Raises:
        Busy: another process runs it.
    """
    with ExitStack() as stack:
        path = state / f"{name}-{part}.lock"
        try:
            stack.enter_context(_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(f"another process runs it in {state}") from None
        yield


@contextmanager
def _lock(path: Path, how: int) -> Iterator[None]:
    # The file stays: removed, two processes could hold two files of one name.
    with path.open("ab") as file:
        fcntl.flock(file, how)
        yield


def _replace(path: Path, text: str) -> None:
    """The old file or the new one, never a part of it."""
    # Not named *.json: whoever lists the releases must not find it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
