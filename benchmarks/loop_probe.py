"""A server that writes down its loop's beat.

``python -m benchmarks.loop_probe PLAN serve ...``, as `standin.launch` is started.

A beat is due on the server's own loop every 5 ms; how late it comes is the loop's lag.
One JSON line a beat goes to the file named by ``LOOP_PROBE``, beside one for every garbage
collection and every teardown of an engine core, with the thread that it ran on. Times
are seconds of the monotonic clock, which all processes of a machine share.

``LOOP_PROBE_PLAN`` is JSON: ``{"load_s": {"b": 5}, "flush_s": {"s": 2}}``. ``load_s`` is
spent inside a model's load on the thread that loads it, as a real load's work is;
``flush_s`` inside its scheduler's shutdown on the engine's thread, as the flush of a
large cache is. With ``"hold": "FILE"`` a flush lasts until that file is there instead,
though not above a minute. Each flush writes a line when it begins.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import wrapt

from standin import launch

BEAT_S = 0.005


class Lines:
    """A file of JSON lines that any thread may add to, its lock held for one write."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def add(self, *values: Any) -> None:
        """Write one line: a single write of the file object, which the GIL keeps whole."""
        self._file.write(json.dumps(values) + "\n")


async def _beat(lines: Lines) -> None:
    due = time.monotonic() + BEAT_S
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        lines.add("beat", now, now - due)
        # The next one counts from now: one block of the loop is one late beat.
        due = now + BEAT_S


def _watch_loop(lines: Lines) -> None:
    def hook(module: Any) -> None:
        async def serve(wrapped: Any, _server: Any, args: Any, kwargs: Any) -> Any:
            beating = asyncio.create_task(_beat(lines))
            try:
                return await wrapped(*args, **kwargs)
            finally:
                beating.cancel()

        wrapt.wrap_function_wrapper(module, "Server.serve", serve)

    wrapt.register_post_import_hook(hook, "uvicorn.server")


def _watch_gc(lines: Lines) -> None:
    began = 0.0

    def collected(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.monotonic()
        else:
            took = time.monotonic() - began
            if took > BEAT_S:
                lines.add("gc", began, took, threading.current_thread().name)

    gc.callbacks.append(collected)


def _watch_close(lines: Lines) -> None:
    def close(wrapped: Any, _core: Any, args: Any, kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return wrapped(*args, **kwargs)
        finally:
            took = time.monotonic() - began
            lines.add("close", began, took, threading.current_thread().name)

    def hook(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "EngineCore.close", close)

    wrapt.register_post_import_hook(hook, "omlx.engine_core")


def _slow(plan: dict[str, Any], lines: Lines | None) -> None:
    loads, flushes = plan.get("load_s", {}), plan.get("flush_s", {})
    hold = Path(plan["hold"]) if "hold" in plan else None

    def load(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        time.sleep(loads.get(Path(args[0]).name, 0.0))
        return wrapped(*args, **kwargs)

    def shutdown(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        name = Path(getattr(scheduler.config, "model_name", "")).name
        if name in flushes:
            if lines is not None:
                lines.add("flush", name)
            end = time.monotonic() + (flushes[name] if hold is None else 60.0)
            while time.monotonic() < end and not (hold is not None and hold.exists()):
                time.sleep(0.01)
        return wrapped(*args, **kwargs)

    def scheduler_hook(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "Scheduler.shutdown", shutdown)

    def load_hook(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "load", load)

    wrapt.register_post_import_hook(load_hook, "mlx_lm")
    wrapt.register_post_import_hook(scheduler_hook, "omlx.scheduler")


def main() -> None:
    """Entry point; see the module's text."""
    path = os.environ.get("LOOP_PROBE")
    lines = Lines(path) if path else None
    if lines is not None:
        _watch_loop(lines)
        _watch_gc(lines)
        _watch_close(lines)
    _slow(json.loads(os.environ.get("LOOP_PROBE_PLAN", "{}")), lines)
    launch.main()


if __name__ == "__main__":
    main()
