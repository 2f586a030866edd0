"""Which oMLX the demo runs: asked of the very interpreter that will run it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.demo import STANDIN, stand_in
from omlx_admission.surfaces.demo.probe import missing_text
from omlx_admission.surfaces.demo.server import last_line, variables_for
from omlx_admission.surfaces.doctor import check_source

#: Seconds for one interpreter to answer; a cold disk makes the first import slow.
_PROBE_S = 60.0


@dataclass(frozen=True)
class Target:
    """One oMLX and the interpreter for it.

    Attributes:
        source: folder to put on the path; None where the interpreter has oMLX.
        refused: why the plugin will not be active in it, in full or in part.
    """

    python: str
    source: Path | None
    root: Path
    version: str | None
    standin: bool
    refused: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people: which one, and its release."""
        release = self.version or "of an unknown release"
        if self.standin:
            return f"the stand-in, shaped like oMLX {release} (no real oMLX in this Python)"
        return f"oMLX {release} in {self.root}"


def find(source: Path | None, python: Path | None, base: Path) -> Target:
    """Choose: ``source``, else the interpreter's own oMLX, else a checkout's stand-in.

    ``base`` is a folder to work in. Raises CommandError with one line where the
    choice of the user cannot be run.
    """
    if source is not None:
        check_source(source)
        # A package folder was named: its parent is what belongs on the path.
        source = source if (source / "omlx").is_dir() else source.resolve().parent
    interpreter = _interpreter(python)
    answer = _probe(interpreter, source, base)
    if answer["missing"]:
        raise CommandError(missing_text(answer["missing"], interpreter))
    if answer["root"] is None and source is not None:
        raise CommandError(f"--omlx-src {source}: {answer['problem']}")
    if answer["root"] is None and python is not None:
        raise CommandError(
            f"--omlx-python {python}: {answer['problem']}; name its folder with --omlx-src"
        )
    if answer["root"] is None:
        source = stand_in()
        answer = _probe(interpreter, source, base)
    root = Path(answer["root"])
    return Target(
        python=interpreter,
        source=source,
        root=root,
        version=answer["version"],
        standin=root.resolve() == STANDIN / "omlx",
        refused=tuple(answer["refused"]),
    )


def _interpreter(python: Path | None) -> str:
    if python is None:
        return sys.executable
    path = python.expanduser()
    if not path.is_file():
        raise CommandError(f"--omlx-python {python}: no such file")
    # Not resolved: the path of a virtual environment's link is what makes it one.
    return str(path.absolute())


def _probe(python: str, source: Path | None, base: Path) -> dict[str, Any]:
    command = [python, "-m", "omlx_admission.surfaces.demo.probe"]
    try:
        done = subprocess.run(
            command,
            env=variables_for(base, source),
            cwd=base,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandError(f"--omlx-python {python}: cannot be run: {reason}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{python} gave no answer within {_PROBE_S:.0f} s") from None
    try:
        answer = json.loads(last_line(done.stdout))
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CommandError(f"{python} could not be asked: {last_line(done.stderr)}")
    return answer
