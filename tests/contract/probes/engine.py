"""Runs a real engine on a tiny model, without a server, and prints what was seen.

Needs MLX; the model is made by the caller, whose folder is in ``OMLX_TINY``.
"""

import asyncio
import gc
import logging
import os
import threading
import time
from pathlib import Path

logging.disable(logging.CRITICAL)

from fakes import until  # noqa: E402
from omlx import engine_core, engine_pool  # noqa: E402
from omlx.engine.batched import BatchedEngine  # noqa: E402
from stories import ends, tell  # noqa: E402

FOLDER = Path(os.environ["OMLX_TINY"])


def entry(pool, name, engine_type="batched"):
    pool._entries[name] = engine_pool.EngineEntry(
        model_id=name,
        model_path=str(FOLDER / name),
        model_type="llm" if engine_type == "batched" else engine_type,
        engine_type=engine_type,
        estimated_size=1000,
    )


async def words(engine, count):
    output = await engine.generate(prompt="once", max_tokens=count, temperature=0.0)
    return output.completion_tokens


@ends(
    "5: a thread per text engine, one for all the rest",
    {"tokens": 12, "step": True, "global": "mlx-global", "vectors": [2, 64]},
)
async def story_threads():
    """Which thread loads, steps and embeds."""
    seen = {}
    step, burst = engine_core.EngineCore._step_burst, []

    def watched(self):
        burst.append(threading.current_thread().name)
        return step(self)

    engine_core.EngineCore._step_burst = watched
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    entry(pool, "embed", "embedding")
    text = await pool.get_engine("text")
    embed = await pool.get_engine("embed")
    embedding = await embed.embed(["one", "a second text"])
    seen["tokens"] = await words(text, 12)
    engine_core.EngineCore._step_burst = step
    seen["step"] = {name.rsplit("-", 1)[0] for name in burst} == {"mlx-engine"} or sorted(
        {name.split("_")[0] for name in burst}
    )
    executor = engine_core.get_mlx_executor()
    name = executor.submit(lambda: threading.current_thread().name).result()
    seen["global"] = name.split("_")[0]
    seen["vectors"] = [len(embedding.embeddings), embedding.dimensions]
    await pool.shutdown()
    return seen


@ends("2.2", {"waited": True})
async def story_loads_share_one_thread():
    """A load waits while the global thread is taken, whatever the pool's lock does."""
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    hold = threading.Event()
    engine_core.get_mlx_executor().submit(hold.wait, 30)
    load = asyncio.ensure_future(pool.get_engine("text"))
    await asyncio.sleep(0.2)
    waited = not load.done()
    hold.set()
    await load
    await pool.shutdown()
    return {"waited": waited}


@ends(
    "5: the first one's arrays may be lazy, the second one evaluates them",
    ["_load_model_sync", "materialize_lazy_state"],
)
async def story_jobs_of_a_load():
    """What a text model's load hands to the global thread first, by function name."""
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    executor = engine_core.get_mlx_executor()
    submit, names = executor.submit, []

    def watched(job, *args, **kwargs):
        names.append(job.__name__)
        return submit(job, *args, **kwargs)

    executor.submit = watched
    await pool.get_engine("text")
    del executor.submit
    await pool.shutdown()
    return names[:2]


@ends("2.2", {"waited": True, "busy": True})
async def story_embedding_waits_for_the_global_thread():
    pool = engine_pool.EnginePool()
    entry(pool, "embed", "embedding")
    engine = await pool.get_engine("embed")
    hold = threading.Event()
    engine_core.get_mlx_executor().submit(hold.wait, 30)
    request = asyncio.ensure_future(engine.embed(["one"]))
    await asyncio.sleep(0.2)
    waited, busy = not request.done(), engine.has_active_requests()
    hold.set()
    await request
    await pool.shutdown()
    return {"waited": waited, "busy": busy}


@ends("5", {"tokens": 5})
async def story_text_does_not_wait_for_the_global_thread():
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    engine = await pool.get_engine("text")
    hold = threading.Event()
    engine_core.get_mlx_executor().submit(hold.wait, 30)
    tokens = await words(engine, 5)
    hold.set()
    await pool.shutdown()
    return {"tokens": tokens}


