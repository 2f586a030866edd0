"""``omlx-admission repro``: do two threads on two MLX streams hang the GPU? No oMLX in it.

One thread does prefill-like work (a chunk of tokens through attention over a long context
and wide matrix products), the other decode-like work (bursts of many small steps, each
submitted before the one before it is waited for), each on a stream of its own, as two
text engines of oMLX do. ``--turn on`` makes them take turns: one burst or one chunk, then
the stream is synchronised and the turn handed over, first come first served.

The work runs in a child process; this one has no MLX in it and only watches. So a call
into a hung GPU, which nothing can interrupt, and a Metal error in a completion handler,
which ends the process without an exception, still end in a report.

Exit status: 0 no fault, 3 a fault (a GPU error, a standstill, or the child's sudden end),
2 a bad call, 1 the work failed for another reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
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
from omlx_admission.surfaces import repro_work
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.repro_work import BEAT_S, GRACE_S, SIZES

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
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long each run lasts (default 60)",
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
        if not args.json:
            print(
                f"running {config['seconds']:g} s with turns {'on' if turn else 'off'} ...",
                file=sys.stderr,
                flush=True,
            )
        runs.append(watch({**config, "turn": turn}))
    report = {
        "omlx_admission": __version__,
        "python": platform.python_version(),
        "os": system_version(),
        "runs": runs,
    }
    print(json.dumps(report, indent=2) if args.json else "\n".join(render(report)))
    return status(runs)


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
        "seconds": args.seconds,
        "stall_s": args.stall_s,
        "max_steps": args.max_steps,
        "device": args.device,
        "sizes": {name: getattr(args, name) for name in _HELP if getattr(args, name)},
    }
    for name in ("seconds", "stall_s"):
        if not 0.0 < config[name] <= 86_400.0:
            raise CommandError(f"--{name.replace('_', '-')} must be from over 0 to 86400")
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
) -> dict[str, Any]:
    """Run one child to its end, or end it when it stands still; what happened, as data.

    ``command`` (tests only) replaces the child.
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
    heard = begun
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
            unit = "chunks" if name == "prefill" else "bursts"
            out.append(
                f"  {name:<8} {thread['steps']:>6} {unit}, {thread['busy_s']:.1f} s of work "
                f"(longest {thread['longest_s']:.3f} s), waited {thread['wait_s']:.1f} s"
            )
        if "overlap_s" in one:
            out.append(
                f"  both at once for {one['overlap_s']:.1f} s of {one['worked_s']:.1f} s"
            )
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
