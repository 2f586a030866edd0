"""What is read of an engine to see whether it lives, and the mark of one that has gone."""

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


_GONE = "_omlx_admission_gone"


def has_gone(engine: Any) -> bool:
    """Whether the pool has given ``engine`` up: started again it would be in no books."""
    return bool(getattr(engine, "__dict__", {}).get(_GONE))


def note_gone(engine: Any, gone: bool) -> None:
    """The pool gives ``engine`` up, or has kept it after all."""
    fields = getattr(engine, "__dict__", None)
    if fields is not None:
        fields[_GONE] = gone
