"""``omlx-admission top``: a running server's status in a terminal.

A screen that refreshes where the output is a terminal and ``rich`` is installed;
otherwise a line whenever something changed, for a log or a pipe.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omlx_admission import settings
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.summary import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Longest wait for one answer, in seconds.
_TIMEOUT_S = 10.0
_BAR = 40

Document = dict[str, Any]

# A proxy for the web has no part in a call to this machine or the one beside it.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="oMLX's API key (default: OMLX_API_KEY)"
    )
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between looks"
    )
    parser.add_argument("--once", action="store_true", help="print one report and end")


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0.1 to 3600")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Follow until Ctrl-C. With ``--once``: exit status 1 where the server needs help."""
    url = arguments.url.rstrip("/")
    if urlsplit(url).scheme not in ("http", "https"):
        raise CommandError(f"--url {arguments.url}: expected http:// or https://")
    key = arguments.api_key or settings.api_key()
    # The first look is strict: a wrong address is an error, not something to wait for.
    document = fetch(url, key)
    if arguments.once:
        print("\n".join(report(document)))
        return int(not document["health"]["ok"])
    follow = (_screen() if sys.stdout.isatty() else None) or _lines
    try:
        return follow(document, url, key, arguments.interval)
    except KeyboardInterrupt:
        return 0  # as it says on the screen


class Unreachable(CommandError):
    """No answer: the server is down or starts again."""


