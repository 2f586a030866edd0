"""``omlx-admission report``: what the GPU exposure ledger shows, and what it cannot yet.

Reads the file that a server with omlx-admission keeps (`gpu.exposure_file`), adds it
up and prints exposure, faults, exact rates and the statistics of `gpu.statistics`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omlx_admission.gpu import presence
from omlx_admission.gpu.exposure import LONG_TOKENS, Record, merged
from omlx_admission.gpu.exposure_file import FILE_NAME, LedgerError, Line, read
from omlx_admission.gpu.statistics import (
    chance_in_share,
    chance_so_few,
    hours_needed,
    hours_needed_known_rate,
    poisson_rate,
)
from omlx_admission.gpu.watch import advice
from omlx_admission.hooks.gpu.setting import base_path
from omlx_admission.surfaces.cli import CommandError

FACTOR = 5.0
"""The reduction that a serialised run is asked to show, as in oMLX issue 4224."""

_BUSY = {0: "none", 1: "one", 2: "two or more"}
_LONG = {0: "none", 1: "one engine", 2: "two or more"}
_TURNS = {False: "off", True: "on"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--base-path",
        type=Path,
        metavar="DIR",
        help="oMLX's base path, where the ledger lies (default: where oMLX itself would "
        "look: OMLX_BASE_PATH, the app's data folder, ~/.omlx)",
    )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="the ledger itself, instead of --base-path"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="count only what ran with TEXT in its oMLX, MLX, system or plugin version",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the report. CommandError where there is nothing to report on."""
    folder: Path = args.base_path or base_path(arguments=[])
    path: Path = (args.file or folder / FILE_NAME).expanduser()
    try:
        ledger = read(path)
    except LedgerError as error:
        raise CommandError(str(error)) from error
    if not ledger.lines:
        raise CommandError(f"{path}: " + "; ".join(ledger.problems))
    lines = ledger.lines
    if args.only:
        wanted = args.only.casefold()
        lines = [
            line for line in lines if any(wanted in text.casefold() for text in line.versions)
        ]
        if not lines:
            raise CommandError(f"{path}: nothing ran with {args.only!r} in a version")
    running = 0
    for state, lives in presence.states(path):
        if lives:
            running += 1
        elif not state.ended:  # no server has begun since, to count it
            lines = [*lines, presence.line_of(state)]
    report = {
        "file": str(path),
        "problems": ledger.problems,
        "running": running,
        **summarise(lines),
    }
    print(json.dumps(report, indent=2) if args.json else "\n".join(render(report)))
    return 0


# --- the figures ------------------------------------------------------------------------


def summarise(lines: Sequence[Line]) -> dict[str, Any]:
    """The whole report as plain data; hours and rates per hour."""
    total = merged(line.record for line in lines)
    return {
        "from": min(line.start for line in lines),
        "to": max(line.end for line in lines),
        "starts": sum(line.starts for line in lines),
        "stops": sum(line.stops for line in lines),
        "dropped_lines": sum(line.dropped for line in lines),
        "ended": [
            {"busy": busy, "serialised": serialised, "count": count}
            for busy in (2, 1, 0)
            for serialised in (False, True)
            if (count := total.sudden_ends(busy=busy, serialised=serialised))
        ],
        "advice": None if total.hours(busy=2, serialised=True) else advice(total),
        "hours_across": total.across / 3600.0,
        "exposure": _exposure(total),
        "engines": _engines(total),
        "faults": [
            {
                "class": fault.value,
                "engine": engine,
                "busy": cell.busy,
                "long": cell.long,
                "serialised": cell.serialised,
                "count": count,
            }
            for (fault, engine, cell), count in sorted(total.faults.items())
        ],
        "versions": _versions(lines),
        "evidence": [
            {
                **dict(zip(_COMPARED, versions, strict=True)),
                **evidence(record, comparable=SEVERAL not in versions),
            }
            for versions, record in _comparable(lines).items()
        ],
    }


