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
import os
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
from omlx_admission.policy.gpu_faults import classify, classify_text
from omlx_admission.runtime.exposure_line import system_version
from omlx_admission.surfaces.cli import CommandError

BEAT_S = 0.5
"""How often the child says how far it is."""
GRACE_S = 10.0
"""How long a thread may still work when the time is up or the other one has failed: its
own error, usually as the victim, comes with the GPU's reset a few seconds later."""

SIZES: dict[str, dict[str, int]] = {
    # Near what reports §2 saw: a 2,048-token chunk over 32K of context beside a decode.
    "gpu": {
        "prefill_width": 4096,
        "prefill_layers": 4,
        "chunk": 2048,
        "context": 32768,
        "decode_width": 2048,
        "decode_layers": 8,
        "burst": 64,
    },
    # The same program at a size that a few CPU cores run many times a second.
    "cpu": {
        "prefill_width": 256,
        "prefill_layers": 2,
        "chunk": 64,
        "context": 256,
        "decode_width": 128,
        "decode_layers": 2,
        "burst": 16,
    },
}
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
        [*(command or [sys.executable, "-m", __name__]), json.dumps(config)],
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


# --- the working process ----------------------------------------------------------------


class FifoTurn:
    """A lock that serves strictly in the order of arrival."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """Wait for the turn."""
        with self._mutex:
            if not self._held:
                self._held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        mine.acquire()

    def release(self) -> None:
        """Hand the turn to whoever waits longest."""
        with self._mutex:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._held = False


class Overlap:
    """Seconds during which two or more threads had work on the device."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        """The caller's work starts."""
        with self._mutex:
            self._active += 1
            if self._active == 2:
                self._since = self._clock()

    def end(self) -> None:
        """The caller's work is done on the device, not merely submitted."""
        with self._mutex:
            if self._active == 2:
                self._seconds += self._clock() - self._since
            self._active -= 1

    def seconds(self) -> float:
        """The overlap so far."""
        with self._mutex:
            running = self._clock() - self._since if self._active >= 2 else 0.0
            return self._seconds + running


class Worker:
    """One thread of work and what became of it. Counters are its own thread's to write."""

    def __init__(self, name: str, build: Callable[[], tuple[Callable[[], None], Any]]) -> None:
        self.name = name
        self._build = build
        self.steps = 0
        self.waiting = False
        self.ended = False
        self.busy_s = 0.0
        self.wait_s = 0.0
        self.longest_s = 0.0
        self.fault: dict[str, Any] | None = None

    def work(
        self,
        synchronise: Callable[[Any], None],
        turn: FifoTurn | None,
        overlap: Overlap,
        done: Callable[[Worker], bool],
    ) -> None:
        """Build on this thread (streams are bound to it), then step until ``done``."""
        try:
            self._within(turn, overlap, self._prepare, synchronise, count=False)
            while not done(self):
                self._within(turn, overlap, self._step, synchronise, count=True)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs in the report
            kind = classify(error)
            self.fault = {
                "thread": self.name,
                "class": kind.value if kind is not None else None,
                "type": type(error).__name__,
                "text": str(error)[:2000],
                "after_steps": self.steps,
            }
        finally:
            self.ended = True

    def _prepare(self) -> None:
        self._step, self._stream = self._build()

    def _within(
        self,
        turn: FifoTurn | None,
        overlap: Overlap,
        step: Callable[[], None],
        synchronise: Callable[[Any], None],
        *,
        count: bool,
    ) -> None:
        asked = time.perf_counter()
        if turn is not None:
            self.waiting = True
            turn.acquire()
            self.waiting = False
        began = time.perf_counter()
        overlap.begin()
        try:
            step()
            synchronise(self._stream)
        finally:
            overlap.end()
            if turn is not None:
                turn.release()
        if count:
            took = time.perf_counter() - began
            self.steps += 1
            self.busy_s += took
            self.wait_s += began - asked
            self.longest_s = max(self.longest_s, took)

    def progress(self) -> dict[str, Any]:
        """The state of this thread as data."""
        return {
            "steps": self.steps,
            "waiting": self.waiting,
            "ended": self.ended,
            "busy_s": round(self.busy_s, 3),
            "wait_s": round(self.wait_s, 3),
            "longest_s": round(self.longest_s, 3),
        }


def prefill_like(mx: Any, device: Any, sizes: dict[str, int]) -> tuple[Callable[[], None], Any]:
    """One step: a chunk of tokens through every layer, evaluated layer by layer."""
    width = sizes["prefill_width"]
    stream = mx.new_stream(device)
    with mx.stream(stream):
        x = mx.random.normal((1, sizes["chunk"], width)).astype(_dtype(mx, device))
        layers = _layers(mx, device, width, sizes["prefill_layers"], sizes["context"])

    def step() -> None:
        with mx.stream(stream):
            y = x
            for layer in layers:
                y = _layer(mx, y, layer)
                mx.eval(y)

    return step, stream


