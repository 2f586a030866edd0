"""The HTTP server that refuses who waits for a model before it waits for them to end."""

from __future__ import annotations

import uvicorn


class Server(uvicorn.Server):
    """uvicorn's server; its shutdown waits for open connections, waiters among them."""

    async def shutdown(self, sockets=None):
        """End every wait in the queue, then shut down as ever."""
        from .. import server

        pool = server._server_state.engine_pool
        if pool is not None:
            pool._admission.shut_down()
        await super().shutdown(sockets)
