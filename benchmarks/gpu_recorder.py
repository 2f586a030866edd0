"""A server that writes down its GPU work: ``python -m benchmarks.gpu_recorder PLAN serve ...``.

The recorder lies inside omlx-admission's wrappers, so it sees oMLX's own work whether
engines take turns or not. A span ends when the streams it used have finished, so that
work still in flight counts as the one whose it is. One JSON line a span goes to the file
named by ``GPU_SPANS``; with ``GPU_TURNS`` one a turn, as the turn itself tells, to that
file, with ``GPU_CHUNKS`` one a prefill chunk. ``GPU_STEP`` is the length of such a chunk.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

from benchmarks.loop_probe import Lines
from omlx_admission.gpu_turn import sites
from omlx_admission.gpu_turn import turn as gpu_turn
from standin import launch


def _recorded(
    lines: Lines, site: str, name: Callable[[Any], str], stream: Callable[[Any], Any]
) -> Any:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        import mlx.core as mx

        start = time.monotonic()
        outputs = wrapped(*args, **kwargs)
        if isinstance(outputs, list) and not any(o.has_work for o in outputs):
            return outputs  # a step that did nothing is no GPU work
        target = stream(instance)
        if target is not None:
            mx.synchronize(target)
        mx.synchronize()
        lines.add(name(instance), site, start, time.monotonic())
        return outputs

    return wrapper


def _record_spans(lines: Lines) -> None:
    def core(module: Any) -> None:
        wrapt.wrap_function_wrapper(
            module,
            "EngineCore._step_burst",
            _recorded(
                lines, "decode burst", sites.name_of, lambda core: core.scheduler._stream
            ),
        )

    def embedding(module: Any) -> None:
        wrapt.wrap_function_wrapper(
            module,
            "MLXEmbeddingModel.embed",
            _recorded(
                lines,
                "embedding",
                lambda model: Path(model.model_name).name,
                lambda _model: None,
            ),
        )

    wrapt.register_post_import_hook(core, "omlx.engine_core")
    wrapt.register_post_import_hook(embedding, "omlx.models.embedding")


def _record_turns(lines: Lines) -> None:
    def made(_module: Any) -> None:
        turn = gpu_turn.current
        if turn is not None:
            turn.observer = lambda span: lines.add(*span)

    # The embedder's module comes after the engine core's, where the turn is made.
    wrapt.register_post_import_hook(made, "omlx.models.embedding")


def _record_chunks(lines: Lines) -> None:
    """Every prefill chunk's size, and how old the newest sign of another decode is."""

    def llama(module: Any) -> None:
        def call(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
            tokens = args[0].shape[1]
            if tokens > 1:
                lines.add(threading.current_thread().name, tokens, time.monotonic())
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper(module, "Model.__call__", call)

    def scheduler(module: Any) -> None:
        if not hasattr(module.Scheduler, "_others_decoding"):
            return

        def others(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            answer = wrapped(*args, **kwargs)
            from omlx.decode_activity import get_decode_activity

            now = time.monotonic()
            ages = [
                now - at
                for key, (at, _n) in list(get_decode_activity()._active.items())
                if key != instance._decode_activity_key
            ]
            lines.add("asked", bool(answer), max(ages, default=None), now)
            return answer

        wrapt.wrap_function_wrapper(module, "Scheduler._others_decoding", others)

    wrapt.register_post_import_hook(llama, "mlx_lm.models.llama")
    wrapt.register_post_import_hook(scheduler, "omlx.scheduler")


def _set_step(tokens: int) -> None:
    def init(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        scheduler.config.prefill_step_size = tokens

    def scheduler(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "Scheduler.__init__", init)

    wrapt.register_post_import_hook(scheduler, "omlx.scheduler")


def main() -> None:
    """Entry point; see the module's text. Hooks come first: the innermost wrappers."""
    if spans := os.environ.get("GPU_SPANS"):
        _record_spans(Lines(spans))
    if turns := os.environ.get("GPU_TURNS"):
        _record_turns(Lines(turns))
    if chunks := os.environ.get("GPU_CHUNKS"):
        _record_chunks(Lines(chunks))
    if step := os.environ.get("GPU_STEP"):
        _set_step(int(step))
    launch.main()


if __name__ == "__main__":
    main()