_COMPARED = ("omlx", "mlx", "os")
SEVERAL = "several"


def _comparable(lines: Sequence[Line]) -> dict[tuple[str, ...], Record]:
    """What ran under equal versions of oMLX, MLX and the system, in order. What a new version
    changes must not pass for what turns change."""
    groups: dict[tuple[str, ...], Record] = {}
    for line in lines:
        key = tuple(getattr(line.versions, name) for name in _COMPARED)
        groups.setdefault(key, Record()).add(line.record)
    return groups


def _rate(events: int, hours: float) -> dict[str, Any]:
    row: dict[str, Any] = {"hours": hours, "lockups": events}
    if hours > 0.0:
        rate = poisson_rate(events, hours)
        row |= {"per_hour": rate.per_hour, "low": rate.low, "high": rate.high}
    return row


def _exposure(total: Record) -> list[dict[str, Any]]:
    rows = []
    for serialised in (False, True):
        for busy in (0, 1, 2):
            found = [
                long
                for long in (0, 1, 2)
                if total.hours(busy=busy, serialised=serialised, long=long)
                or total.count(busy=busy, serialised=serialised, long=long)
            ]
            # Each kind apart, then their sum where there is more than one to sum.
            for long in [*found, *([None] if len(found) > 1 else [])]:
                where: dict[str, Any] = {"busy": busy, "long": long, "serialised": serialised}
                count = total.count(busy=busy, serialised=serialised, long=long)
                hours = total.hours(busy=busy, serialised=serialised, long=long)
                rows.append(where | _rate(count, hours))
    return rows


def _engines(total: Record) -> list[dict[str, Any]]:
    rows = []
    for serialised in (False, True):
        for engine in sorted(total.names()):
            row: dict[str, Any] = {"engine": engine, "serialised": serialised}
            for name, busy in (("alone", 1), ("with_others", 2)):
                seconds = total.engines.get((engine, busy, serialised), 0.0)
                row[f"hours_{name}"] = seconds / 3600.0
                row[f"lockups_{name}"] = sum(
                    count
                    for (fault, who, cell), count in total.faults.items()
                    if who == engine
                    and fault.is_lockup
                    and cell.busy == busy
                    and cell.serialised == serialised
                )
            if any(row[key] for key in row if key not in ("engine", "serialised")):
                rows.append(row)
    return rows


def _versions(lines: Sequence[Line]) -> list[dict[str, Any]]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.versions, []).append(line)
    rows = []
    for versions, group in groups.items():
        record = merged(line.record for line in group)
        rows.append(
            {
                **versions._asdict(),
                "hours_one": sum(record.hours(busy=1, serialised=on) for on in (False, True)),
                "hours_two_off": record.hours(busy=2, serialised=False),
                "hours_two_on": record.hours(busy=2, serialised=True),
                "lockups": sum(record.lockups.values()),
            }
        )
    return rows


def evidence(total: Record, *, comparable: bool = True) -> dict[str, Any]:
    """What the ledger shows on two questions: do lockups prefer two busy engines, and do
    turns prevent them. Fields are None where the counts so far say nothing."""
    one_hours = total.hours(busy=1, serialised=False)
    one = total.count(busy=1, serialised=False)
    two_hours = total.hours(busy=2, serialised=False)
    two = total.count(busy=2, serialised=False)
    turn_hours = total.hours(busy=2, serialised=True)
    turn = total.count(busy=2, serialised=True)
    result: dict[str, Any] = {
        "one": _rate(one, one_hours),
        "two": _rate(two, two_hours),
        "two_serialised": _rate(turn, turn_hours),
        "chance_in_two_engine_share": None,
        "chance_if_turns_changed_nothing": None,
        "needed": None,
    }
    busy_hours = one_hours + two_hours
    if not comparable:
        return result
    if one + two and busy_hours > 0.0:
        result["chance_in_two_engine_share"] = chance_in_share(
            two, one + two, two_hours / busy_hours
        )
    if not two or two_hours <= 0.0:
        return result
    if turn_hours > 0.0:
        result["chance_if_turns_changed_nothing"] = chance_so_few(
            two, two_hours, turn, turn_hours
        )
    needed = {}
    for name, alpha, factor in (
        ("p_0.05", 0.05, 1.0),
        ("p_0.01", 0.01, 1.0),
        ("five_fold", 0.05, FACTOR),
    ):
        hours = hours_needed(two, two_hours, alpha, factor=factor, later=turn)
        needed[name] = {"hours": hours, "still": max(0.0, hours - turn_hours)}
    if not turn:  # only then does the simpler reckoning apply
        for name, alpha in (("low", 0.05), ("high", 0.025)):
            needed["five_fold"][name] = hours_needed_known_rate(
                two, two_hours, alpha, factor=FACTOR
            )
    result["needed"] = needed
    return result