@ends("1.6: outside the pool's books", {"pool": [], "tokens": 5, "loaded": True})
async def story_stopped_engine_starts_itself_again():
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    engine = await pool.get_engine("text")
    await pool._unload_engine("text")
    loaded_by_pool = pool.get_loaded_model_ids()
    tokens = await words(engine, 5)
    seen = {"pool": loaded_by_pool, "tokens": tokens, "loaded": engine._loaded}
    await engine.stop()
    return seen


@ends("2.3", {"blocked": True, "coroutine": False})
async def story_close_blocks_the_event_loop():
    engine = BatchedEngine(model_name=str(FOLDER / "text"))
    await engine.start()
    core = engine._engine.engine
    core._mlx_executor.submit(time.sleep, 0.3)
    gaps, last, stopped = [], time.monotonic(), asyncio.Event()

    async def tick():
        nonlocal last
        while not stopped.is_set():
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            await asyncio.sleep(0.01)
        gaps.append(time.monotonic() - last)

    ticker = asyncio.ensure_future(tick())
    await asyncio.sleep(0.02)
    await engine.stop()
    stopped.set()
    await ticker
    return {"blocked": max(gaps) > 0.2, "coroutine": asyncio.iscoroutinefunction(core.close)}


@ends("2.3", {"suspended": False, "closed": True, "let go": True, "loaded": False})
async def story_after_the_cores_stop_the_rest_awaits_nothing():
    """An engine's stop, once its core has stopped, runs to its end in one go."""
    engine = BatchedEngine(model_name=str(FOLDER / "text"))
    await engine.start()
    handle = engine._engine
    core = handle.engine
    await handle.stop()
    rest = engine.stop()
    try:
        rest.send(None)
        suspended = True
    except StopIteration:
        suspended = False
    core.close()  # and a second close finds nothing to do
    return {
        "suspended": suspended,
        "closed": core._closed,
        "let go": engine._engine is None and core.scheduler is None,
        "loaded": engine._loaded,
    }


@ends("1.6", {"before": False, "during": True, "after": False})
async def story_activity_shows_only_with_a_mailbox():
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    engine = await pool.get_engine("text", _lease=True)
    before = engine.has_active_requests()
    request = asyncio.ensure_future(words(engine, 400))
    await until(lambda: engine._engine.engine._output_collectors)
    during = engine.has_active_requests()
    await request
    after = engine.has_active_requests()
    await pool.shutdown()
    return {"before": before, "during": during, "after": after}


@ends("1.4", {"hanging": True})
async def story_unload_leaves_readers_hanging():
    """A stream whose engine is torn down gets neither an end nor an error."""
    pool = engine_pool.EnginePool()
    entry(pool, "text")
    engine = await pool.get_engine("text", _lease=True)
    got = []

    async def read():
        async for output in engine.stream_generate(prompt="once", max_tokens=100_000):
            got.append(output.new_text)

    reader = asyncio.ensure_future(read())
    await until(lambda: got)
    await pool._unload_engine("text")
    await asyncio.wait({reader}, timeout=0.3)
    hanging = not reader.done()
    reader.cancel()
    await asyncio.wait({reader})
    return {"hanging": hanging}


@ends("5.2", {"decode_burst_max_steps": 3, "decode_burst_budget_single_s": 1})
async def story_burst_limits():
    """Steps of one burst: the count limit, and one step when bursts are off."""
    engine = BatchedEngine(model_name=str(FOLDER / "text"))
    await engine.start()
    core = engine._engine.engine
    seen = {}
    for name, value in (("decode_burst_max_steps", 3), ("decode_burst_budget_single_s", 0.0)):
        setattr(core.config, name, value)
        sizes, step = [], type(core)._step_burst

        def watched(self, sizes=sizes, step=step):
            outputs = step(self)
            sizes.append(len(outputs))
            return outputs

        type(core)._step_burst = watched
        await words(engine, 12)
        type(core)._step_burst = step
        seen[name] = max(sizes)
    await engine.stop()
    return seen


def put_away():
    gc.collect()
    # The next story has another event loop; nothing may outlive this one.
    engine_core._global_mlx_executor = None


if __name__ == "__main__":
    tell(put_away)
    # Engine threads of closed engines must not be joined: see _immortal_mlx_executors.
    os._exit(0)
