"""The release after the last one that was read, as far as its text is known.

No checkout of it is here. What is known of its pool is made on the stand-in in our own
words: the native resident path, an argument of the victim search, a teardown of its own.
What the gate says to it is what it will say to the real one, as far as that is so.
"""

from __future__ import annotations

import pytest

import standin
from omlx_admission.hooks import install
from omlx_admission.hooks.install import State
from omlx_admission.hooks.patching import gate
from omlx_admission.settings import Settings
from tests.hooks.drift import ALL, Edit, drifted

ROOT = standin.PATH / "omlx"
POOL = "engine_pool.py"
VERSION: Edit = ("_version.py", r'__version__ = "[^"]*"', '__version__ = "0.7.1"')

#: The methods that the pool has come to have, in front of its ``get_engine``.
_NATIVE = '''
    def _acquire_loaded_engine(self, model_id, force_lm, lease, runtime_settings):
        """Hand out a loaded engine without the lock; None where it is not simply loaded."""
        return None

    async def _unload_engine(self, model_id: str) -> None:
        if model_id in self._unloading_models:
            raise ModelBusyError(model_id, "unload while teardown is in progress")
        self._unloading_models.add(model_id)
        try:
            await asyncio.shield(asyncio.create_task(self._torn_down(model_id)))
        finally:
            self._unloading_models.discard(model_id)

    async def get_engine('''

NEXT: tuple[Edit, ...] = (
    (POOL, r"async def _unload_engine\(", "async def _torn_down("),
    (POOL, r"\n    async def get_engine\(", _NATIVE),
    (POOL, r"(\n +self\._lock = [^\n]*)", r"\1\n        self._unloading_models = set()"),
    VERSION,
)
BY_SIZE: Edit = (
    POOL,
    r"def _find_lru_victim\(self\)",
    "def _find_lru_victim(self, bytes_needed: int = 0)",
)

#: What each feature is on that pool. Everything else of oMLX is the stand-in's. Without
#: our own mark of a teardown it stays on the loop.
EXPECTED = {"resident": State.NATIVE, "off_loop_close": State.OFF, "park": State.OFF}


@pytest.mark.parametrize("searches", [(), (BY_SIZE,)], ids=["plain", "victim by size"])
def test_it_stands_aside_for_the_native_path_and_the_rest_fits(
    searches: tuple[Edit, ...],
) -> None:
    with drifted(ROOT, *NEXT, *searches) as source:
        report = install.decide(source, ALL)
    states = {v.feature.name: v.state for v in report.verdicts}
    assert states == {name: EXPECTED.get(name, State.READY) for name in states}, [
        v.reasons for v in report.verdicts
    ]


def test_a_pool_in_another_place_is_said_to_have_moved() -> None:
    pool = (ROOT / POOL).read_text("utf-8")
    edits: tuple[Edit, ...] = (
        VERSION,
        (POOL, "", None),
        ("pool/__init__.py", "", ""),
        ("pool/engine_pool.py", "", pool),
    )
    with drifted(ROOT, *edits) as source:
        verdict = install.decide(source, ALL).verdict("queue")
        need = next(n for n in verdict.feature.needs if n.name == "EnginePool.get_engine")
        fit, reason = gate.Source(gate.find(source)).fit(need)
    assert verdict.state is State.REFUSED
    assert (fit, reason) == (
        gate.Fit.MOVED,
        "omlx.engine_pool is missing; EnginePool is in omlx.pool.engine_pool",
    )


def test_a_package_without_its_pool_is_an_omlx_still() -> None:
    with drifted(ROOT, VERSION, (POOL, "", None)) as source:
        report = install.decide(source, ALL)
    assert report.found is not None
    assert report.verdict("queue").reasons[0] == "omlx.engine_pool is missing"


def test_a_later_version_on_older_code_applies_nothing() -> None:
    """As a fork has it that counts on from a number of its own: its code decides."""
    older: tuple[Edit, ...] = (
        (POOL, r"\bin_use\b", "leases"),
        ("exceptions.py", r"\bModelBusyError\b", "BusyError"),
        ("engine_core.py", r"\b_step_burst\b", "_steps"),
    )
    with drifted(ROOT, VERSION, *older) as source:
        report = install.decide(source, Settings())
    assert report.problem is None
    wanted = {v.feature.name: v for v in report.verdicts if v.state is not State.OFF}
    assert {v.state for v in wanted.values()} == {State.REFUSED}
    assert "EngineEntry.in_use is missing" in wanted["queue"].reasons[0]
    # What stands on others names them: its own rows fit almost anything.
    grounds = "needs our 'queue' (refused) or our 'errors' (refused) or our 'leases' (refused)"
    assert wanted["requests"].reasons == [grounds]
