"""``omlx-admission repro``: do two threads on two MLX streams hang the GPU? No oMLX in it.

One thread does prefill-like work (a chunk of tokens through attention over a long context
and wide matrix products), the other decode-like work (bursts of many small steps, each
submitted before the one before it is waited for), each on a stream of its own, as two
text engines of oMLX do. ``--turn on`` makes them take turns: one burst or one chunk, then
the stream is synchronised and the turn handed over, first come first served.

The work runs in a child process; this one has no MLX in it and only watches. So a call
into a hung GPU, which nothing can interrupt, and a Metal error in a completion handler,
which ends the process without an exception, still end in a report.

A run without a fault proves little by itself: the report says how often hangs must be, to be
excluded by it, and how long a run has to be for the rate that was reported.

Exit status: 0 no fault, 3 a fault (a GPU error, a standstill, or the child's sudden end),
2 a bad call, 1 the work failed for another reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from omlx_admission import __version__
from omlx_admission.gpu.exposure_file import system_version
from omlx_admission.gpu.faults import classify_text
from omlx_admission.gpu.statistics import poisson_rate
from omlx_admission.surfaces import repro_work
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.repro_work import BEAT_S, GRACE_S, SIZES

REPORTED_PER_HOUR = 9 / 6.9
"""Hangs in an hour with two engines busy, in oMLX issue 4224."""
CONFIDENCE = 0.95
PROGRESS_S = 60.0
_LONGEST_S = 7 * 86_400.0

_HELP = {
    "prefill_width": "model width of the prefill-like work, a multiple of 128",
    "prefill_layers": "its layers",
    "chunk": "tokens in one prefill chunk",
    "context": "tokens of context that attention reads, in both kinds of work",
    "decode_width": "model width of the decode-like work, a multiple of 128",
    "decode_layers": "its layers",
    "burst": "decode steps between two hand-overs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long each run lasts (default 60)",
    )
    length.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help=f"the same in hours; {_hours_for(REPORTED_PER_HOUR):.1f} would have shown the "
        "rate of oMLX issue 4224",
    )
    parser.add_argument(
        "--turn",
        choices=("off", "on", "both"),
        default="both",
        help="whether the threads take turns; both: one run without, then one with",
    )
    parser.add_argument(
        "--device", choices=("auto", "gpu", "cpu"), default="auto", help="default: MLX's own"
    )
    parser.add_argument(
        "--stall-s",
        type=float,
        default=60.0,
        metavar="S",
        help="a thread without progress for so long counts as hung (default 60)",
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        default=0,
        metavar="N",
        help="end a thread after N chunks or bursts; 0: only the time ends it",
    )
    for name, text in _HELP.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            metavar="N",
            help=f"{text} (default on a GPU {SIZES['gpu'][name]}, a CPU {SIZES['cpu'][name]})",
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Run what was asked for, print the report, return the exit status."""
    config = _config(args)
    if importlib.util.find_spec("mlx") is None or importlib.util.find_spec("mlx.core") is None:
        raise CommandError(
            "MLX is not installed in this Python; oMLX's own has it "
            "(elsewhere: pip install mlx, on Linux 'mlx[cpu]')"
        )
    if config["device"] == "gpu" and not _has_gpu():
        raise CommandError("--device gpu: MLX has no GPU here; allowed: cpu")
    runs = []
    for turn in {"off": [False], "on": [True], "both": [False, True]}[args.turn]:
        _say(f"running {_length(config['seconds'])} with turns {'on' if turn else 'off'} ...")
        runs.append(watch({**config, "turn": turn}, progress=_progress))
    report = {
        "omlx_admission": __version__,
        "python": platform.python_version(),
        "os": system_version(),
        "runs": runs,
    }
    print(json.dumps(report, indent=2) if args.json else "\n".join(render(report)))
    return status(runs)


def _say(text: str) -> None:
    """How far it is, beside the report and not in it."""
    print(text, file=sys.stderr, flush=True)


def _progress(result: dict[str, Any], passed: float) -> None:
    done = ", ".join(
        f"{name} {thread['steps']} {_UNITS[name]}" for name, thread in result["threads"].items()
    )
    _say(f"  {_length(passed)}: {done or 'starting'}, no fault")


def _length(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:g} s" if seconds == round(seconds, 3) else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"


def _hours_for(per_hour: float) -> float:
    """How long a run has to be for a fault to be in it with `CONFIDENCE`."""
    return -math.log(1.0 - CONFIDENCE) / per_hour


