"""Bytes that a process still has to its name after a model has left it.

A kernel may count what was freed for a second or two. Whoever believes that reading
evicts more than needed, refuses prompts that fit, or ends the load that follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

#: The pool's own barriers after an unload give up after as many seconds.
LONGEST_S = 8.0
_LOOK_S = 0.05

#: Part of what has left that may stay: it is no residue, or harmless.
_SLACK = 0.05


class Reading(NamedTuple):
    """The memory of the process at one instant.

    Attributes:
        footprint: what the kernel counts.
        kept: what is in use by all that is known, whatever the kernel counts.
        fits: whether what comes fits beside the footprint.
    """

    footprint: int
    kept: int
    fits: bool


def is_settled(before: Reading, now: Reading) -> bool:
    """Whether what left between the two readings has left the footprint too."""
    if now.fits or before.footprint < before.kept:
        return True  # there is room anyway; or it never counted what has left
    slack = int(_SLACK * max(0, before.kept - now.kept))
    return now.footprint - now.kept <= before.footprint - before.kept + slack


async def settled(before: Reading, read: Callable[[], Reading]) -> bool:
    """Wait until the footprint is settled; False where it is not within some seconds."""
    return await until(lambda: is_settled(before, read()), LONGEST_S)


async def until(done: Callable[[], bool], longest: float) -> bool:
    """Wait until ``done``; False where it is not within ``longest`` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + longest
    while not done():
        if loop.time() >= end:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
