"""Runs short stories on an EnginePool and prints how each one ends.

Every function whose name starts with ``story_`` is one; its result is printed
under the rest of its name. Nothing here waits for real time.
"""

import asyncio
import time
from pathlib import Path

from fakes import (
    Bench,
    FakeEngine,
    Settings,
    cancelled_at_end,
    make_model,
    outcome,
    turns,
    until,
)
from stories import ends, tell

NO_ROOM = "InsufficientMemoryError"

A_B = {"A": 60, "B": 60}


@ends("1.2", {"waited": True, "then": "ok"})
async def story_resident_waits_for_a_load():
    bench = Bench({"A": 30, "B": 30})
    await bench.load("A")
    go = bench.plan("B", "start")
    async with cancelled_at_end(bench.pool.get_engine("B")):
        await until(lambda: "B" in FakeEngine.started)
        resident = asyncio.ensure_future(bench.pool.get_engine("A"))
        await turns()
        waited = not resident.done()
        go.set()
        return {"waited": waited, "then": await outcome(resident)}


@ends("2.1", {"waited": True, "leases": 0})
async def story_release_waits_for_a_load():
    bench = Bench({"A": 30, "B": 30})
    await bench.load("A", _lease=True)
    go = bench.plan("B", "start")
    async with cancelled_at_end(bench.pool.get_engine("B")):
        await until(lambda: "B" in FakeEngine.started)
        release = asyncio.ensure_future(bench.pool.release_engine("A"))
        await turns()
        waited = not release.done() and bench.entry("A").in_use == 1
        go.set()
        await release
        return {"waited": waited, "leases": bench.entry("A").in_use}


@ends("2.1", {"waited": True, "freed": True, "loaded": ["B"]})
async def story_prefill_eviction_waits_for_a_load():
    bench = Bench({"A": 30, "B": 30})
    await bench.load("A")
    go = bench.plan("B", "start")

    class Request:
        request_id = "r"
        target_cap_bytes = 100
        predicted_transient_bytes = 50

    async with cancelled_at_end(bench.pool.get_engine("B")) as load:
        await until(lambda: "B" in FakeEngine.started)
        evict = asyncio.ensure_future(bench.pool._evict_idle_lru_for_prefill("B", Request()))
        await turns()
        waited = not evict.done()
        go.set()
        await load
        return {"waited": waited, "freed": await evict, "loaded": bench.loaded}


@ends("1.6", {"error": NO_ROOM, "loaded": ["A"], "locked": False})
async def story_busy_model_is_refused_not_waited_for():
    bench = Bench(A_B)
    await bench.load("A", _lease=True)
    error = await outcome(bench.pool.get_engine("B"))
    return {"error": error, "loaded": bench.loaded, "locked": bench.pool._lock.locked()}


@ends("1.6", {"error": "ModelTooLargeError", "loaded": []})
async def story_model_above_the_ceiling_costs_others_their_place():
    bench = Bench({"A": 60, "X": 120})
    await bench.load("A")
    return {"error": await outcome(bench.pool.get_engine("X")), "loaded": bench.loaded}


@ends("1.6", {"error": NO_ROOM, "loaded": ["A"]})
async def story_refused_model_has_evicted_the_idle_ones():
    bench = Bench({"A": 60, "D": 30, "B": 60})
    await bench.load("A", _lease=True)
    await bench.load("D")
    return {"error": await outcome(bench.pool.get_engine("B")), "loaded": bench.loaded}


@ends("1.10", {"stopped": ["F"], "loaded": ["B", "D"]})
async def story_least_recently_used_goes_first():
    bench = Bench({"D": 30, "F": 30, "B": 60})
    await bench.load("D", "F")
    bench.entry("D").last_access, bench.entry("F").last_access = 2000.0, 1000.0
    await bench.load("B")
    return {"stopped": FakeEngine.stopped, "loaded": bench.loaded}


