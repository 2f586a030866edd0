"""Waiting until an unloaded model's memory is back.

No counterpart in oMLX, where this is part of the pool's unload.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import mlx.core as mx

from .engine_core import get_mlx_executor

logger = logging.getLogger(__name__)

_ROUNDS = 10
_ROUND_S = 0.5
_RECLAIM_ROUNDS = 3
_RECLAIM_S = 1.0
_TOLERANCE_BYTES = 2 * 1024**3
_TOLERANCE_SHARE = 0.05


async def clear_cache() -> None:
    """Drain and clear on the global thread: behind whatever that thread is doing."""
    await asyncio.get_running_loop().run_in_executor(
        get_mlx_executor(), lambda: (mx.synchronize(), mx.clear_cache())
    )


async def settle(
    model_id: str,
    size: int,
    active_before: int,
    active_memory: Callable[[], int],
    others_serving: Callable[[], bool],
) -> bool:
    """Wait for ``size`` bytes to come back; False when they did not in time.

    Gives up at once when another model is at work: what comes back cannot be told
    from what the other one takes. ``active_memory`` reads the gauge, and
    ``active_before`` is what it read before the stop.
    """
    wanted = max(0, size - max(_TOLERANCE_BYTES, int(size * _TOLERANCE_SHARE)))
    for _ in range(_ROUNDS):
        if active_before - active_memory() >= wanted:
            return True
        if others_serving():
            logger.info("cannot tell whether %s is out: other models are at work", model_id)
            return True
        await asyncio.sleep(_ROUND_S)
        gc.collect()
        await clear_cache()
    return False


async def reclaim(model_id: str) -> None:
    """A few more tries after a settle that gave up waiting."""
    logger.warning("memory of %s did not come back in time", model_id)
    for _ in range(_RECLAIM_ROUNDS):
        gc.collect()
        await clear_cache()
        await asyncio.sleep(_RECLAIM_S)
