"""Polls a stock memory enforcer on a pool of fakes at set readings, and prints what it did.

The ceiling is 100 bytes, so soft is 85 and hard 95 (tier ``custom``).
"""

import asyncio
import os

os.environ["OMLX_DISABLE_PRESSURE_RECLAIM"] = "1"

from fakes import Bench, FakeEngine, cancelled_at_end, outcome, until
from omlx.process_memory_enforcer import ProcessMemoryEnforcer
from stories import ends, tell


class Enforcer(ProcessMemoryEnforcer):
    """One whose readings a story sets; an unload takes ``per_model`` off."""

    def __init__(self, bench, usage, per_model=60):
        super().__init__(bench.pool, memory_guard_tier="custom", soft_threshold=0.85)
        self.base, self.per_model = usage, per_model
        bench.pool._process_memory_enforcer = self

    def _current_usage_bytes(self):
        return self.base - self.per_model * len(FakeEngine.stopped)

    def _get_hard_limit_bytes(self):
        return 100

    def _propagate_memory_limit(self):
        pass


@ends("3", {"level": "ok", "loaded": ["A"]})
async def story_ok_does_nothing():
    bench = Bench({"A": 60})
    await bench.load("A")
    enforcer = Enforcer(bench, 80)
    await enforcer._check_and_enforce()
    return {"level": enforcer._pressure_level, "loaded": bench.loaded}


@ends("3", {"level": "soft", "loaded": ["A"]})
async def story_soft_spares_the_last_model():
    bench = Bench({"A": 60})
    await bench.load("A")
    enforcer = Enforcer(bench, 90)
    await enforcer._check_and_enforce()
    return {"level": enforcer._pressure_level, "loaded": bench.loaded}


@ends("3", {"level": "ok", "loaded": ["B"]})
async def story_soft_evicts_one_of_two():
    bench = Bench({"A": 40, "B": 40})
    await bench.load("A", "B")
    enforcer = Enforcer(bench, 90, per_model=40)
    await enforcer._check_and_enforce()
    return {"level": enforcer._pressure_level, "loaded": bench.loaded}


@ends("3", {"loaded": []})
async def story_hard_evicts_the_last_model():
    bench = Bench({"A": 60})
    await bench.load("A")
    await Enforcer(bench, 96)._check_and_enforce()
    return {"loaded": bench.loaded}


@ends(
    "3",
    {
        "active": False,
        "loaded": ["A"],
        "mark": None,
    },
)
async def story_hard_ends_requests_and_keeps_the_model():
    bench = Bench({"A": 60})
    await bench.load("A")
    bench.entry("A").engine.active = True
    await Enforcer(bench, 96)._check_and_enforce()
    entry = bench.entry("A")
    return {
        "active": entry.engine.has_active_requests(),
        "loaded": bench.loaded,
        "mark": entry.pending_unload_reason,
    }


@ends(
    "3",
    {
        "mark": "hard memory pressure",
        "abort": True,
        "after the release": [],
    },
)
async def story_emergency_marks_the_busy_model():
    bench = Bench({"A": 60})
    await bench.load("A", _lease=True)
    bench.entry("A").engine.active = True
    enforcer = Enforcer(bench, 100 + 3 * 1024**3)
    await enforcer._check_and_enforce()
    entry = bench.entry("A")
    seen = {"mark": entry.pending_unload_reason, "abort": entry.abort_requested}
    await bench.pool.release_engine("A")
    return {**seen, "after the release": bench.loaded}


@ends("3", {"loaded": ["P"]})
async def story_pinned_models_stay():
    bench = Bench({"P": 60})
    await bench.load("P")
    bench.entry("P").is_pinned = True
    await Enforcer(bench, 96)._check_and_enforce()
    return {"loaded": bench.loaded}


@ends("3", {"waited": True, "told to stop": False, "load": "ok"})
async def story_poll_waits_for_a_load():
    """The level is set before the lock is asked for, the loading model is not stopped."""
    bench = Bench({"A": 60})
    go = bench.plan("A", "start")
    async with cancelled_at_end(bench.pool.get_engine("A")) as load:
        await until(lambda: FakeEngine.started)
        enforcer = Enforcer(bench, 96)
        async with cancelled_at_end(enforcer._check_and_enforce()) as poll:
            await until(lambda: enforcer._pressure_level == "hard")
            for _ in range(50):
                await asyncio.sleep(0)
            waited = not poll.done()
            told_to_stop = bench.entry("A").abort_loading
            go.set()
            answer = await outcome(load)
            await poll
    return {"waited": waited, "told to stop": told_to_stop, "load": answer}


@ends("3", {"load": "ModelLoadingError", "loaded": []})
async def story_unlocked_load_is_told_to_stop():
    bench = Bench({"A": 60})
    go = bench.plan("A", "start")
    load = asyncio.ensure_future(bench.pool._load_engine("A"))
    await until(lambda: FakeEngine.started)
    await Enforcer(bench, 96)._check_and_enforce()
    go.set()
    return {"load": await outcome(load), "loaded": bench.loaded}


if __name__ == "__main__":
    tell()
