"""HTTP requests as the pool's callers see them: a task, a context and a client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from omlx_admission.core import request as requests


class ByHand:
    """One HTTP request that does ``action`` with the pool; its client may leave."""

    def __init__(
        self,
        action: Callable[[], Awaitable[Any]],
        path: str = "/v1/models/a/unload",
        query: str = "",
        method: str = "POST",
        max_wait: str | None = None,
    ) -> None:
        self._left = asyncio.Event()
        self._action = action
        headers = [] if max_wait is None else [(b"x-omlx-max-wait", max_wait.encode())]
        scope = {
            "type": "http",
            "path": path,
            "query_string": query.encode(),
            "method": method,
            "headers": headers,
        }
        self.request: requests.Request = requests.Request(scope, self._receive)
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _run(self) -> Any:
        self.request.task = asyncio.current_task()
        token = requests.current.set(self.request)
        try:
            return await self._action()
        finally:
            requests.current.reset(token)
            self.request.end()

    def leave(self) -> None:
        """The client hangs up."""
        self._left.set()

    @property
    def code(self) -> str | None:
        """The machine-readable reason of the refusal, if there was one."""
        return None if self.request.refusal is None else self.request.refusal.code


def unload(pool: Any, model: str = "a", **request: Any) -> ByHand:
    """What the public unload route does with the pool."""

    async def route() -> str:
        if pool.get_entry(model).engine is None:
            return "not loaded"
        await pool._unload_engine(model)
        return "unloaded"

    return ByHand(route, path=f"/v1/models/{model}/unload", **request)


def load(pool: Any, model: str = "a", admin: bool = False, **request: Any) -> ByHand:
    """What the load routes do with the pool."""

    async def route() -> str:
        entry = pool.get_entry(model)
        if entry.engine is not None:
            return "already loaded"
        if admin and entry.is_loading:
            return "409"
        await pool.get_engine(model)
        return "loaded"

    folder = "/admin/api/models" if admin else "/v1/models"
    return ByHand(route, path=f"{folder}/{model}/load", **request)
