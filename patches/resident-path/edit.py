"""A loaded model is handed out, and given back, without the pool lock."""

from __future__ import annotations

import libcst as cst

from omlx_admission.upstream import docstrings, editing, nested, package
from omlx_admission.upstream.change import AnchorMissing, Change
from omlx_admission.upstream.transplant import as_method

POOL = "EnginePool"

#: Ours keeps its marks beside the pool; there they are the pool's own.
_MARKS = {"state.unloading": "self._unloading_models"}


_UNLOAD_MARKED = '''
async def _unload_marked_engine(self, model_id: str) -> None:
    """Tear a marked engine down; the mark ends with the teardown, never before."""
    try:
        await self._stop_and_unload_engine(model_id)
    finally:
        self._unloading_models.pop(model_id).set()
'''


def _acquire() -> str:
    """`hooks.resident.ready_engine` as a method, with the hand-out in the same step."""
    return as_method(
        "hooks.pool.resident",
        "ready_engine",
        signature="def _acquire_loaded_engine(self, model_id: str, force_lm: bool, "
        "lease: bool, runtime_settings: object | None)",
        rewrite={
            **_MARKS,
            "is_vlm(engine)": "isinstance(engine, VLMBatchedEngine)",
            "if not force_lm and runtime_settings is None: "
            "_remember(pool, state, model_id, entry)": (
                "entry.last_access = time.time()\nif lease:\n    entry.in_use += 1\n"
            ),
        },
        doc="The engine that can be handed out at once, its lease taken, or None.\n\n"
        "One step without a suspension: a model that is being unloaded, or that\n"
        "is to be, is never handed out.\n",
    )


def _past_teardown() -> str:
    """`hooks.resident.get_engine_past_teardown` as a method."""
    return as_method(
        "hooks.pool.resident",
        "get_engine_past_teardown",
        signature="async def _get_engine_past_teardown(self, model_id: str, "
        "force_lm: bool, lease: bool, runtime_settings: object | None)",
        rewrite={
            **_MARKS,
            "model_id, _force_lm, lease, _settings = arguments(*args, **kwargs)": None,
            "state = state_of(pool)": None,
            "wrapped(*args, **kwargs)": (
                "self._get_engine_locked(model_id, force_lm, lease, runtime_settings)"
            ),
            "give_back(pool, model_id, books.reference(engine))": (
                "await asyncio.shield(self._release_engine_lease(model_id))"
            ),
        },
        doc="Load under the lock, or wait there; never hand out a dying engine.\n\n"
        "An unload that takes no lock may begin while this waits for it.\n",
    )


def engine_pool(module: cst.Module) -> cst.Module:
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
    module = editing.insert_method(module, _past_teardown(), after=f"{POOL}.get_engine")
    module = editing.insert_method(module, _acquire(), after=f"{POOL}.get_engine")
    module = package.add_release(module)
    module = editing.insert_first(
        module,
        f"{POOL}._release_engine_lease",
        """
        if self._release_loaded_engine(model_id):
            return
        """,
    )
    module = docstrings.reword(module, f"{POOL}.acquire", "under the pool lock ", "")
    module = editing.add_import(module, "from .admission.engines import lives")
    module = editing.add_import(module, "from .admission.to_its_end import to_its_end")
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


def enforcer(module: cst.Module) -> cst.Module:
    """Look again after a suspension between the choice of a victim and its unload."""
    try:
        return nested.insert_beside(
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
    title="Hand out loaded engines without the pool lock",
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
    modules={
        **package.ENGINE_MODULES,
        "admission/to_its_end.py": package.make(package.TO_ITS_END),
    },
)
