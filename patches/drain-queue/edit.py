"""Requests for a model that is not loaded queue; the busy model drains for them."""

from __future__ import annotations

from pathlib import Path

from omlx_admission.upstream import editing, package
from omlx_admission.upstream.change import Change
from omlx_admission.upstream.code import Code, function

POOL = "EnginePool"


def engine_pool(module: Code) -> Code:
    """The pool, resident path and error mapping in it."""
    for name in ("_acquire_loaded_engine", "_get_engine_past_teardown"):
        function(module, f"{POOL}.{name}")
    module = editing.add_import(
        module, "from .admission.gate import EngineQueue, announced, noticed, watched"
    )
    module = editing.insert_after_assignment(
        module,
        f"{POOL}.__init__",
        "self._unloading_models",
        """
        # Who waits for a model that is not simply loaded, and who is next.
        self._admission = EngineQueue(self)
        """,
    )
    module = editing.insert_before_statement(
        module,
        f"{POOL}.get_engine",
        "return await self._get_engine_past_teardown("
        "model_id, force_lm, _lease, runtime_settings)",
        """
        if self._admission.enabled:
            return await self._admission.get_engine(
                model_id, force_lm, _lease, runtime_settings
            )
        """,
    )
    module = editing.insert_first(
        module,
        f"{POOL}._acquire_loaded_engine",
        """
        if model_id in self._admission.gated:
            return None
        if lease and self._admission.is_taken(model_id):
            return None
        self._admission.policy.first_use(model_id)
        """,
    )
    module = editing.replace_statement(
        module,
        f"{POOL}._release_loaded_engine",
        "if entry is not None and entry.pending_unload_reason: return False",
        """
        pending = entry is not None and entry.pending_unload_reason
        if pending and not drains_for_us(entry):
            return False
        """,
    )
    module = editing.insert_before_statement(
        module,
        f"{POOL}._release_loaded_engine",
        "return True",
        "self._admission.released(model_id)",
    )
    module = editing.add_import(module, "from .admission.pool.marks import drains_for_us")
    module = editing.insert_last(
        module, f"{POOL}._release_engine_lease", "self._admission.released(model_id)"
    )
    module = editing.insert_first(
        module,
        f"{POOL}._find_lru_victim",
        """
        if not self._admission.has_a_chance():
            return None
        planned = self._admission.port.planned_victim()
        if planned is not None:
            return planned
        """,
    )
    module = editing.insert_first(module, f"{POOL}.shutdown", "self._admission.shut_down()")
    for name in ("discover_models", "_unload_engine"):
        module = editing.decorate(module, f"{POOL}.{name}", "announced")
    module = editing.decorate(module, f"{POOL}._unload_engine", "noticed")
    module = editing.decorate(module, f"{POOL}._load_engine", "watched")
    module = editing.add_raises(
        module,
        f"{POOL}.get_engine",
        "AdmissionRefused: If the queue refuses the request",
    )
    return editing.reword(module, f"{POOL}.request_unload", "are rejected", "wait or fail")


def cli(module: Code) -> Code:
    """Who waits is refused before the server waits for its open connections."""
    module = editing.add_import(
        module, "from .admission.serving import Server", within="serve_command"
    )
    return editing.replace_expression(module, "serve_command", "uvicorn.Server", "Server")


def server(module: Code) -> Code:
    """A request that did not wait is told so where there is a queue."""
    module = editing.add_import(module, "from .admission.gate import handling")
    new = "app.add_middleware(RequestMiddleware, handling=handling)"
    return editing.replace_statement(module, "", package.MIDDLEWARE, new)


CHANGE = Change(
    name="drain-queue",
    title="feat(pool): queue requests for another model and drain the busy one",
    message="""
When memory holds one model and two are asked for, the second request is refused
while the first model has a request, and with traffic on both no request for the
second is ever served: nothing that is busy can be evicted, and nobody keeps
order. Loads that are let in swap the models back and forth.

Requests for a model that is not loaded now wait in one queue per pool. The
loaded model serves until somebody has waited long enough for another one; then
it takes no new requests, finishes what runs, and leaves for the model that has
been wanted longest, whose waiters are all served by the one load. A wait ends
by the model, by a budget (503 with Retry-After), by the client that leaves, or
by a refusal at once where the model can never fit (507, nothing is evicted).
Admission arithmetic, eviction and loading are the pool's own, as before.

OMLX_ADMISSION_QUEUE=0 switches the queue off.
""",
    issues=(1970,),
    features=("queue",),
    edits={"engine_pool.py": engine_pool, "cli.py": cli, "server.py": server},
    modules=package.added(Path(__file__).parent / "new", "admission"),
    after=("resident-path", "error-mapping", "leases", "admission-queue"),
)
