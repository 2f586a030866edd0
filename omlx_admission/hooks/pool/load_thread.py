"""A thread of its own for the loads of text and vision models, off by default.

In oMLX loads share the ``mlx-global`` thread with embedding, reranking and speech, so a
loaded embedder waits for as long as another model loads. An MLX array that was not
evaluated yet belongs to the thread that made it, and used on another one it fails with
"There is no Stream"; one that was evaluated is good anywhere. Text and vision models are
used on their engine's thread, not on the one that loads them, so oMLX itself evaluates
everything they hold at the end of a load (``materialize_lazy_state``). They may as well
be loaded elsewhere.

Embedders, rerankers and speech models are used where they were loaded: oMLX evaluates
their weights but nothing else, and compiles their forward there, in a cache of that
thread which holds the weights until the same thread clears it. Their loads stay.
``python -m benchmarks.load_cycles --why`` shows both on plain MLX.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted

BATCHED = "omlx.engine.batched"
VLM = "omlx.engine.vlm"
LOADING = "omlx.utils.model_loading"
CACHE = "omlx.utils.compile_cache"

#: Jobs of a text or vision model's load, and of a draft model's, which both end on the
#: engine's thread. What follows the first one touches what it made: all or none.
LOADS = frozenset(
    {
        "_load_model_sync",
        "_load_vlm_sync",
        "materialize_lazy_state",
        "free_t5_biases",
        "apply_qwen35_moe_gate_up_fusion",
        "_enable_ane_prefill",
        "_load_draft",
        "_load_drafter_sync",
    }
)

#: What the text and vision modules may hand to the global thread: a job of a load that is
#: not known would run there, on arrays that are not evaluated yet.
KNOWN = (*sorted(LOADS), *gpu_jobs.names_in("vlm"))

NEEDS = (
    gpu_jobs.EXECUTOR,
    gpu_jobs.EXECUTOR_VALUE,
    Need(BATCHED, "BatchedEngine.start", Kind.ASYNC, ()),
    Need(VLM, "VLMBatchedEngine.start", Kind.ASYNC, ()),
    # The jobs go by these names; what one made lazily the next one has to evaluate.
    *(
        Need(BATCHED, name, Kind.USED)
        for name in ("_load_model_sync", "materialize_lazy_state")
    ),
    *(Need(VLM, name, Kind.USED) for name in ("_load_vlm_sync", "materialize_lazy_state")),
    Need(LOADING, "materialize_lazy_state", Kind.SYNC, ("model",)),
    Need(CACHE, "clear_thread_compile_cache", Kind.SYNC, (), optional=True),
    *(Need(module, "get_mlx_executor", Kind.JOBS, jobs=KNOWN) for module in (BATCHED, VLM)),
)

NAME = "mlx-load"


def is_load(function: Any) -> bool:
    """Whether a job for the global executor belongs to a load that may run elsewhere."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None)
    if not isinstance(module, str) or not module.startswith("omlx."):
        return False
    return getattr(function, "__name__", None) in LOADS


class LoadThread:
    """The thread, made at the first load."""

    def __init__(self) -> None:
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._ready: concurrent.futures.Future[None] | None = None

    def route(
        self, stock: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> concurrent.futures.Future[Any] | None:
        """Take a load; leave the rest where it is."""
        if not is_load(function):
            return None
        if self._executor is None:
            # The global thread, when it starts, puts its stream in the place of the one
            # that mlx-lm made at import. That stream is one per thread, good on this one
            # too, so it must be there, and must not be made anew here.
            self._ready = stock(_nothing)
            self._executor = concurrent.futures.ThreadPoolExecutor(1, NAME)
        return self._executor.submit(_load, self._ready, function, args, kwargs)

    def stop(self) -> None:
        """End the thread after the load that is on it, if one is."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)


def _nothing() -> None:
    """A job whose end says that the global thread has started."""


def _load(ready: Any, function: Any, args: Any, kwargs: Any) -> Any:
    ready.result()
    try:
        result = function(*args, **kwargs)
    except BaseException:
        # The load's own error is what counts.
        with contextlib.suppress(Exception):
            _tidy()
        raise
    _tidy()
    return result


def _tidy() -> None:
    """Leave nothing behind on this thread: the pool clears up on the global one.

    Raises:
        RuntimeError: work of the load failed on the GPU.
    """
    import mlx.core as mx

    mx.synchronize()
    cache = sys.modules.get(CACHE)
    clear = getattr(cache, "clear_thread_compile_cache", None)
    if clear is not None:
        clear()


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Send loads to a thread of their own."""
    thread = LoadThread()
    process.executors.send(module, ledger, thread.route)
    process.stop_loads = thread.stop


PARTS = (Part(gpu_jobs.CORE, apply),)