@ends("1.6", {"victim": None, "loaded": ["L", "P", "R", "U"]})
async def story_pinned_leased_and_active_are_no_victims():
    bench = Bench({"P": 20, "L": 20, "R": 20, "U": 20, "B": 60})
    await bench.load("P", "R", "U")
    await bench.load("L", _lease=True)
    bench.entry("P").is_pinned = True
    bench.entry("R").engine.active = True
    bench.entry("U").engine.active = "broken"
    return {"victim": bench.pool._find_lru_victim(), "loaded": bench.loaded}


@ends("1.10", {"loaded": ["E", "N"]}, since={"0.5.3": {"loaded": ["N"]}})
async def story_soft_target_evicts_the_idle():
    bench = Bench({"E": 40, "N": 50}, soft=85)
    await bench.load("E", "N")
    return {"loaded": bench.loaded}


@ends("1.10", {"answer": "ok", "loaded": ["E", "N"]})
async def story_soft_target_does_not_refuse():
    bench = Bench({"E": 40, "N": 50}, soft=85)
    await bench.load("E", _lease=True)
    return {"answer": await outcome(bench.pool.get_engine("N")), "loaded": bench.loaded}


@ends(
    "1.10",
    {"answer": "ok", "loaded": ["A", "X"]},
    since={"0.5.3": {"answer": "ok", "loaded": ["X"]}},
)
async def story_guard_off_evicts_and_never_refuses():
    bench = Bench({"A": 60, "X": 120}, ceiling=0, fallback=100)
    await bench.load("A")
    return {"answer": await outcome(bench.pool.get_engine("X")), "loaded": bench.loaded}


@ends("1.10", {"A": 60, "A, then B": 60, "loaded": ["B"]})
async def story_counted_memory_beats_live_memory():
    bench = Bench(A_B)
    await bench.load("A")
    before = bench.pool.current_model_memory
    await bench.load("B")
    return {"A": before, "A, then B": bench.pool.current_model_memory, "loaded": bench.loaded}


@ends("1.6", {"same": True, "starts": ["A"], "loaded": []})
async def story_dying_engine_is_handed_out():
    bench = Bench(A_B)
    await bench.load("A")
    engine = bench.entry("A").engine
    go = bench.plan("A", "stop")
    unload = asyncio.ensure_future(bench.pool._unload_engine("A"))
    await turns()
    same = await bench.pool.get_engine("A", _lease=True) is engine
    go.set()
    await unload
    return {"same": same, "starts": FakeEngine.started, "loaded": bench.loaded}


@ends("1.4", {"stops": 2, "memory": -60}, since={"0.6.0": {"stops": 2, "memory": 0}})
async def story_second_unload_stops_the_engine_again():
    bench = Bench(A_B)
    await bench.load("A")
    go = bench.plan("A", "stop")
    unloads = [asyncio.ensure_future(bench.pool._unload_engine("A")) for _ in range(2)]
    await turns()
    go.set()
    await asyncio.gather(*unloads)
    return {"stops": len(FakeEngine.stopped), "memory": bench.pool.current_model_memory}


@ends("1.6", {"error": "ModelBusyError", "same variant": "ok", "starts": 1})
async def story_variant_of_a_busy_model():
    bench = Bench(A_B)
    await bench.load("A", _lease=True, runtime_settings=Settings(2))
    error = await outcome(bench.pool.get_engine("A", runtime_settings=Settings(3)))
    same = await outcome(bench.pool.get_engine("A", runtime_settings=Settings(2)))
    return {"error": error, "same variant": same, "starts": len(FakeEngine.started)}


@ends("1.6", {"starts": 2, "stops": 1})
async def story_variant_of_an_idle_model():
    bench = Bench(A_B)
    await bench.load("A", runtime_settings=Settings(2))
    await bench.load("A", runtime_settings=Settings(3))
    return {"starts": len(FakeEngine.started), "stops": len(FakeEngine.stopped)}


