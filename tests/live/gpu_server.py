"""A server whose GPU can be made to fail, and whose GPU work is written down.

``python gpu_server.py PLAN serve ...`` as `standin.launch`. From
the moment the file named by ``GPU_FAILS`` is there, every synchronise (with ``GPU_WHERE``
``work``: every evaluation) raises its text as MLX does. ``GPU_SPANS`` names the file for
one JSON line per burst, chunk of a prompt within one, or embedding: model, start, end
(seconds of the monotonic clock), its work in flight included. With ``GPU_PROMPTS`` a
prompt's chunks are of 64 tokens, and the first chunk of a prompt of model ``a`` makes that
folder and lasts until it holds a file ``go``.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import wrapt

from standin import launch

_stock = mx.synchronize
_fails = Path(os.environ.get("GPU_FAILS", "/nowhere"))


def _failing(stock: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _fails.exists():
            raise RuntimeError(_fails.read_text())
        return stock(*args, **kwargs)

    return call


def _record(path: str) -> None:
    lock = threading.Lock()
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - it ends with the process
    now = threading.local()

    def write(name: str) -> None:
        with lock:
            line = [Path(name).name, now.start, time.monotonic()]
            file.write(json.dumps(line) + "\n")

    def chunk_ends(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        _stock(scheduler._stream)
        _stop_at_first(now.name)
        write(now.name)
        return result

    def next_begins(wrapped: Any, _scheduler: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        now.start = time.monotonic()
        return result

    def work(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        now.start = time.monotonic()
        now.name = getattr(getattr(instance, "config", None), "model_name", "")
        result = wrapped(*args, **kwargs)
        scheduler = getattr(instance, "scheduler", None)
        if scheduler is not None:
            if not any(output.has_work for output in result):
                return result
            _stock(scheduler._stream)
            name = instance.config.model_name
        else:
            name = instance.model_name
        _stock()
        write(name)
        return result

    def wrap(name: str, wrapper: Any = work) -> Any:
        return lambda module: wrapt.wrap_function_wrapper(module, name, wrapper)

    progress = "Scheduler._on_prompt_progress"

    # Innermost: before omlx-admission's own hooks, and before an oMLX that takes turns by
    # itself decorates its methods.
    if _takes_turns_itself():
        inside = lambda module: _inside(module, work, chunk_ends)  # noqa: E731
        wrapt.register_post_import_hook(inside, "omlx.gpu_turn")
    else:
        wrapt.register_post_import_hook(wrap("EngineCore._step_burst"), "omlx.engine_core")
        wrapt.register_post_import_hook(
            wrap("MLXEmbeddingModel.embed"), "omlx.models.embedding"
        )
        wrapt.register_post_import_hook(wrap(progress, chunk_ends), "omlx.scheduler")
    # Outermost: after them.
    wrapt.register_post_import_hook(
        lambda _server: wrap(progress, next_begins)(sys.modules["omlx.scheduler"]),
        "omlx.server",
    )


def _stop_at_first(name: str) -> None:
    stop = os.environ.get("GPU_PROMPTS")
    if stop and Path(name).name == "a" and not Path(stop).exists():
        Path(stop).mkdir()
        for _ in range(3000):
            if Path(stop, "go").exists():
                return
            time.sleep(0.01)


def _small_chunks(module: Any) -> None:
    def init(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        scheduler.config.prefill_step_size = 64

    wrapt.wrap_function_wrapper(module, "Scheduler.__init__", init)


def _takes_turns_itself() -> bool:
    # Past the finder of omlx-admission, whose hooks would come first if it saw the name.
    spec = importlib.machinery.PathFinder.find_spec("omlx")
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "gpu_turn").is_dir() for place in places or ())


def _inside(gpu_turn: Any, work: Any, chunk_ends: Any) -> None:
    """Make its decorators wrap what is written down instead of the bare method."""
    burst, embedding, progress = gpu_turn.burst, gpu_turn.embedding, gpu_turn.progress
    gpu_turn.progress = lambda method: progress(_written(method, chunk_ends))
    gpu_turn.burst = lambda method: burst(_written(method, work))
    gpu_turn.embedding = lambda method: embedding(_written(method, work))


def _written(method: Any, work: Any) -> Any:
    @functools.wraps(method)
    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return work(functools.partial(method, instance), instance, args, kwargs)

    return call


if __name__ == "__main__":
    if os.environ.get("GPU_WHERE") == "work":
        mx.eval, mx.async_eval = _failing(mx.eval), _failing(mx.async_eval)
    else:
        mx.synchronize = _failing(mx.synchronize)
    if spans := os.environ.get("GPU_SPANS"):
        _record(spans)
    if os.environ.get("GPU_PROMPTS"):
        wrapt.register_post_import_hook(_small_chunks, "omlx.scheduler")
    launch.main()
