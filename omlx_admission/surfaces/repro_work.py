"""The working process of ``omlx-admission repro``: two threads, two MLX streams.

Run as a program with its configuration as one JSON argument; says how far it is as one
JSON object a line. It may hang in the driver or end without an exception: the process
that watches it (`surfaces.repro`) has no MLX in it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from omlx_admission.gpu.faults import classify
from omlx_admission.gpu_turn.turn import GpuTurn

BEAT_S = 0.5
"""How often the child says how far it is."""
GRACE_S = 10.0
"""How long a thread may still work when the time is up or the other one has failed: its
own error, usually as the victim, comes with the GPU's reset a few seconds later."""

SIZES: dict[str, dict[str, int]] = {
    # Near what oMLX issue 4224 saw: a 2,048-token chunk over 32K of context beside a decode.
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
        turn: GpuTurn | None,
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
        turn: GpuTurn | None,
        overlap: Overlap,
        step: Callable[[], None],
        synchronise: Callable[[Any], None],
        *,
        count: bool,
    ) -> None:
        asked = time.perf_counter()
        hold = None
        if turn is not None:
            self.waiting = True
            hold = turn.acquire(self.name, "repro")
            self.waiting = False
        began = time.perf_counter()
        overlap.begin()
        try:
            step()
            synchronise(self._stream)
        finally:
            overlap.end()
            if hold is not None:
                hold.release()
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
    turn = GpuTurn(stuck_s=math.inf, limit_s=math.inf) if config["turn"] else None
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


if __name__ == "__main__":
    sys.exit(child(json.loads(sys.argv[1])))
