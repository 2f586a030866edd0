"""A loaded model is handed out, and given back, without the pool lock."""

from __future__ import annotations

from omlx_admission.upstream import editing, package
from omlx_admission.upstream.change import AnchorMissing, Change
from omlx_admission.upstream.code import Code

POOL = "EnginePool"

_UNLOAD_MARKED = '''
async def _unload_marked_engine(self, model_id: str) -> None:
    """Tear a marked engine down; the mark ends with the teardown, never before."""
    try:
        await self._stop_and_unload_engine(model_id)
    finally:
        self._unloading_models.pop(model_id).set()
'''


_ACQUIRE = '''
def _acquire_loaded_engine(
    self,
    model_id: str,
    force_lm: bool,
    lease: bool,
    runtime_settings: object | None,
):
    """The engine that can be handed out at once, its lease taken, or None.

    One step without a suspension: a model that is being unloaded, or that
    is to be, is never handed out.
    """
    engine = ready_engine(
        self,
        self._unloading_models,
        model_id,
        force_lm,
        runtime_settings,
        VLMBatchedEngine,
    )
    if engine is not None:
        entry = self._entries[model_id]
        entry.last_access = time.time()
        if lease:
            entry.in_use += 1
    return engine
'''

_PAST_TEARDOWN = '''
async def _get_engine_past_teardown(
    self,
    model_id: str,
    force_lm: bool = False,
    lease: bool = False,
    runtime_settings: object | None = None,
):
    """Load under the lock, or wait there; never hand out a dying engine."""

    def get_engine():
        return self._get_engine_locked(model_id, force_lm, lease, runtime_settings)

    async def give_back(engine):
        if lease:
            await asyncio.shield(self._release_engine_lease(model_id))

    return await engine_past_teardown(
        self, self._unloading_models, model_id, get_engine, give_back
    )
'''


def engine_pool(module: Code) -> Code:
    """The pool of 0.5.0 to 0.6.x."""
    module = editing.insert_after_assignment(
        module,
        f"{POOL}.__init__",
        "self._lock",
        """
        # Models whose teardown runs now, with what announces its end.
        self._unloading_models: dict[str, asyncio.Event] = {}
        """,
    )
    module = editing.split_function(
        module,
        f"{POOL}.get_engine",
        head="""
        engine = self._acquire_loaded_engine(
            model_id, force_lm, _lease, runtime_settings
        )
        if engine is not None:
            return engine
        return await self._get_engine_past_teardown(
            model_id, force_lm, _lease, runtime_settings
        )
        """,
        rest="_get_engine_locked",
        doc="Get or load the engine of a model under the pool lock.",
    )
    module = editing.insert_method(module, _PAST_TEARDOWN, after=f"{POOL}.get_engine")
    module = editing.insert_method(module, _ACQUIRE, after=f"{POOL}.get_engine")
    module = package.add_release(module)
    module = editing.insert_first(
        module,
        f"{POOL}._release_engine_lease",
        """
        if self._release_loaded_engine(model_id):
            return
        """,
    )
    module = editing.reword(module, f"{POOL}.acquire", "under the pool lock ", "")
    module = editing.add_import(
        module, "from .admission.pool.ready import engine_past_teardown, ready_engine"
    )
    module = editing.add_import(module, "from .admission.uninterrupted import to_its_end")
    module = editing.insert_method(module, _UNLOAD_MARKED, after=f"{POOL}._unload_engine")
    return editing.split_function(
        module,
        f"{POOL}._unload_engine",
        head="""
        while (teardown := self._unloading_models.get(model_id)) is not None:
            await teardown.wait()
        entry = self._entries.get(model_id)
        if entry is None or entry.engine is None:
            return
        self._unloading_models[model_id] = asyncio.Event()
        await to_its_end(
            self._unload_marked_engine(model_id), f"engine-unload:{model_id}"
        )
        """,
        rest="_stop_and_unload_engine",
        doc="Tear the engine of a model down; its id is marked in _unloading_models.",
    )


def enforcer(module: Code) -> Code:
    """Look again after a suspension between the choice of a victim and its unload."""
    try:
        return editing.insert_beside(
            module,
            "ProcessMemoryEnforcer._check_and_enforce",
            "result = await entry.engine.abort_all_requests()",
            """
            if self._engine_pool._entry_is_busy(entry) is True:
                # Handed out meanwhile: it is no victim any more.
                continue
            """,
        )
    except AnchorMissing:
        return module


CHANGE = Change(
    name="resident-path",
    title="fix(pool): hand out loaded engines without the pool lock",
    message="""
EnginePool.get_engine and the release of a lease take the pool lock, which is
held over every load and unload. A request for a model that is loaded waits
there for another model's load: it neither starts nor, once finished, ends
before the lock is free. And an unload that takes no lock (the unload route, a
settings change) can run while a request is handed the engine that it stops.

get_engine now hands out a loaded engine in one synchronous step, under the
conditions that the locked path checks, and leases are given back the same way
unless a pending unload has to see it. _unload_engine marks the model before its
first await: a marked model is not handed out, and a second unload of it waits
for the first. A teardown runs in a task of its own: a cancel of its caller is
raised when it is over, and leaves neither a dead engine nor its bytes behind.
An engine that was stopped, or whose loop has ended, is not handed out either.
Loads, evictions and pending unloads keep the lock.

A loaded model's latency no longer depends on what else loads or unloads.
""",
    issues=(1970, 2431),
    features=("resident",),
    edits={"engine_pool.py": engine_pool, "process_memory_enforcer.py": enforcer},
    optional=frozenset({"process_memory_enforcer.py"}),
    modules=package.copied("admission", "pool.ready", "uninterrupted"),
)