@ends(
    "1.6",
    {"marked": True, "newcomer": "ok"},
    since={"0.6.2": {"marked": True, "newcomer": "ModelBusyError"}},
)
async def story_pending_model_and_newcomers():
    bench = Bench(A_B)
    await bench.load("A", _lease=True)
    async with bench.pool._lock:
        marked = bench.pool._mark_pending_unload_locked("A", "drain")
    return {"marked": marked, "newcomer": await outcome(bench.pool.get_engine("A"))}


@ends("1.4", {"before": ["A"], "after": [], "reason": None})
async def story_last_release_unloads_a_pending_model():
    bench = Bench(A_B)
    await bench.load("A", _lease=True)
    async with bench.pool._lock:
        bench.pool._mark_pending_unload_locked("A", "drain")
    kept = bench.loaded
    await bench.pool.release_engine("A")
    return {
        "before": kept,
        "after": bench.loaded,
        "reason": bench.entry("A").pending_unload_reason,
    }


@ends("1.3", {"pinned": False, "unloaded": False})
async def story_pinned_or_loading_models_take_no_mark():
    bench = Bench(A_B)
    await bench.load("A")
    bench.entry("A").is_pinned = True
    pinned = bench.pool._mark_pending_unload_locked("A", "drain")
    return {"pinned": pinned, "unloaded": bench.pool._mark_pending_unload_locked("B", "drain")}


@ends(
    "1.6",
    {
        "loading": False,
        "failed": False,
        "leases": 0,
        "memory": 0,
        "locked": False,
        "again": "ok",
    },
)
async def story_cancelled_load_leaves_no_trace():
    bench = Bench(A_B)
    bench.plan("A", "start")
    load = asyncio.ensure_future(bench.pool.get_engine("A", _lease=True))
    await until(lambda: FakeEngine.started)
    load.cancel()
    try:
        await load
    except asyncio.CancelledError:
        pass
    entry = bench.entry("A")
    FakeEngine.plans.clear()
    return {
        "loading": entry.is_loading,
        "failed": entry.load_failed,
        "leases": entry.in_use,
        "memory": bench.pool.current_model_memory,
        "locked": bench.pool._lock.locked(),
        "again": await outcome(bench.pool.get_engine("A")),
    }


@ends("1.6", {"errors": ["ModelUnavailableError"] * 2, "starts": 1, "loading": False})
async def story_failed_load_is_remembered():
    bench = Bench(A_B)
    FakeEngine.plans["A", "start"] = OSError("a file is broken")
    errors = [await outcome(bench.pool.get_engine("A")) for _ in range(2)]
    entry = bench.entry("A")
    return {"errors": errors, "starts": len(FakeEngine.started), "loading": entry.is_loading}


@ends("1.6", {"error": "ModelUnavailableError", "loaded": []})
async def story_failed_load_has_evicted_others():
    bench = Bench(A_B)
    await bench.load("A")
    FakeEngine.plans["B", "start"] = OSError("a file is broken")
    return {"error": await outcome(bench.pool.get_engine("B")), "loaded": bench.loaded}


@ends("1.10", {"error": "ModelNotFoundError", "known": ["B"]})
async def story_missing_folder_is_not_found():
    bench = Bench(A_B)
    bench.entry("A").model_path += "-gone"
    error = await outcome(bench.pool.get_engine("A"))
    return {"error": error, "known": sorted(bench.pool.get_model_ids())}


@ends("1.10", {"starts": 1, "engines": 1, "leases": 5})
async def story_one_load_for_many_requests():
    bench = Bench(A_B)
    engines = await asyncio.gather(*(bench.pool.get_engine("A", _lease=True) for _ in range(5)))
    return {
        "starts": len(FakeEngine.started),
        "engines": len({id(engine) for engine in engines}),
        "leases": bench.entry("A").in_use,
    }


@ends("1.10", {"order": ["B", "A", "C"], "loaded": ["C"]})
async def story_waiters_are_served_in_order():
    bench = Bench({"A": 60, "B": 60, "C": 60})
    order = []

    async def use(name):
        await bench.pool.get_engine(name)
        order.append(name)

    await asyncio.gather(use("B"), use("A"), use("C"))
    return {"order": order, "loaded": bench.loaded}


