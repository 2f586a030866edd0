"""The demo from choosing an oMLX to the last line it prints."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omlx_admission import __version__
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.demo import PICTURE, models, note, progress, table, target
from omlx_admission.surfaces.demo.runs import Run, Setup, play
from omlx_admission.surfaces.demo.scenarios import SCENARIOS, Scenario
from omlx_admission.surfaces.demo.server import ServerError
from omlx_admission.surfaces.demo.stage import StageError
from omlx_admission.surfaces.demo.timeline import draw
from omlx_admission.surfaces.demo.watch import spans


def show(arguments: argparse.Namespace, work: Path) -> int:
    """Play on both servers, print the table, write the picture; the exit status."""
    chosen = target.find(arguments.omlx_src, arguments.omlx_python, work)
    out: Path = arguments.out or Path(tempfile.mkdtemp(prefix="omlx-admission-demo-"))
    scenarios = [s for s in SCENARIOS if not arguments.only or s.name in arguments.only]
    note(f"omlx-admission {__version__} on {chosen.label}")
    for reason in chosen.refused:
        note(f"the plugin refuses this oMLX, which stays stock there: {reason}")
    started = time.monotonic()
    try:
        models.make(work / "models")
        setup = Setup(chosen, work, out, arguments.load_seconds, arguments.port)
        with progress.make(2 * (2 + len(scenarios))) as bar:
            stock = play(setup, "stock", scenarios, 0, bar)
            tokens = stock.measures.tokens
            patched = play(setup, "patched", scenarios, tokens, bar)
    except (ServerError, StageError) as error:
        raise CommandError(f"{error} (log in {out})") from None
    seconds = time.monotonic() - started
    print("\n".join(table.lines(stock, patched, scenarios)))
    picture = out / PICTURE
    draw(picture, stock, patched, scenarios, _title(chosen, arguments.load_seconds))
    wrong = problems(chosen, patched, scenarios)
    if arguments.json is not None:
        content = as_json(chosen, (stock, patched), wrong, picture, seconds)
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    print(f"on        {chosen.label}")
    print(f"machine   {machine()}; a load takes {arguments.load_seconds:g} s; {seconds:.0f} s")
    print(f"picture   {picture}")
    print(f"logs      {out / 'stock.log'}, {out / 'patched.log'}")
    if wrong:
        print("\n".join(f"FAILED    {line}" for line in wrong))
        return 1
    print(f"patched   as wanted in {len(scenarios)} of {len(scenarios)} scenarios")
    return 0


def _title(chosen: target.Target, load_s: float) -> str:
    which = "the stand-in for oMLX" if chosen.standin else "oMLX"
    return f"{which} {chosen.version}, stock above patched; a load takes {load_s:g} s"


def problems(chosen: target.Target, patched: Run, scenarios: Sequence[Scenario]) -> list[str]:
    """Everything that keeps the patched run from being right, one line each."""
    found = []
    if chosen.refused:
        found.append("the plugin is not fully active: " + "; ".join(chosen.refused))
    elif not patched.active:
        found.append(
            patched.complaint
            or "the patched server's log shows no sign of the plugin: run omlx-admission doctor"
        )
    for scenario in scenarios:
        found += [f"{scenario.name}: {m}" for m in patched.scenario(scenario.name).misses]
    return found


def machine() -> str:
    """What the figures depend on, in a few words."""
    name = platform.machine()
    if platform.system() == "Darwin":
        try:
            asked = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
            name = asked.stdout.strip() or name
        except (OSError, subprocess.TimeoutExpired):
            pass
    system = "macOS" if platform.system() == "Darwin" else platform.system()
    return f"{system} {name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def as_json(
    chosen: target.Target, runs: Sequence[Run], wrong: list[str], picture: Path, seconds: float
) -> dict[str, Any]:
    """All results as plain data; the schema's version is its first key.

    Times of requests and states are seconds since their scenario began.
    """
    return {
        "schema": 1,
        "omlx_admission": __version__,
        "omlx": {
            "version": chosen.version,
            "root": str(chosen.root),
            "standin": chosen.standin,
            "refused": list(chosen.refused),
        },
        "machine": machine(),
        "seconds": seconds,
        "picture": str(picture),
        "models": [asdict(model) for model in models.MODELS],
        "runs": {run.mode: _run_json(run) for run in runs},
        "problems": wrong,
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "plugin_seen": run.active,
        "measures": asdict(run.measures),
        "scenarios": [
            {
                "name": played.name,
                "seconds": played.end - played.start,
                "misses": played.misses,
                "requests": [
                    {
                        "label": answer.label,
                        "model": answer.model,
                        "start": answer.started - played.start,
                        "first_byte": answer.first_byte and answer.first_byte - played.start,
                        "end": answer.ended - played.start,
                        "status": answer.status,
                        "complete": answer.ok,
                        "retry_after": answer.headers.get("retry-after"),
                    }
                    for answer in played.answers
                ],
                "states": [
                    {
                        "model": span.model,
                        "state": span.state,
                        "start": span.start - played.start,
                        "end": span.end - played.start,
                    }
                    for span in spans(played.samples, [m.name for m in models.MODELS])
                ],
            }
            for played in run.played
        ],
    }
