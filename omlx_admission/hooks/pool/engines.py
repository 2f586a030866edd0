"""Whether an engine lives: looked at by everything that hands one out.

Fields are read from the object itself, none of it is computed: this is on the hot path.
"""

from __future__ import annotations

from typing import Any

from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there

CORE = "omlx.engine_core"

#: Missing ones say nothing against an engine: speech and embedders have no core.
NEEDS = (
    Need(CORE, "EngineCore._task", Kind.VALUE, optional=True),
    Need(CORE, "EngineCore._closed", Kind.VALUE, types=("bool",), optional=True),
    Need(CORE, "AsyncEngineCore.engine", Kind.VALUE, optional=True),
    *(
        Need(module, f"{name}.{field}", Kind.VALUE, optional=True)
        for module, name in (
            ("omlx.engine.batched", "BatchedEngine"),
            ("omlx.engine.vlm", "VLMBatchedEngine"),
        )
        for field in ("_engine", "_loaded")
    ),
)
#: What an engine can have that ends all of its requests; its parameters are looked at.
ABORT = (
    *read_if_there("omlx.engine.batched", "BatchedEngine", "abort_all_requests"),
    *read_if_there("omlx.engine.vlm", "VLMBatchedEngine", "abort_all_requests"),
)


def lives(engine: Any) -> bool:
    """Whether ``engine`` can serve: it is loaded, and its core's loop runs.

    Whoever is handed one that was stopped starts it again, outside of all accounting;
    with one whose loop has ended, a request waits for ever.
    """
    fields = getattr(engine, "__dict__", None)
    if fields is None:
        return True
    if fields.get("_loaded") is False:
        return False
    running = fields.get("_engine")
    if running is None:
        return True
    core = getattr(running, "engine", None)
    return core is None or runs(core)


def runs(core: Any) -> bool:
    """Whether the loop of an engine's core has not ended, or not begun yet."""
    done = getattr(getattr(core, "_task", None), "done", None)
    return getattr(core, "_closed", None) is not True and (done is None or done() is not True)


_GONE = "_omlx_admission_gone"


def has_gone(engine: Any) -> bool:
    """Whether the pool has given ``engine`` up: started again it would be in no books."""
    return bool(getattr(engine, "__dict__", {}).get(_GONE))


def note_gone(engine: Any, gone: bool) -> None:
    """The pool gives ``engine`` up, or has kept it after all."""
    fields = getattr(engine, "__dict__", None)
    if fields is not None:
        fields[_GONE] = gone
