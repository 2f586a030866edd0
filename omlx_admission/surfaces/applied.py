"""What the hooks change in an oMLX: applied for real, in a process that does nothing else.

The process of ``doctor`` stays free of oMLX and of MLX, which may end a process that finds
no GPU, and looks up nothing twice: the ledger of changes is asked, not the register.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omlx_admission import _startup
from omlx_admission.hooks import install
from omlx_admission.hooks.features import PARTS
from omlx_admission.hooks.install import Report, State
from omlx_admission.hooks.patching.ledger import Change
from omlx_admission.surfaces.cli import CommandError

#: Importing oMLX takes seconds; a process that takes this long hangs.
LIMIT_S = 300.0

_RUN = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from omlx_admission.surfaces import applied; applied.main()"
)


@dataclass(frozen=True)
class Applied:
    """What is changed, in the order of application, and what to know about it."""

    changes: list[Change]
    notes: list[str]


def in_a_process(report: Report, source: Path | None) -> Applied:
    """Apply the hooks to the oMLX of ``report``: of ``source``, or of this Python.

    Raises:
        CommandError: there is no oMLX, or it cannot be imported here.
    """
    if report.found is None:
        raise CommandError(f"--hooks: {report.problem}")
    path = [place or os.getcwd() for place in sys.path]
    if source is not None:
        path.insert(0, str(report.found.root.resolve().parent))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *path],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            # Strict ends the process that is to say what is applied.
            env={**os.environ, "OMLX_ADMISSION_STRICT": "0"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"--hooks: importing oMLX took over {LIMIT_S:.0f} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise CommandError(
            f"--hooks: importing oMLX ended the process (status {done.returncode}): {last}"
        ) from None
    if "problem" in answer:
        raise CommandError(f"--hooks: oMLX cannot be imported here: {answer['problem']}")
    return Applied([Change(**change) for change in answer["changes"]], answer["notes"])


def main() -> None:
    """Import all that is patched, and print what was changed. What oMLX prints is no answer."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer: dict[str, Any] = asdict(apply())
        except BaseException as error:  # noqa: BLE001 - a module may even exit
            answer = {"problem": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


def apply() -> Applied:
    """Import oMLX's server, as a server does, and then what a server imports late."""
    _startup.main()
    importlib.import_module("omlx")
    report = install.current()
    if report is None:  # OMLX_ADMISSION=0
        return Applied([], [])
    ready = {v.feature.name for v in report.verdicts if v.state is State.READY}
    parts = [part for part in PARTS if part.feature in ready]
    needed = {part.module for part in parts if not part.optional}
    notes = []
    for module in sorted({part.module for part in parts}, key=lambda m: m != install.LAST):
        try:
            importlib.import_module(module)
        except ImportError as error:
            if module in needed:
                raise
            # Most are no part of this release, or of what is installed.
            if not isinstance(error, ModuleNotFoundError):
                notes.append(f"{module} cannot be imported here: {error}")
    notes += dict.fromkeys(
        reason for v in report.verdicts if v.feature.name in ready for reason in v.reasons
    )
    return Applied(install.changes(), notes)


def by_attribute(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """The layers of each attribute, inner to outer."""
    layers: dict[str, list[Change]] = {}
    for change in changes:
        layers.setdefault(change.attribute, []).append(change)
    return dict(sorted(layers.items()))


def as_json(applied: Applied) -> dict[str, Any]:
    """Plain data for ``doctor --json``."""
    return {
        "notes": applied.notes,
        "attributes": [
            {
                "name": name,
                "layers": [{"feature": c.feature, "layer": c.layer} for c in layers],
            }
            for name, layers in by_attribute(applied.changes).items()
        ],
    }


def as_lines(applied: Applied) -> list[str]:
    """The same for a terminal."""
    what = "each changed attribute of oMLX with its layers, inner to outer:"
    lines = ["", f"hooks           {what if applied.changes else 'nothing is changed'}"]
    for attribute, layers in by_attribute(applied.changes).items():
        lines.append(f"  {attribute}")
        lines += [f"    {change.feature:<15} {change.layer}" for change in layers]
    return lines + [f"  - {note}" for note in applied.notes]
