"""What a load has on the load thread: is it at work, or does it wait for nothing?

A load that takes long looks from outside like one that never ends. The difference is a
thread behind it: as long as one of its jobs has not come back, a cancel would free neither
thread nor memory. Once none is left and the load is pending all the same, nothing will end
it, and giving it up costs nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from typing import Any

#: The load that the current task carries out.
current: contextvars.ContextVar[LoadWork | None] = contextvars.ContextVar(
    "admission_load", default=None
)

#: A load by other machines has a time-out of its own, half an hour. After so many
#: seconds nothing will come of it.
_ELSEWHERE_S = 3600.0


class LoadWork:
    """One load from the begin of its reading on; a context for the time of it.

    Loop thread only.

    Attributes:
        used: bytes in use when it began, victims gone.
    """

    def __init__(self, used: int, *, elsewhere: bool = False) -> None:
        self.used = used
        self._loop = asyncio.get_running_loop()
        self._jobs: set[concurrent.futures.Future[Any]] = set()
        self._rests_since = self._loop.time() + (_ELSEWHERE_S if elsewhere else 0.0)

    def __enter__(self) -> None:
        self._token = current.set(self)

    def __exit__(self, *_: object) -> None:
        current.reset(self._token)

    def resting(self) -> float:
        """Seconds for which none of its jobs has been on a thread or on its way to one."""
        return 0.0 if self._jobs else max(0.0, self._loop.time() - self._rests_since)

    def add(self, job: concurrent.futures.Future[Any]) -> None:
        """A job of this load was handed to a thread."""
        self._jobs.add(job)
        job.add_done_callback(self._came_back)

    def _came_back(self, job: concurrent.futures.Future[Any]) -> None:
        """On the job's thread. The load learns of it on its loop, and so does this: a loop
        that stands still meanwhile does not make the load rest."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._remove, job)

    def _remove(self, job: concurrent.futures.Future[Any]) -> None:
        self._jobs.discard(job)
        if not self._jobs:
            self._rests_since = max(self._rests_since, self._loop.time())


def note(job: concurrent.futures.Future[Any]) -> None:
    """A job was handed to a load thread, for whatever load."""
    load = current.get()
    if load is not None:
        load.add(job)