def excluded_per_hour(seconds: float) -> float:
    """Faults more often than this are excluded by ``seconds`` without one."""
    # One-sided: half of what is left out lies below.
    return poisson_rate(0, seconds / 3600.0, 2.0 * CONFIDENCE - 1.0).high


def _has_gpu() -> bool:
    """Whether MLX has one; asked in a child, as this process never imports MLX."""
    code = "import mlx.core as mx; raise SystemExit(not mx.is_available(mx.gpu))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return True  # the runs will say what is wrong with it
    return done.returncode == 0


def status(runs: list[dict[str, Any]]) -> int:
    """The exit status that ``runs`` amount to."""
    outcomes = {one["outcome"] for one in runs}
    if outcomes & {"fault", "stalled", "crashed"}:
        return 3
    return 1 if "failed" in outcomes else 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "seconds": args.seconds if args.hours is None else 3600.0 * args.hours,
        "stall_s": args.stall_s,
        "max_steps": args.max_steps,
        "device": args.device,
        "sizes": {name: getattr(args, name) for name in _HELP if getattr(args, name)},
    }
    for name in ("seconds", "stall_s"):
        if not 0.0 < config[name] <= _LONGEST_S:
            option = "hours" if name == "seconds" and args.hours is not None else name
            most = _LONGEST_S / (3600.0 if option == "hours" else 1.0)
            raise CommandError(
                f"--{option.replace('_', '-')} must be from over 0 to {most:.0f}"
            )
    if args.max_steps < 0:
        raise CommandError("--max-steps must be 0 or more")
    for name in _HELP:
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 1_000_000:
            raise CommandError(f"--{name.replace('_', '-')} must be from 1 to 1000000")
        if value is not None and name.endswith("width") and value % 128:
            raise CommandError(f"--{name.replace('_', '-')} must be a multiple of 128")
    return config


# --- the watching process ---------------------------------------------------------------


