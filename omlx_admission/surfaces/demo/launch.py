"""Run ``omlx serve`` with loads that take time, for the demo and the live tests.

Tiny models load in milliseconds; what users wait for is the loading of tens of
gigabytes. The pause stands before the engine's own start, inside oMLX's load
and under whatever locks oMLX holds there.

Usage: ``python -m omlx_admission.surfaces.demo.launch PLAN serve ...`` where
PLAN is JSON: ``{"load_s": 3.0, "per_model": {"b": 5.0}, "failing": ["c"],
"keepalive_s": 0.5, "pretend_audio": true}`` (seconds; model names are folder names;
``keepalive_s`` is the interval of oMLX's keep-alives on streams, which no option of
oMLX's sets). Audio engines that pretend load nothing and answer something made up: no
tiny model is a speech model.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from typing import Any

import wrapt

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


def slow_down(plan: dict[str, Any]) -> None:
    """Make every load take the seconds that ``plan`` gives, or fail."""
    seconds = float(plan.get("load_s", 0.0))
    per_model: dict[str, float] = plan.get("per_model", {})
    failing = frozenset(plan.get("failing", ()))

    async def start(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        name = os.path.basename(str(engine._model_name).rstrip("/"))
        if not _is_loaded(engine):
            await asyncio.sleep(per_model.get(name, seconds))
            if name in failing:
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
    sys.argv = ["omlx", *sys.argv[2:]]
    # Where the package is on PYTHONPATH instead of installed, no .pth line has run.
    from omlx_admission import _startup

    _startup.main()
    slow_down(plan)
    from omlx.cli import main as serve

    serve()


if __name__ == "__main__":
    main()