def decode_like(mx: Any, device: Any, sizes: dict[str, int]) -> tuple[Callable[[], None], Any]:
    """One step: a burst of single-token steps, the next one submitted before the present
    one is waited for, as mlx-lm's generation does."""
    width = sizes["decode_width"]
    stream = mx.new_stream(device)
    with mx.stream(stream):
        token = mx.random.normal((1, 1, width)).astype(_dtype(mx, device))
        layers = _layers(mx, device, width, sizes["decode_layers"], sizes["context"])

    def one(y: Any) -> Any:
        for layer in layers:
            y = _layer(mx, y, layer)
        return y

    def step() -> None:
        with mx.stream(stream):
            present = one(token)
            mx.async_eval(present)
            for _ in range(sizes["burst"] - 1):
                following = one(present)
                mx.async_eval(following)
                mx.eval(present)
                present = following

    return step, stream


def _layers(mx: Any, device: Any, width: int, count: int, context: int) -> list[Any]:
    """Weights, then keys and values of ``context`` tokens, of each layer, evaluated."""
    dtype = _dtype(mx, device)
    shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    layers = []
    for _ in range(count):
        layer = [(mx.random.normal(shape) * shape[0] ** -0.5).astype(dtype) for shape in shapes]
        layer += [
            mx.random.normal((1, width // 128, context, 128)).astype(dtype) for _ in range(2)
        ]
        mx.eval(layer)  # one at a time: the float32 in between must not add up
        layers.append(layer)
    return layers


def memory_gb(sizes: dict[str, int], item_bytes: int) -> float:
    """Gigabytes (10^9 bytes) of weights, keys and values that ``sizes`` ask for."""
    items = 0
    for kind in ("prefill", "decode"):
        width = sizes[f"{kind}_width"]
        items += sizes[f"{kind}_layers"] * (12 * width**2 + 2 * width * sizes["context"])
    return items * item_bytes / 1e9


def _dtype(mx: Any, device: Any) -> Any:
    return mx.float32 if device.type == mx.cpu else mx.float16


def _layer(mx: Any, x: Any, layer: list[Any]) -> Any:
    into, out, up, down, keys, values = layer
    batch, length, width = x.shape
    qkv = mx.fast.rms_norm(x, None, 1e-5) @ into
    q = qkv[..., :width].reshape(batch, length, width // 128, 128).transpose(0, 2, 1, 3)
    attended = mx.fast.scaled_dot_product_attention(q, keys, values, scale=128**-0.5)
    x = x + attended.transpose(0, 2, 1, 3).reshape(batch, length, width) @ out
    # Normalised, so that numbers stay finite however long the run is.
    return mx.fast.rms_norm(x + mx.maximum(x @ up, 0) @ down, None, 1e-5)


def child(config: dict[str, Any]) -> int:
    """The working process: says how far it is every `BEAT_S`, and at the end how it went."""
    mx: Any = importlib.import_module("mlx.core")
    device = {"auto": mx.default_device(), "gpu": mx.Device(mx.gpu), "cpu": mx.Device(mx.cpu)}[
        config["device"]
    ]
    mx.set_default_device(device)
    kind = "cpu" if device.type == mx.cpu else "gpu"
    sizes = {**SIZES[kind], **config["sizes"]}
    turn = FifoTurn() if config["turn"] else None
    overlap = Overlap()
    workers = [
        Worker("prefill", lambda: prefill_like(mx, device, sizes)),
        Worker("decode", lambda: decode_like(mx, device, sizes)),
    ]
    _say(
        {
            "mlx": mx.__version__,
            "device": _device(mx, device),
            "sizes": sizes,
            "memory_gb": round(memory_gb(sizes, 4 if kind == "cpu" else 2), 3),
        }
    )
    begun = time.monotonic()

    def done(worker: Worker) -> bool:
        return (
            time.monotonic() - begun >= config["seconds"]
            or any(other.fault is not None for other in workers)
            or 0 < config["max_steps"] <= worker.steps
        )

    threads = [
        threading.Thread(
            target=worker.work, args=(mx.synchronize, turn, overlap, done), daemon=True
        )
        for worker in workers
    ]
    for thread in threads:
        thread.start()

    def state() -> dict[str, Any]:
        return {
            "threads": {worker.name: worker.progress() for worker in workers},
            "overlap_s": round(overlap.seconds(), 3),
            "worked_s": round(time.monotonic() - begun, 3),
            "faults": [worker.fault for worker in workers if worker.fault is not None],
        }

    failed_at: float | None = None
    while any(thread.is_alive() for thread in threads):
        next(thread for thread in threads if thread.is_alive()).join(BEAT_S)
        now = state()
        _say(now)
        if now["faults"]:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > GRACE_S:
                break
    now = state()
    known = any(fault["class"] for fault in now["faults"])
    _say({**now, "outcome": "fault" if known else "failed" if now["faults"] else "clean"})
    sys.stdout.flush()
    # Threads may still sit in the driver, and MLX's own teardown could join them there.
    os._exit(0)


def _device(mx: Any, device: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": str(device)}
    try:
        info = mx.device_info(device) if hasattr(mx, "device_info") else mx.metal.device_info()
    except Exception:  # noqa: BLE001 - only for show
        return found
    for key, value in dict(info).items():
        if isinstance(value, (str, int, float)):
            found[str(key)] = value
    return found


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


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


if __name__ == "__main__":
    sys.exit(child(json.loads(sys.argv[1])))