def watch(
    config: dict[str, Any],
    command: list[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[dict[str, Any], float], None] = lambda _result, _passed: None,
) -> dict[str, Any]:
    """Run one child to its end, or end it when it stands still; what happened, as data.

    ``command`` (tests only) replaces the child; ``progress`` is told every `PROGRESS_S`.
    """
    child = subprocess.Popen(
        [*(command or [sys.executable, "-m", repro_work.__name__]), json.dumps(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    errors: deque[str] = deque(maxlen=40)

    def listen() -> None:
        assert child.stdout is not None
        for text in child.stdout:
            try:
                message = json.loads(text)
            except ValueError:
                continue
            if isinstance(message, dict):
                said.put(message)
        said.put(None)

    def collect() -> None:
        assert child.stderr is not None
        errors.extend(text.rstrip("\n") for text in child.stderr)

    listener = threading.Thread(target=listen, daemon=True)
    collector = threading.Thread(target=collect, daemon=True)
    listener.start()
    collector.start()
    result: dict[str, Any] = {"turn": config["turn"], "threads": {}}
    stood: dict[str, tuple[Any, float]] = {}  # thread -> its step count, and since when
    outcome = ""
    begun = clock()
    heard = told = begun
    stall_s = config["stall_s"]
    try:
        while not outcome:
            try:
                message = said.get(timeout=min(BEAT_S, stall_s))
            except queue.Empty:
                if clock() - heard > stall_s + BEAT_S:
                    outcome = "stalled"
                    result["standing"] = sorted(stood) or ["start"]
                continue
            if message is None:
                break
            heard = clock()
            if heard - told >= PROGRESS_S:
                told = heard
                progress(result, heard - begun)
            outcome = message.pop("outcome", "")
            result.update(message)
            for name, thread in result["threads"].items():
                steps = thread["steps"]
                if thread["ended"]:
                    stood.pop(name, None)
                elif name not in stood or stood[name][0] != steps:
                    stood[name] = (steps, heard)
            standing = [name for name, (_, since) in stood.items() if heard - since > stall_s]
            # One that waits for the turn of a hung one is not itself hung.
            active = [name for name in standing if not result["threads"][name]["waiting"]]
            if standing and not outcome:
                outcome, result["standing"] = "stalled", sorted(active or standing)
        if outcome == "" or outcome != "stalled":
            child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        pass  # it said its last word, and hangs while it ends
    finally:
        result["ended"] = _end(child)
    for reader, pipe in ((listener, child.stdout), (collector, child.stderr)):
        reader.join(timeout=5.0)
        if not reader.is_alive() and pipe is not None:  # else closing would wait for it
            pipe.close()
    result["seconds"] = round(clock() - begun, 3)
    result["outcome"] = outcome or _sudden_end(result, list(errors))
    result["stderr"] = list(errors)
    if result["outcome"] == "clean" and result.get("worked_s"):
        result["excluded_per_hour"] = excluded_per_hour(result["worked_s"])
    return result


def _end(child: subprocess.Popen[str]) -> str:
    """How the child ended; ended here if it has not."""
    if child.poll() is None:
        child.kill()
        try:
            child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "not even a kill ends it: the driver holds it"
        return "killed"
    code = child.returncode
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _sudden_end(result: dict[str, Any], errors: list[str]) -> str:
    """The outcome of a child that ended without a last word."""
    for text in errors:
        # libc++abi: terminating due to uncaught exception of type ...: [METAL] ...
        at = text.find("[METAL]")
        fault = classify_text(text[at:] if at >= 0 else text)
        if fault is not None:
            result.setdefault("faults", []).append(
                {"thread": None, "class": fault.value, "text": text}
            )
    if any(fault["class"] for fault in result.get("faults", [])):
        return "fault"
    # An error in Python, or a kill from outside (the system, when memory is short), says
    # nothing about the GPU.
    ended = result["ended"]
    return "failed" if ended.startswith("exit status") or ended == "SIGKILL" else "crashed"


# --- the page ---------------------------------------------------------------------------

_UNITS = {"prefill": "chunks", "decode": "bursts"}
_OUTCOMES = {
    "clean": "no fault",
    "fault": "FAULT: the GPU reported an error",
    "stalled": "FAULT: no progress, the process was ended",
    "crashed": "FAULT: the process ended suddenly",
    "failed": "failed for another reason than the GPU",
}


def render(report: dict[str, Any]) -> list[str]:
    """The report as lines of text."""
    out = [
        f"omlx-admission {report['omlx_admission']}, Python {report['python']}, {report['os']}"
    ]
    first = next((one for one in report["runs"] if "mlx" in one), None)
    if first is not None:
        device = first["device"]
        name = device.get("device_name") or device.get("architecture") or ""
        out.append(f"MLX {first['mlx']} on {device['name']} {name}".rstrip())
        sizes = first["sizes"]
        out.append("sizes: " + ", ".join(f"{key} {value}" for key, value in sizes.items()))
        out.append(f"weights and context: {first['memory_gb']:.2g} GB")
    for one in report["runs"]:
        out += ["", f"turns {'on' if one['turn'] else 'off'}: {_OUTCOMES[one['outcome']]}"]
        for name, thread in one["threads"].items():
            out.append(
                f"  {name:<8} {thread['steps']:>6} {_UNITS[name]}, "
                f"{thread['busy_s']:.1f} s of work (longest {thread['longest_s']:.3f} s), "
                f"waited {thread['wait_s']:.1f} s"
            )
        if "overlap_s" in one:
            out.append(
                f"  both at once for {one['overlap_s']:.1f} s of {one['worked_s']:.1f} s"
            )
        if "excluded_per_hour" in one:
            out += _shown(one)
        for fault in one.get("faults", []):
            where = f" in {fault['thread']}" if fault["thread"] else ""
            after = f" after {fault['after_steps']} steps" if "after_steps" in fault else ""
            label = fault["class"] or fault.get("type", "error")
            out.append(f"  {label}{where}{after}: {fault['text']}")
        if "standing" in one:
            out.append(f"  no progress: {', '.join(one['standing'])}")
        if one["outcome"] in ("stalled", "crashed", "failed"):
            out.append(f"  the child: {one['ended']}")
            out += [f"  | {text}" for text in one["stderr"][-8:]]
    return out


def _shown(one: dict[str, Any]) -> list[str]:
    """What a run without a fault shows, and what it does not."""
    per_hour = one["excluded_per_hour"]
    out = [
        f"  so {_length(one['worked_s'])} exclude faults at a rate of {per_hour:.2g} an hour "
        f"or more ({CONFIDENCE:.0%}), and no lower rate"
    ]
    if per_hour > REPORTED_PER_HOUR:
        out.append(
            f"  the {REPORTED_PER_HOUR:.1f} an hour of oMLX issue 4224 would take "
            f"--hours {_hours_for(REPORTED_PER_HOUR):.1f}"
        )
    if "cpu" in one.get("device", {}).get("name", ""):
        out.append("  it ran on the CPU, which says nothing about a GPU")
    return out
