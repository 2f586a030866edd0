"""A model that is handed to a route without a lease stays until the request ends."""

from __future__ import annotations

from pathlib import Path

from omlx_admission.upstream import editing, package
from omlx_admission.upstream.change import Change
from omlx_admission.upstream.code import Code, has

#: By these the holder itself says that its model may go: to it the model is not busy.
UNLOADS = (
    "_unload_engine",
    "prepare_cluster_reload",
    "request_unload",
    "unload_if_idle_unpinned",
)


def engine_pool(module: Code) -> Code:
    """Two decorators; and an unload by the holder itself finds no lease of its own."""
    module = editing.add_import(
        module, "from .admission.leases import leased_for_request, released_by_request"
    )
    module = editing.add_import(module, "from .admission.pool import holding")
    module = package.add_release(module)
    unloads = [name for name in (f"EnginePool.{n}" for n in UNLOADS) if has(module, name)]
    module = editing.insert_first(module, unloads, "holding.let_go(model_id)")
    module = editing.decorate(module, "EnginePool.release_engine", "released_by_request")
    return editing.decorate(module, "EnginePool.get_engine", "leased_for_request")


def server(module: Code) -> Code:
    """The middleware that knows when a request ends."""
    return package.add_middleware(module)


CHANGE = Change(
    name="leases",
    title="fix(pool): keep a model until the request that got it ends",
    message="""
Speech, load and validation routes take no lease on the engine that they get.
Between get_engine and the first use of the engine (an upload is read, a file is
written) the model counts as idle: it can be evicted, or unloaded by its TTL,
and the route goes on with a dead engine.

A call of get_engine without a lease that is made within an HTTP or WebSocket
request now takes one, and the end of the request, or of a job that it began,
gives it back. A request that asks again for a model that it holds gets it at
once, so that it never waits for itself, and an unload by the holder itself
gives its lease back first. Callers outside a request are left as they were.
""",
    issues=(2431,),
    features=("leases",),
    edits={"engine_pool.py": engine_pool, "server.py": server},
    modules={
        **package.copied("admission", "request", "pool.holding"),
        **package.added(Path(__file__).parent / "new", "admission"),
    },
)
