"""Wait for something that must not be interrupted; a cancel is raised when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run ``work`` in a task of its own and return what it returns, come what may.

    A cancel of the caller reaches neither that task nor, before its end, the caller: the
    caller may hold a lock that what runs relies on.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile; an error of ``work``
            is its cause.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    cancelled: asyncio.CancelledError | None = None
    try:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return task.result()
        raise cancelled from None if task.cancelled() else task.exception()
    finally:
        # Its traceback holds this frame, and the frame what the caller holds.
        del cancelled, task