# --- the page ---------------------------------------------------------------------------


def render(report: dict[str, Any]) -> list[str]:
    """The report as lines of text."""
    out = [f"GPU exposure ledger {report['file']}"]
    out += [f"  note: {problem}" for problem in report["problems"]]
    if report["dropped_lines"]:
        out.append(f"  note: {report['dropped_lines']} unreadable lines were dropped before")
    days = [time.strftime("%Y-%m-%d", time.localtime(report[key])) for key in ("from", "to")]
    out.append(f"  {days[0]} to {days[1]}, server runs: {report['starts']}")
    ended = sum(row["count"] for row in report["ended"])
    for row in report["ended"]:
        out.append(
            f"  {row['count']} ended suddenly with {_BUSY[row['busy']]} busy"
            + (f", turns {_TURNS[row['serialised']]}" if row["busy"] else "")
        )
    if ended:
        out.append("  Metal may end a process that way: such a lockup is not among those below")
    if report["running"]:
        out.append(f"  running now: {report['running']}")
    open_ended = report["starts"] - report["stops"] - ended - report["running"]
    if open_ended > 0:
        out.append(
            f"  {open_ended} of them did not end in good order (killed, crashed) or still run;"
            " Metal often ends a process itself, and such a lockup is not counted below"
        )
    if report["hours_across"]:
        out.append(
            f"  {_hours(report['hours_across'])} h of those with two or more busy were engines "
            "of two servers: turns do not reach from one to the other"
        )
    kilo = LONG_TOKENS // 1024
    out += ["", "Exposure"]
    out += _table(
        (
            "engines busy",
            f"with {kilo}K request",
            "turns",
            "hours",
            "lockups",
            "per hour, 95 %",
        ),
        [
            (
                _BUSY[row["busy"]],
                "all" if row["long"] is None else _LONG[row["long"]],
                _TURNS[row["serialised"]],
                _hours(row["hours"]),
                str(row["lockups"]),
                _interval(row) if row["busy"] else "",
            )
            for row in report["exposure"]
        ],
    )
    if report["engines"]:
        out += ["", "Engines (hours, and the lockups each reported)"]
        out += _table(
            ("engine", "turns", "alone", "lockups", "with others", "lockups"),
            [
                (
                    row["engine"],
                    _TURNS[row["serialised"]],
                    _hours(row["hours_alone"]),
                    str(row["lockups_alone"]),
                    _hours(row["hours_with_others"]),
                    str(row["lockups_with_others"]),
                )
                for row in report["engines"]
            ],
        )
    if report["faults"]:
        out += ["", "Faults reported (one lockup may show as a hang and several victims)"]
        out += _table(
            ("class", "engine", "engines busy", "turns", "count"),
            [
                (
                    row["class"],
                    row["engine"],
                    _BUSY[row["busy"]],
                    _TURNS[row["serialised"]],
                    str(row["count"]),
                )
                for row in report["faults"]
            ],
        )
    out += ["", "Versions (hours by engines busy)"]
    out += _table(
        ("oMLX", "MLX", "system", "one", "two, off", "two, on", "lockups"),
        [
            (
                row["omlx"] or "?",
                row["mlx"] or "?",
                row["os"] or "?",
                _hours(row["hours_one"]),
                _hours(row["hours_two_off"]),
                _hours(row["hours_two_on"]),
                str(row["lockups"]),
            )
            for row in report["versions"]
        ],
    )
    out += ["", "What it shows"]
    told = [row for row in report["evidence"] if _tells(row)] or report["evidence"][-1:]
    if len(report["evidence"]) > 1:
        out.append("  Turns on and off are compared within equal versions only.")
    for found in told:
        if len(report["evidence"]) > 1:
            names = (found["omlx"] or "?", found["mlx"] or "?", found["os"] or "?")
            out += ["", "  oMLX {}, MLX {}, {}:".format(*names)]
        out += _findings(found)
    if report["advice"]:
        out += textwrap.wrap(
            report["advice"][:1].upper() + report["advice"][1:] + ".",
            width=96,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    return [
        *out,
        "  All this takes lockups as independent. Retries cluster them, so that the true "
        "evidence is weaker.",
    ]


def _tells(found: dict[str, Any]) -> bool:
    """Whether there is anything to say of these versions."""
    return bool(found["two"]["hours"] or found["two_serialised"]["hours"]) or any(
        found[key]["lockups"] for key in ("one", "two", "two_serialised")
    )


def _findings(found: dict[str, Any]) -> list[str]:
    one, two, turn = found["one"], found["two"], found["two_serialised"]
    out = [
        f"  one engine busy:             {_counted(one)}",
        f"  two or more, turns off:      {_counted(two)}",
        f"  two or more, turns on:       {_counted(turn)}",
    ]
    chance = found["chance_in_two_engine_share"]
    if chance is not None:
        lockups = one["lockups"] + two["lockups"]
        which = "all" if two["lockups"] == lockups else f"{two['lockups']} or more"
        out.append(
            f"  Turns off: were it chance alone, {which} of {lockups} lockups would fall into "
            f"those {_hours(two['hours'])} h of {_hours(one['hours'] + two['hours'])} h "
            f"with p = {_small(chance)}."
        )
    needed = found["needed"]
    if needed is None:
        out.append(
            "  These are sums of several versions: nothing is compared in them."
            if SEVERAL in (found[name] for name in _COMPARED)
            else "  Nothing can be said about turns before a lockup is counted with two "
            "engines busy and turns off."
        )
        return out
    same = found["chance_if_turns_changed_nothing"]
    if same is not None:
        out.append(
            "  Turns on: if they changed nothing, so few lockups would have "
            f"p = {_small(same)}."
        )
    out.append(
        "  Hours with two engines busy and turns on, without a lockup, still needed to show"
    )
    for name, label in (
        ("p_0.05", "any reduction, p < 0.05"),
        ("p_0.01", "any reduction, p < 0.01"),
        ("five_fold", f"a reduction of {FACTOR:.0f} times or more, p < 0.05"),
    ):
        item = needed[name]
        text = f"    {label + ':':<43}{_hours(item['still']):>6} h"
        if item["still"] < item["hours"]:
            text += f", of {_hours(item['hours'])} h in all"
        if not item["still"]:
            text += " (shown)"
        out.append(text)
        if "low" in item:
            out.append(
                f"      ({_hours(item['low'])} to {_hours(item['high'])} h in all if the "
                "rate without turns were known exactly, one- and two-sided)"
            )
    return out


def _counted(row: dict[str, Any]) -> str:
    text = f"{row['lockups']} lockups in {_hours(row['hours'])} h"
    return f"{text}, {_interval(row)} per hour" if "per_hour" in row else text


def _interval(row: dict[str, Any]) -> str:
    if "per_hour" not in row:
        return "-"
    return f"{row['per_hour']:.3g} ({row['low']:.2g} to {row['high']:.2g})"


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 1.0 or not hours else f"{hours:.2g}"


def _small(chance: float) -> str:
    return f"{chance:.2g}".replace("e-0", "e-")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
