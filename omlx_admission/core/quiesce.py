"""Waiting for a model to come to rest, so that it can be unloaded by hand.

Loop thread only. All callers of the same unload share one :class:`Quiesce`; each
waits in its own budget and leaves by itself.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Any

from . import request as requests

#: Look this often, in seconds: work without a lease and an engine's own queues
#: announce nothing when they end.
_POLL_S = 0.05


class Ended(enum.Enum):
    """How one wait ended."""

    AT_REST = "at rest"
    EXPIRED = "expired"
    LEFT = "left"


class Quiesce:
    """A model that is to be unloaded once nothing of it runs.

    Attributes:
        engine: the engine that leaves; one that was loaded after it stays.
        waiters: how many callers wait for it. With the last of them the unload is withdrawn.
        drains: it was in use when it was marked.
        tearing_down: one of them unloads it now; the others wait for the end of that.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.waiters = 0
        self.drains = False
        self.tearing_down = False
        # In order: the first caller tears down.
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Something of the model ended: look now."""
        for future in self._waiting:
            _wake(future)

    async def wait(
        self, done: Callable[[], bool], deadline: float, request: requests.Request | None
    ) -> Ended:
        """Wait until ``done``, to ``deadline`` (the loop's clock) at most.

        There is no await between the ``done`` that was true and the return. ``request``
        is the one whose client may leave meanwhile; None where there is no client.
        """
        loop = asyncio.get_running_loop()
        left = False

        def client_left() -> None:
            nonlocal left
            left = True
            self.notify()

        watch: requests.Watch | None = None
        try:
            while not done():
                if left:
                    return Ended.LEFT
                rest = deadline - loop.time()
                if rest <= 0:
                    return Ended.EXPIRED
                if watch is None:
                    watch = requests.Watch(request, client_left)
                future = loop.create_future()
                timer = loop.call_later(min(rest, _POLL_S), _wake, future)
                self._waiting[future] = None
                try:
                    await future
                finally:
                    del self._waiting[future]
                    timer.cancel()
            return Ended.AT_REST
        finally:
            if watch is not None:
                watch.stop()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
