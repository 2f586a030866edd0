"""The release after the last one that was read, as far as its text is known.

No checkout of it is here. What is known of its pool is made on the stand-in in our own
words: the native resident path, an argument of the victim search, a teardown of its own.
What the gate says to it is what it will say to the real one, as far as that is so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.mutations import suite
from benchmarks.mutations.model import Mutation, none
from benchmarks.mutations.tree import Files, Function, Tree
from omlx_admission import standin
from omlx_admission.hooks import gate, install
from omlx_admission.hooks.install import State

POOL = "omlx.engine_pool"
PATH = "engine_pool.py"

#: The methods that the pool has come to have, in front of its ``get_engine``.
_NATIVE = '''
def _acquire_loaded_engine(self, model_id, force_lm, lease, runtime_settings):
    """Hand out a loaded engine without the lock; None where it is not simply loaded."""
    entry = self._entries.get(model_id)
    if entry is None or entry.engine is None or entry.is_loading:
        return None
    if entry.pending_unload_reason or model_id in self._unloading_models or force_lm:
        return None
    if entry.runtime_settings_signature != self._engine_runtime_signature(
        model_id, runtime_settings
    ):
        return None
    entry.last_access = time.time()
    entry.in_use += bool(lease)
    return entry.engine


async def _stop_and_unload_engine(self, model_id: str) -> None:
    """The teardown itself, in a task that nobody can cancel."""
    await self._torn_down(model_id)
'''


def changed(tree: Tree, name: str, text: str, before: Files | None = None) -> Files:
    """The pool's file with ``text`` in place of one definition."""
    if before is not None:
        tree._texts[PATH] = before[PATH] or ""
        tree._trees.pop(PATH, None)
    place = tree.find(POOL, name)
    assert place is not None
    return tree.replaced(place, text)


def source_of(tree: Tree, name: str) -> str:
    place = tree.find(POOL, name)
    assert place is not None
    assert isinstance(place.node, Function)
    return ast.unparse(place.node)


def next_pool(root: Path, *, searches_by_size: bool) -> Files:
    """The stand-in's pool as the next release has it."""
    tree = Tree(root)
    get = source_of(tree, "EnginePool.get_engine")
    files = changed(tree, "EnginePool.get_engine", f"{_NATIVE}\n{get}")
    unload = source_of(tree, "EnginePool._unload_engine")
    single_flight = (
        unload.replace("_unload_engine", "_torn_down", 1)
        + """
async def _unload_engine(self, model_id: str) -> None:
    if model_id in self._unloading_models:
        raise ModelBusyError(model_id, "unload while teardown is in progress")
    self._unloading_models.add(model_id)
    try:
        await asyncio.shield(asyncio.create_task(self._stop_and_unload_engine(model_id)))
    finally:
        self._unloading_models.discard(model_id)
"""
    )
    files = changed(tree, "EnginePool._unload_engine", single_flight, files)
    lock = "self._lock = asyncio.Lock()\nself._unloading_models: set[str] = set()"
    files = changed(tree, "EnginePool._lock", lock, files)
    if searches_by_size:
        find = source_of(tree, "EnginePool._find_lru_victim")
        find = find.replace("(self)", "(self, bytes_needed: int=0)", 1)
        files = changed(tree, "EnginePool._find_lru_victim", find, files)
    return {**files, "_version.py": '__version__ = "0.7.1"\n'}


@pytest.fixture(scope="module")
def checkout() -> Iterator[suite.Checkout]:
    with suite.checkout(standin.PATH / "omlx") as made:
        yield made


#: What each feature is on that pool. Everything else of oMLX is the stand-in's. Without
#: our own mark of a teardown it stays on the loop.
EXPECTED = {"resident": State.NATIVE, "off_loop_close": State.OFF}


@pytest.mark.parametrize("searches_by_size", [False, True], ids=["plain", "victim by size"])
def test_it_stands_aside_for_the_native_path_and_the_rest_fits(
    checkout: suite.Checkout, searches_by_size: bool
) -> None:
    files = next_pool(checkout.original, searches_by_size=searches_by_size)
    with checkout.changed(Mutation("next", POOL, files, none)) as source:
        report = install.decide(source, suite.SETTINGS)
        states = {v.feature.name: v.state for v in report.verdicts}
        fits = gate.Source(gate.find(source))
        victim = next(
            need
            for need in report.verdict("queue").feature.needs
            if need.name == "EnginePool._find_lru_victim"
        )
        assert fits.fit(victim) == (gate.Fit.FITS, "")
    wanted = {
        name: EXPECTED.get(name, State.READY) for name in states if name not in _BUILT_ON_IT
    }
    assert {name: states[name] for name in wanted} == wanted
    reasons = {name: report.verdict(name).reasons for name in _BUILT_ON_IT}
    assert all(states[name] in (State.READY, State.NATIVE) for name in _BUILT_ON_IT), reasons


#: Features that others may come to have their own markers for on that pool.
_BUILT_ON_IT = ("unloads", "leases")


def test_a_pool_in_another_place_is_said_to_have_moved(checkout: suite.Checkout) -> None:
    files = next_pool(checkout.original, searches_by_size=False)
    files["pool/__init__.py"] = ""
    files["pool/engine_pool.py"] = files.pop(PATH)
    files[PATH] = None
    with checkout.changed(Mutation("next", POOL, files, none)) as source:
        verdict = install.decide(source, suite.SETTINGS).verdict("queue")
        need = next(n for n in verdict.feature.needs if n.name == "EnginePool.get_engine")
        fit, reason = gate.Source(gate.find(source)).fit(need)
    assert verdict.state is State.REFUSED
    assert (fit, reason) == (
        gate.Fit.MOVED,
        "omlx.engine_pool is missing; EnginePool is in omlx.pool.engine_pool",
    )
