"""Run ``omlx serve``, stand-in or real, as a test or a benchmark plans it.

As `omlx_admission.surfaces.demo.launch`, whose pause stands for a load, and with faults.

Usage: ``python -m standin.launch PLAN serve ...`` where PLAN is JSON with any of these
(seconds; model names are folder names):

``load_s``: what every load takes; ``per_model``: what those of some models take instead,
``{"b": 5.0}`` or one after the other, the last one from then on: ``{"b": [0.5, 18.0]}``.

``failing``: models whose loads fail, after that time. ``failing_file``: a file; while it is
there, so do those of the model that it names.

``hang``: models whose loads never end. ``{"b": "thread"}`` is stuck on the thread of the
load; with ``"await"`` no thread is at work for it. ``hang_until``: a file; once it is
there, what hangs goes on and nothing hangs any more.

``ceiling_file``: a file with the moving part of the ceiling of oMLX's memory guard, in GB
as ``--memory-guard-gb`` counts them, read whenever oMLX asks for it (tier ``custom`` has
no moving part). ``static_gb`` and ``metal_gb``: the parts that do not move; the cap of 0
is none.

``fault_file``: a file; while it is there, steps of all engines raise, and so does the
clean-up after one, which is what a GPU fault does to them.

``descriptors``: most files and sockets that the server may have open at once.

``evicting``: models whose every step asks for memory, as a long prompt's prefill does
where there is next to none: the engine's loop waits until the pool has looked for some.

``residue_s``: how long the footprint of the process counts a model that has left. It
counts what oMLX tracks, and nothing else.

``keepalive_s``: interval of oMLX's keep-alives on streams, which no option of oMLX's sets.

``pretend_audio``: audio engines load nothing and answer something made up: no tiny model
is a speech model.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import wrapt

from omlx_admission.surfaces.demo.launch import on_load_thread, serve

#: Modules below ``omlx.engine`` and their engines; an oMLX without one goes without it.
_ENGINES = {
    "batched": "BatchedEngine",
    "embedding": "EmbeddingEngine",
    "reranker": "RerankerEngine",
}
_AUDIO = {"stt": "STTEngine", "tts": "TTSEngine", "sts": "STSEngine"}

#: What an engine that pretends answers, by method.
_ANSWERS: dict[str, Any] = {
    "transcribe": {"text": "something", "segments": []},
    "synthesize": b"RIFF",
    "process": b"RIFF",
}

_GB = 1024**3

#: Seconds between two looks of a load that hangs at whether it may go on.
_LOOK_S = 0.05


def slow_down(plan: dict[str, Any]) -> None:
    """Make every load take the seconds that ``plan`` gives, fail or hang."""
    if "residue_s" in plan:
        _leave_residue(float(plan["residue_s"]))
    seconds = float(plan.get("load_s", 0.0))
    per_model = {m: _turns(value) for m, value in plan.get("per_model", {}).items()}
    failing = frozenset(plan.get("failing", ()))
    hangs = _hangs(plan.get("hang", {}))
    until = plan.get("hang_until")
    failing_file = Path(plan.get("failing_file", "/nonexistent"))

    def fails(name: str) -> bool:
        if name in failing:
            return True
        return failing_file.exists() and failing_file.read_text() == name

    def is_over() -> bool:
        return until is not None and os.path.exists(until)

    async def start(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        name = os.path.basename(str(engine._model_name).rstrip("/"))
        if not _is_loaded(engine):
            left = per_model.get(name, [seconds])
            takes = float(left.pop(0) if len(left) > 1 else left[0])
            match hangs.get(name):
                case "await":
                    while not is_over():  # noqa: ASYNC110 - a file tells
                        await asyncio.sleep(_LOOK_S)
                case "thread":
                    await on_load_thread(engine, lambda: _wait_for(is_over))
            if takes:
                await on_load_thread(engine, lambda: time.sleep(takes))
            if fails(name):
                raise RuntimeError(f"the plan says that loading {name} fails")
        return await wrapped(*args, **kwargs)

    pretend = bool(plan.get("pretend_audio"))
    for module, name in (_ENGINES | _AUDIO).items():
        try:
            engine = getattr(importlib.import_module(f"omlx.engine.{module}"), name)
        except (ImportError, AttributeError):
            continue
        if pretend and any(hasattr(engine, method) for method in _ANSWERS):
            _pretend(engine)
        wrapt.wrap_function_wrapper(engine, "start", start)

    if "keepalive_s" in plan:
        wrapt.register_post_import_hook(
            lambda server: hurry(server._with_sse_keepalive, float(plan["keepalive_s"])),
            "omlx.server",
        )
    if "evicting" in plan:
        wrapt.register_post_import_hook(
            lambda module: _evict(module.EngineCore, plan["evicting"]), "omlx.engine_core"
        )
    if "fault_file" in plan:
        wrapt.register_post_import_hook(
            lambda module: _break(module.Scheduler, plan["fault_file"]), "omlx.scheduler"
        )
    wrapt.register_post_import_hook(
        lambda module: _set_ceiling(module.ProcessMemoryEnforcer, plan),
        "omlx.process_memory_enforcer",
    )


def _break(scheduler: Any, path: str) -> None:
    """Make steps and the clean-up after one raise while the file at ``path`` is there."""

    def guarded(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        if os.path.exists(path):
            raise RuntimeError("the plan says that the GPU fails")
        return wrapped(*args, **kwargs)

    for name in ("step", "fail_all_requests"):
        wrapt.wrap_function_wrapper(scheduler, name, guarded)


def _leave_residue(seconds: float) -> None:
    """Let the footprint notice an unload as late; before anything has imported the reading."""
    memory: Any = importlib.import_module("omlx.utils.proc_memory")
    pools: list[Any] = []
    lock, tracked = threading.Lock(), 0
    left: list[tuple[float, int]] = []

    def footprint(_pid: int | None = None) -> int:
        nonlocal tracked
        with lock:  # steps read it too, on threads of their own
            now = time.monotonic()
            before, tracked = tracked, sum(int(p._current_model_memory) for p in pools)
            left.append((now, max(0, before - tracked)))
            left[:] = [(since, n) for since, n in left if n and now < since + seconds]
            return tracked + sum(n for _, n in left)

    def begin(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        wrapped(*args, **kwargs)
        pools.append(pool)

    memory.get_phys_footprint = footprint
    wrapt.register_post_import_hook(
        lambda module: wrapt.wrap_function_wrapper(module, "EnginePool.__init__", begin),
        "omlx.engine_pool",
    )


def _evict(core: Any, models: list[str]) -> None:
    """Let every burst of steps of ``models`` end with a prefill that wants memory."""

    def step(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        outputs = wrapped(*args, **kwargs)
        name = os.path.basename(str(engine.config.model_name).rstrip("/"))
        if name in models and outputs[-1].outputs:
            # Nothing but these two is read; no victim makes that much room.
            outputs[-1].prefill_eviction_request = SimpleNamespace(
                request_id="the plan", target_cap_bytes=1, predicted_transient_bytes=1
            )
        return outputs

    wrapt.wrap_function_wrapper(core, "_step_burst", step)


def _turns(value: Any) -> list[float]:
    """Seconds of the first load and of those that follow."""
    return list(value) if isinstance(value, list) else [value]


def _hangs(hang: dict[str, str]) -> dict[str, str]:
    for name, how in hang.items():
        if how not in ("await", "thread"):
            raise ValueError(f'"hang" of {name} is {how!r}; it can be "await" or "thread"')
    return hang


def _wait_for(is_over: Any) -> None:
    # A thread of an executor is joined when the process ends.
    while not is_over() and threading.main_thread().is_alive():
        time.sleep(_LOOK_S)


def _set_ceiling(enforcer: Any, plan: dict[str, Any]) -> None:
    """Give the parts of the ceiling the values that ``plan`` states."""
    for key, method in (
        ("static_gb", "_get_static_ceiling"),
        ("metal_gb", "_get_effective_metal_cap_bytes"),
    ):
        if key in plan:
            _answer(enforcer, method, int(float(plan[key]) * _GB))
    if "ceiling_file" not in plan:
        return
    file = Path(plan["ceiling_file"])

    def moving(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if instance.memory_guard_tier == "custom":
            return wrapped(*args, **kwargs)
        return int(float(file.read_text()) * _GB)

    wrapt.wrap_function_wrapper(enforcer, "_get_dynamic_ceiling", moving)


def _answer(owner: Any, method: str, value: Any) -> None:
    wrapt.wrap_function_wrapper(owner, method, lambda _w, _i, _a, _k: value)


def hurry(keepalive: Any, seconds: float) -> None:
    """Make ``seconds`` the default of the parameter ``interval``."""
    names = [
        p.name
        for p in inspect.signature(keepalive).parameters.values()
        if p.default is not p.empty
    ]
    defaults = list(keepalive.__defaults__)
    defaults[names.index("interval")] = seconds
    keepalive.__defaults__ = tuple(defaults)


def _is_loaded(engine: Any) -> bool:
    loaded = getattr(engine, "_loaded", None)
    return bool(loaded) if loaded is not None else engine._model is not None


def _pretend(engine: Any) -> None:
    async def start(_wrapped: Any, instance: Any, _args: Any, _kwargs: Any) -> None:
        instance._model = instance._model or object()

    async def stop(_wrapped: Any, instance: Any, _args: Any, _kwargs: Any) -> None:
        instance._model = None

    wrapt.wrap_function_wrapper(engine, "start", start)
    wrapt.wrap_function_wrapper(engine, "stop", stop)
    for method, answer in _ANSWERS.items():
        if hasattr(engine, method):

            async def call(_w: Any, _i: Any, _a: Any, _k: Any, answer: Any = answer) -> Any:
                return answer

            wrapt.wrap_function_wrapper(engine, method, call)


def main() -> None:
    """Entry point; see the module's text."""
    plan = json.loads(sys.argv[1])
    if "descriptors" in plan:
        most, hard = int(plan["descriptors"]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    serve(lambda: slow_down(plan))


if __name__ == "__main__":
    main()
