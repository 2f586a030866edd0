"""``python -m omlx_admission.surfaces.demo.probe``: what this interpreter has to run oMLX.

One line of JSON. Runs in the server's interpreter, which may lack everything
but the standard library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

#: Modules without which no ``omlx serve`` starts, stand-in or real.
SERVER_NEEDS = ("mlx", "mlx_lm", "fastapi", "uvicorn", "wrapt", "packaging", "psutil")

#: Features that the demo shows; whether any other one is refused is not its matter.
SHOWN = ("resident", "queue", "errors", "requests")


def look() -> dict[str, Any]:
    """oMLX's folder and release, what refuses to be patched in it, what is missing."""
    answer: dict[str, Any] = {"root": None, "version": None, "problem": None, "refused": []}
    answer["missing"] = missing = [name for name in SERVER_NEEDS if find_spec(name) is None]
    if "wrapt" in missing or "packaging" in missing:
        return answer
    from omlx_admission.hooks.install import State, decide

    report = decide()
    answer["problem"] = report.problem
    if report.found is not None:
        answer |= {"root": str(report.found.root), "version": report.found.version}
        answer["refused"] = [
            f"'{v.feature.name}': {'; '.join(v.reasons)}"
            for v in report.verdicts
            if v.state in (State.REFUSED, State.FAILED) and v.feature.name in SHOWN
        ]
    return answer


def missing_text(modules: Sequence[str], python: str = sys.executable) -> str:
    """One line for modules that are not there, with the way to get them."""
    own = python == sys.executable
    where, pip = ("", "pip") if own else (f" in {python}", f"{python} -m pip")
    return f"{', '.join(modules)} missing{where}: {pip} install '/path/to/omlx-admission[demo]'"


if __name__ == "__main__":
    print(json.dumps(look()))