def fetch(url: str, key: str | None) -> Document:
    """The status document of the server at ``url``.

    Raises:
        Unreachable: nothing answers there.
        CommandError: what answers refuses, or is no server with omlx-admission.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/admission/status", headers=headers)
    try:
        with _direct.open(request, timeout=_TIMEOUT_S) as answer:
            document = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            hint = "the API key was refused" if key else "it wants an API key"
            raise CommandError(f"{url}: {hint}; give --api-key or set OMLX_API_KEY") from None
        if error.code == 404:
            raise CommandError(
                f"{url} has no /admission: omlx-admission is not active there "
                "(try `omlx-admission doctor`)"
            ) from None
        raise Unreachable(f"{url} answered {error.code}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} does not answer: {reason}") from None
    if not isinstance(document, dict) or document.get("schema") != 1:
        raise CommandError(f"{url}: its status has a schema that this release does not know")
    return document


# -- plain --------------------------------------------------------------------


def report(document: Document) -> list[str]:
    """The whole status as lines."""
    memory, queue = document["memory"], document["queue"]
    lines = [_health(document), document["summary"], "", _memory(memory)]
    for model in document["models"]:
        if model["state"] != "absent":
            lines.append(
                f"  {model['model']:<28} {model['state']:<10} {_gb(model['bytes']):>9}"
                f"  leases {model['leases']}  waiting {model['waiting']}"
            )
    lines += ["", f"waiting {queue['waiting']}"]
    lines += _parked(document)
    for waiter in queue["waiters"]:
        lines.append(
            f"  {waiter['position']:>3}. {waiter['model']:<24} {seconds(waiter['age_s']):>8}"
            f"  {waiter['request'] or 'internal call'}: {waiter['text']}"
        )
    if queue["omitted"]:
        lines.append(f"  and {queue['omitted']} more")
    lines += ["", f"GPU turn: {_turn(document)}", *_exposure(document)]
    for refusal in document["refusals"][:5]:
        lines.append(f"refused {_clock(refusal['at'])} {refusal['code']}: {refusal['text']}")
    for swap in document["swaps"][:5]:
        victims = f" for {', '.join(swap['victims'])}" if swap["victims"] else ""
        lines.append(
            f"swap    {_clock(swap['at'])} {swap['target']}{victims}: {swap['result']}, drain "
            f"{seconds(swap['drain_s'])}, load {seconds(swap['load_s'])}, "
            f"served {swap['served']}"
        )
    return lines


def _parked(document: Document) -> list[str]:
    parked = document["queue"]["parked"]
    if not parked["answers"]:
        return []
    return [
        f"parked  {parked['answers']} answers, {_gb(parked['bytes'])}, "
        f"for {seconds(parked['oldest_s'])} at most"
    ]


def line(document: Document) -> str:
    """The status as one line."""
    held = [
        f"{m['model']}={m['state']}"
        for m in document["models"]
        if m["state"] not in ("absent", "queued")
    ]
    waiting = ", ".join(f"{m['model']} {m['waiting']}" for m in document["queue"]["models"])
    parts = [
        _clock(document["at"]),
        "ok" if document["health"]["ok"] else "UNHEALTHY",
        " ".join(held) or "no model",
        f"waiting {document['queue']['waiting']}" + (f" ({waiting})" if waiting else ""),
        f"swaps {document['totals']['swaps']}",
        f"refusals {document['totals']['refusals']}",
    ]
    return "  ".join([*parts, *(p["text"] for p in document["health"]["problems"])])


def _lines(document: Document, url: str, key: str | None, interval: float) -> int:
    said, problem = "", None
    while True:
        text = problem or line(document).partition("  ")[2]
        if text != said:  # the time alone is no news
            said = text
            print(f"{_clock(time.time())}  {text}", flush=True)
        document, problem = _next(document, url, key, interval)


def _next(
    document: Document, url: str, key: str | None, interval: float
) -> tuple[Document, str | None]:
    """The next look; the old document and what is wrong where no server answers."""
    time.sleep(interval)
    try:
        return fetch(url, key), None
    except Unreachable as error:
        return document, f"{error}; trying again"


def _health(document: Document) -> str:
    problems = document["health"]["problems"]
    state = (
        "healthy"
        if not problems
        else "NEEDS ATTENTION: " + "; ".join(p["text"] for p in problems)
    )
    return (
        f"omlx-admission {document['omlx_admission']} in oMLX {document['omlx']}, up "
        f"{seconds(document['uptime_s'])}: {state}"
    )


def _memory(memory: Document) -> str:
    held = memory["resident_bytes"] + memory["reserved_bytes"]
    ceiling = memory["ceiling_bytes"]
    if not ceiling:
        return f"memory {_gb(held)}, no ceiling"
    full = min(1.0, held / ceiling)
    loading = min(full, memory["reserved_bytes"] / ceiling)
    solid = round((full - loading) * _BAR)
    bar = "#" * solid + "+" * (round(full * _BAR) - solid)
    return f"memory [{bar:<{_BAR}}] {_gb(held)} of {_gb(ceiling)} (# loaded, + loading)"


def _turn(document: Document) -> str:
    turn = document["gpu_turn"]
    if turn is None or not turn["on"]:
        return "off, engines take no turns"
    if turn["holder"] is None:
        return "free"
    waiting = ", ".join(w["engine"] for w in turn["waiting"])
    stuck = ", STUCK" if turn["stuck"] else ""
    return f"{turn['holder']} ({turn['site']}) for {seconds(turn['held_s'])}{stuck}" + (
        f"; waiting: {waiting}" if waiting else ""
    )


def _exposure(document: Document) -> list[str]:
    """What the GPU did since the server began; nothing where it is not counted."""
    found = document["exposure"]
    if found is None:
        return []
    lines = [
        f"GPU: two or more engines busy for {seconds(found['busy_s']['2'])}, "
        f"{found['lockups']} lockups"
    ]
    replays = found["replays"]
    if replays["count"]:
        lines.append(
            f"MTP replays: {replays['count']} of {replays['tokens']} tokens in "
            f"{seconds(replays['seconds'])}, {replays['failed']} failed"
        )
    lines += [
        f"fault   {_clock(f['at'])} {f['fault']} in {f['engine']}: {f['circumstances']}"
        for f in found["last_faults"][:5]
    ]
    return [*lines, found["advice"]] if found["advice"] else lines


def _gb(size: int) -> str:
    # As oMLX prints it.
    return f"{size / 1024**3:.2f} GB"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


# -- rich ---------------------------------------------------------------------


def _screen() -> Callable[[Document, str, str | None, float], int] | None:
    """The refreshing screen; None where rich is not installed."""
    try:
        from rich.live import Live
    except ImportError:
        return None

    def follow(document: Document, url: str, key: str | None, interval: float) -> int:
        problem: str | None = None
        with Live(screen(document, None), screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(document, problem), refresh=True)
                document, problem = _next(document, url, key, interval)

    return follow


def screen(document: Document, problem: str | None) -> RenderableType:
    """The status for a terminal; ``problem`` says why it is old."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    if problem is not None:
        parts.append(Text(f"{problem}. What follows is old.", style="bold red"))
    ok = document["health"]["ok"]
    parts += [
        Text(_health(document), style="green" if ok else "bold red"),
        Text(document["summary"], style="bold"),
        Text(""),
        Text(_memory(document["memory"])),
        Text(""),
    ]
    colours = {
        "resident": "blue",
        "loading": "yellow",
        "draining": "magenta",
        "unloading": "bright_black",
        "queued": "red",
    }
    models = Table("Model", "State", "Memory", "In use by", "Waiting", "For", box=None)
    for model in document["models"]:
        if model["state"] != "absent":
            since = model["since"]
            models.add_row(
                Text(model["model"]),
                Text(model["state"], style=colours[model["state"]]),
                _gb(model["bytes"]),
                str(model["leases"] or "-"),
                str(model["waiting"] or "-"),
                "-" if since is None else seconds(max(0.0, document["at"] - since)),
            )
    parts += [models, Text("")]
    queue = document["queue"]
    if queue["waiters"]:
        waiters = Table("#", "Waits for", "Waited", "Gives up in", "Why", "Request", box=None)
        for waiter in queue["waiters"][:20]:
            waiters.add_row(
                str(waiter["position"]),
                Text(waiter["model"]),
                seconds(waiter["age_s"]),
                seconds(waiter["budget_left_s"]),
                Text(waiter["text"]),
                Text(waiter["request"] or "internal call"),
            )
        parts.append(waiters)
        if queue["waiting"] > 20:
            parts.append(Text(f"and {queue['waiting'] - 20} more"))
    else:
        parts.append(Text("No request waits."))
    parts += [Text(line) for line in _parked(document)]
    parts += [Text(""), Text(f"GPU turn: {_turn(document)}")]
    parts += [Text(text) for text in _exposure(document)]
    for refusal in document["refusals"][:3]:
        text = f"refused {_clock(refusal['at'])} {refusal['code']}: {refusal['text']}"
        parts.append(Text(text, style="bright_black"))
    parts.append(Text("Ctrl-C ends this.", style="bright_black"))
    return Group(*parts)
