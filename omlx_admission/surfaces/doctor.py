"""``omlx-admission doctor``: which oMLX is there, and what is patched in it and why not."""

from __future__ import annotations

import argparse
import json
import os
import site
import sys
from pathlib import Path
from typing import Any

from omlx_admission import __version__, _startup
from omlx_admission.hooks.gpu import sites
from omlx_admission.hooks.install import Report, State, Verdict, decide
from omlx_admission.hooks.patching import gate
from omlx_admission.surfaces import applied
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.demo import STANDIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--needs", action="store_true", help="list every name of oMLX that a feature relies on"
    )
    parser.add_argument(
        "--hooks",
        action="store_true",
        help="import oMLX in a process of its own, apply the hooks, and list each changed "
        "attribute with its layers",
    )
    parser.add_argument(
        "--omlx-src",
        type=Path,
        metavar="DIR",
        help="look at this checkout instead of the oMLX of this Python; without --hooks "
        "nothing of it is imported",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Exit status 0: every wanted feature fits; 1: some does not."""
    if arguments.omlx_src is not None:
        check_source(arguments.omlx_src)
    report = decide(arguments.omlx_src)
    switch = switch_problem()
    source = arguments.omlx_src
    hooks = applied.in_a_process(report, source) if arguments.hooks else None
    if arguments.json:
        shown = as_json(report, switch)
        if hooks is not None:
            shown["hooks"] = applied.as_json(hooks)
        json.dump(shown, sys.stdout, indent=2)
        print()
    else:
        lines = as_lines(report, switch, needs=arguments.needs)
        if hooks is not None:
            lines += applied.as_lines(hooks)
        print("\n".join(lines))
    bad = any(v.state in (State.REFUSED, State.FAILED) for v in report.verdicts)
    return int(bad or switch is not None or bool(report.setting_problems))


def check_source(source: Path) -> None:
    """Raise a one-line error where ``source`` cannot be an oMLX checkout."""
    if not source.is_dir():
        raise CommandError(f"--omlx-src {source}: no such directory")
    if not os.access(source, os.R_OK | os.X_OK):
        raise CommandError(f"--omlx-src {source}: not readable")
    try:
        gate.find(source)
    except gate.NoOmlx as error:
        raise CommandError(f"--omlx-src {error}") from None


def switch_problem() -> str | None:
    """Why the line that switches the package on did not run in this Python, or None.

    macOS skips a ``.pth`` with the hidden flag without a word; other causes are an upgrade
    that rebuilt the environment, and a package on ``PYTHONPATH``.
    """
    if _startup.started():
        return None
    own = [Path(folder) for folder in site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        own.append(Path(site.getusersitepackages()))
    for line in (folder / "omlx_admission.pth" for folder in own):
        if line.is_file():
            if getattr(line.stat(), "st_flags", 0) & 0x8000:
                return f"{line} has the hidden flag, so Python skips it: chflags nohidden it"
            return f"{line} is there, but was not run (python -S or -I, or PYTHONNOUSERSITE?)"
    folders = ", ".join(map(str, own))
    home = Path(__file__).parents[2]
    if (home / "omlx_admission.pth").is_file():
        return (
            f"the package lies in {home} (by PYTHONPATH?), and Python runs the .pth lines of "
            f"its own site folders only ({folders})"
        )
    return f"omlx_admission.pth is in no site folder of this Python ({folders})"


def as_json(report: Report, switch: str | None) -> dict[str, Any]:
    """The report as plain data; the schema's version is its first key."""
    source = gate.Source(report.found) if report.found else None
    return {
        "schema": 1,
        "omlx_admission": __version__,
        "omlx": {
            "path": str(report.found.root) if report.found else None,
            "version": report.found.version if report.found else None,
            "supported": str(gate.SUPPORTED),
            "problem": report.problem,
        },
        "switch": {"problem": switch},
        "settings": {
            "values": {name: getattr(report.settings, name) for name in vars(report.settings)},
            "problems": report.setting_problems,
        },
        "features": [
            {
                "name": v.feature.name,
                "state": v.state.value,
                "variable": v.feature.variable,
                "summary": v.feature.summary,
                "reasons": v.reasons,
                "needs": [
                    {"name": str(need), "kind": need.kind.value, "fit": fit, "reason": reason}
                    for need, fit, reason in _fits(v, source)
                ],
            }
            for v in report.verdicts
        ],
        "never_run": _never_run(report, source),
        "gpu_sites": [
            {"name": place.name, "covered": place.covered, "note": place.note}
            for place in _sites(source)
        ],
    }


def _fits(verdict: Verdict, source: gate.Source | None) -> list[tuple[gate.Need, str, str]]:
    """Each name that a feature needs, with how it fares; nothing without an oMLX."""
    if source is None:
        return []
    found = []
    for need in verdict.feature.needs:
        fit, reason = source.fit(need)
        found.append((need, fit.value, reason))
    return found


def _need_lines(verdict: Verdict, source: gate.Source | None) -> list[str]:
    lines = []
    for need, fit, reason in _fits(verdict, source):
        kind = "in use" if need.kind is gate.Kind.USED else need.kind.value
        if need.optional and source is not None and not source.is_there(need):
            kind += ", not in this release"
        lines.append(f"{'':<15} {fit:<9} {reason or f'{need} ({kind})'}")
    return lines


def _never_run(report: Report, source: gate.Source | None) -> list[str]:
    """Functions that hooks rely on whose body no release had that was run.

    Those of the stand-in are its own, and every test runs them.
    """
    if (
        source is None
        or report.found is None
        or report.found.root.resolve() == STANDIN / "omlx"
    ):
        return []
    return source.never_run()


def _never_run_lines(names: list[str]) -> list[str]:
    if not names:
        return []
    lines = [
        "",
        "never run       functions whose body is in none of the releases that were run:",
    ]
    return lines + [f"  {name}" for name in names]


def _sites(source: gate.Source | None) -> list[sites.Site]:
    """Where this oMLX submits GPU work, supported or not; nothing without an oMLX."""
    return [] if source is None else sites.present(source)


def _site_lines(report: Report, source: gate.Source | None) -> list[str]:
    state = report.verdict("gpu_turn").state.value
    if state == State.NATIVE.value:
        return ["", "GPU turn        native: this oMLX takes it where it wants"]
    lines = ["", f"GPU turn        {state}; the places where oMLX submits GPU work:"]
    for place in _sites(source):
        mark = "covered" if place.covered else "not covered"
        lines.append(f"  {place.name:<24} {mark:<11}  {place.note}")
    return lines


def as_lines(report: Report, switch: str | None, needs: bool = False) -> list[str]:
    """The report for a terminal."""
    if report.found is None:
        omlx = f"none: {report.problem}"
    else:
        omlx = f"{report.found.version or 'unknown release'} in {report.found.root}"
    lines = [
        f"omlx-admission  {__version__}",
        f"oMLX            {omlx}",
        f"supported       {gate.SUPPORTED}",
        f"switched on by  {'omlx_admission.pth' if switch is None else 'nothing: ' + switch}",
        "",
    ]
    lines += [f"setting         {problem}" for problem in report.setting_problems]
    source = gate.Source(report.found) if report.found else None
    for verdict in report.verdicts:
        lines.append(
            f"{verdict.feature.name:<15} {verdict.state.value:<9} {verdict.feature.summary}"
        )
        rows = _need_lines(verdict, source) if needs else []
        told = "\n".join(rows)
        if verdict.state is not State.READY:
            # A changed name tells its reason itself.
            reasons = [reason for reason in verdict.reasons if reason not in told]
            lines += [f"{'':<15} {'':<9} - {reason}" for reason in reasons]
        lines += rows
    if report.found is None:
        return lines
    return lines + _never_run_lines(_never_run(report, source)) + _site_lines(report, source)