@ends("1.3", {"leases": 1}, since={"0.5.3": {"leases": 0}})
async def story_release_outlives_its_caller():
    bench = Bench({"A": 30, "B": 30})
    await bench.load("A", _lease=True)
    async with bench.pool._lock:
        release = asyncio.ensure_future(bench.pool.release_engine("A"))
        await turns()
        release.cancel()
        await turns()
    await turns()
    return {"leases": bench.entry("A").in_use}


@ends("1.11", {"leases": 0})
async def story_release_never_goes_below_zero():
    bench = Bench(A_B)
    await bench.load("A")
    await bench.pool.release_engine("A")
    return {"leases": bench.entry("A").in_use}


@ends(
    "1.5",
    {
        "same": {"gone": False, "loaded": True, "loading": False, "rest": False},
        "load": "ModelLoadingError",
        "loaded": ["loaded"],
    },
    since={
        "0.5.3": {
            "same": {"gone": False, "loaded": True, "loading": True, "rest": False},
            "load": "ok",
            "loaded": ["loaded", "loading"],
        }
    },
)
async def story_rescan_replaces_entries_at_rest():
    bench = Bench({})
    for name in ("rest", "loaded", "loading", "gone"):
        make_model(bench.folder, name)
    pool = bench.pool
    pool._get_final_ceiling = lambda: 0
    pool.discover_models(bench.folder)
    await bench.load("loaded")
    go = bench.plan("loading", "start")
    async with cancelled_at_end(pool.get_engine("loading")) as load:
        await until(lambda: "loading" in FakeEngine.started)
        before = dict(pool._entries)
        for file in ("gone/config.json", "gone/model.safetensors"):
            (Path(bench.folder) / file).unlink()
        pool.discover_models(bench.folder)
        same = {name: pool._entries.get(name) is entry for name, entry in before.items()}
        go.set()
        return {"same": same, "load": await outcome(load), "loaded": bench.loaded}


@ends(
    "1.4",
    {"error": "KeyError", "memory": 60, "stops": []},
    since={"0.5.3": {"error": "ModelLoadingError", "memory": 0, "stops": ["A"]}},
)
async def story_entry_wiped_during_its_load():
    bench = Bench(A_B)
    go = bench.plan("A", "start")
    load = asyncio.ensure_future(bench.pool.get_engine("A"))
    await until(lambda: FakeEngine.started)
    bench.pool._entries.clear()
    go.set()
    error = await outcome(load)
    memory = bench.pool.current_model_memory
    return {"error": error, "memory": memory, "stops": FakeEngine.stopped}


@ends("1.6", {"error": "ModelLoadingError", "again": "ok"})
async def story_aborted_load_is_not_remembered():
    bench = Bench(A_B)
    go = bench.plan("A", "start")
    load = asyncio.ensure_future(bench.pool.get_engine("A"))
    await until(lambda: FakeEngine.started)
    bench.entry("A").abort_loading = True
    go.set()
    return {"error": await outcome(load), "again": await outcome(bench.pool.get_engine("A"))}


@ends("1.2", {"seconds": 8.0})
async def story_settle_waits_for_a_large_model():
    bench = Bench({"A": 10 * 1024**3}, ceiling=0)
    await bench.load("A")
    return {"seconds": await _sleeps_of(bench.pool._unload_engine("A"))}


@ends("1.2", {"seconds": 0})
async def story_settle_gives_up_while_others_work():
    bench = Bench({"A": 10 * 1024**3, "B": 1}, ceiling=0)
    await bench.load("A")
    await bench.load("B", _lease=True)
    return {"seconds": await _sleeps_of(bench.pool._unload_engine("A"))}


@ends("1.2", {"seconds": 0})
async def story_small_models_settle_at_once():
    bench = Bench({"A": 2 * 1024**3}, ceiling=0)
    await bench.load("A")
    return {"seconds": await _sleeps_of(bench.pool._unload_engine("A"))}


