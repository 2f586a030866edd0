"""Hand out what is loaded: in one step, and never an engine whose teardown has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .engines import lives


def ready_engine(
    pool: Any,
    unloading: Mapping[str, asyncio.Event],
    model_id: str,
    force_lm: bool,
    runtime_settings: object | None,
    vision_engine: type | None,
) -> Any:
    """The engine that ``get_engine`` would return at once, or None.

    The conditions are those of the pool under its lock, and three more: no teardown in
    progress (``unloading``), no pending unload, an engine that lives. A text load that is
    forced replaces an engine of the class ``vision_engine``.

    Raises:
        ModelLoadingError: the engine is loaded but unusable.
    """
    entry = pool._entries.get(model_id)
    if entry is None:
        return None
    engine = entry.engine
    if (
        engine is None
        or entry.is_loading
        or entry.pending_unload_reason
        or model_id in unloading
        or not lives(engine)
    ):
        return None
    if force_lm and vision_engine is not None and isinstance(engine, vision_engine):
        return None
    expected = pool._engine_runtime_signature(model_id, runtime_settings)
    loaded = entry.runtime_settings_signature
    if loaded is None:
        if runtime_settings is not None:
            return None
    elif expected is not None and loaded != expected:
        return None
    pool._validate_llm_engine_ready(model_id, engine)
    if loaded is None:
        entry.runtime_settings_signature = expected
    return engine


async def engine_past_teardown(
    pool: Any,
    unloading: Mapping[str, asyncio.Event],
    model_id: str,
    get_engine: Callable[[], Awaitable[Any]],
    give_back: Callable[[Any], Awaitable[None]],
) -> Any:
    """What ``get_engine`` returns under the lock, unless its teardown has begun meanwhile.

    An unload that takes no lock may begin while a call waits for it. What was handed out
    of such an engine, or of a dead one, is given back, and the call is repeated.
    """
    while True:
        while (teardown := unloading.get(model_id)) is not None:
            await teardown.wait()
        entry = pool._entries.get(model_id)
        if entry is not None and entry.engine is not None and not lives(entry.engine):
            await pool._unload_engine(model_id)
            continue
        engine = await get_engine()
        if model_id not in unloading and lives(engine):
            return engine
        await give_back(engine)