async def _sleeps_of(coroutine):
    """Seconds slept in a coroutine, without sleeping them."""
    real, slept = asyncio.sleep, []

    async def sleep(seconds, result=None):
        slept.append(seconds)
        return await real(0, result)

    asyncio.sleep = sleep
    try:
        await coroutine
    finally:
        asyncio.sleep = real
    return sum(slept)


@ends("1.2", {"gone": ["A"], "loaded": ["B", "P"], "busy one is fresh": True})
async def story_ttl_unloads_the_idle_and_refreshes_the_busy():
    bench = Bench({"A": 30, "B": 30, "P": 30})
    await bench.load("A", "P")
    await bench.load("B", _lease=True)
    bench.entry("P").is_pinned = True
    for name in bench.loaded:
        bench.entry(name).last_access = time.time() - 100

    class Manager:
        def get_settings(self, model_id):
            settings = Settings(None)
            settings.ttl_seconds = 50
            return settings

    gone = await bench.pool.check_ttl_expirations(Manager())
    fresh = time.time() - bench.entry("B").last_access < 50
    return {"gone": gone, "loaded": bench.loaded, "busy one is fresh": fresh}


@ends("1.2", {"waited": True, "gone": []})
async def story_ttl_waits_for_a_load():
    bench = Bench({"A": 30, "B": 30})
    go = bench.plan("B", "start")

    class Manager:
        def get_settings(self, model_id):
            return Settings(None)

    async with cancelled_at_end(bench.pool.get_engine("B")) as load:
        await until(lambda: FakeEngine.started)
        sweep = asyncio.ensure_future(bench.pool.check_ttl_expirations(Manager()))
        await turns()
        waited = not sweep.done()
        go.set()
        await load
        return {"waited": waited, "gone": await sweep}


@ends("1.2", {"leased": False, "idle": True})
async def story_unload_if_idle_spares_the_leased():
    bench = Bench(A_B)
    await bench.load("A", _lease=True)
    first = await bench.pool.unload_if_idle_unpinned("A")
    await bench.pool.release_engine("A")
    return {"leased": first, "idle": await bench.pool.unload_if_idle_unpinned("A")}


@ends(
    "1.9",
    None,
    since={
        "0.6.2": {
            "at once": False,
            "reason": "manual admin unload",
            "newcomer": "ModelBusyError",
            "loaded": [],
        }
    },
)
async def story_manual_unload_aborts_and_drains():
    bench = Bench(A_B)
    if not hasattr(bench.pool, "request_unload"):
        return None
    await bench.load("A", _lease=True)
    bench.entry("A").engine.active = True
    at_once = await bench.pool.request_unload("A", reason="manual admin unload")
    reason = bench.pool.get_abort_requested_reason("A")
    newcomer = await outcome(bench.pool.get_engine("A"))
    await bench.pool.release_engine("A")
    return {
        "at once": at_once,
        "reason": reason,
        "newcomer": newcomer,
        "loaded": bench.loaded,
    }


@ends(
    "4.2",
    {
        "Some-Model": "Some-Model",
        "some-model": "Some-Model",
        "any/Some-Model": "Some-Model",
        "any/some-model": "Some-Model",
        "other": "other",
    },
)
async def story_names_of_one_model():
    bench = Bench({"Some-Model": 30})
    resolve = bench.pool.resolve_model_id
    names = ("Some-Model", "some-model", "any/Some-Model", "any/some-model", "other")
    return {name: resolve(name, None) for name in names}


@ends("1.2", {"loaded": [], "memory": 0})
async def story_shutdown_unloads_everything():
    bench = Bench({"A": 30, "B": 30})
    await bench.load("A", "B")
    await bench.pool.shutdown()
    return {"loaded": bench.loaded, "memory": bench.pool.current_model_memory}


if __name__ == "__main__":
    tell()
