"""Engines and models without weights, for the scripts beside this file."""

import asyncio
import contextlib
import json
import logging
import tempfile
from pathlib import Path
from typing import ClassVar

logging.disable(logging.CRITICAL)

from omlx import engine_pool  # noqa: E402
from omlx.engine.base import BaseEngine  # noqa: E402


class Tokenizer:
    """As much of one as the pool asks for."""

    def encode(self, text):
        return list(range(len(text)))


class FakeEngine(BaseEngine):
    """Does what the test says in ``plans``: by model, what to wait for or raise."""

    started: ClassVar[list] = []
    stopped: ClassVar[list] = []
    plans: ClassVar[dict] = {}

    def __init__(self, model_name, **keywords):
        self._model_name = model_name
        self.name = Path(model_name).name
        self.active = False

    model_name = property(lambda self: self._model_name)
    tokenizer = property(lambda self: Tokenizer())
    model_type = property(lambda self: "fake")

    async def _follow(self, step):
        plan = self.plans.get((self.name, step))
        if isinstance(plan, Exception):
            raise plan
        if plan is not None:
            await plan.wait()

    async def start(self):
        self.started.append(self.name)
        await self._follow("start")

    async def stop(self):
        await self._follow("stop")
        self.stopped.append(self.name)

    def has_active_requests(self):
        if self.active == "broken":
            raise RuntimeError("cannot tell")
        return bool(self.active)

    async def abort_all_requests(self, **keywords):
        self.active = False
        return 1

    async def generate(self, prompt, **keywords): ...
    async def chat(self, messages, **keywords): ...
    def stream_generate(self, prompt, **keywords): ...
    def stream_chat(self, messages, **keywords): ...
    def get_stats(self):
        return {}

    def get_cache_stats(self):
        return None


class Settings:
    """Load-time settings of a variant."""

    def __init__(self, index_cache_freq):
        self.index_cache_freq = index_cache_freq
        self.trust_remote_code = False
        self.mtp_enabled = False
        self.dflash_enabled = False
        self.ttl_seconds = None

    def __getattr__(self, name):
        return None

    def to_dict(self):
        return {"index_cache_freq": self.index_cache_freq}


def make_model(folder, name):
    """A folder that looks like a model."""
    path = Path(folder) / name
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(90))
    return str(path)


class Bench:
    """A pool with models of given sizes under a ceiling of 100 bytes."""

    def __init__(self, sizes, ceiling=100, soft=0, fallback=0, **wanted):
        self.folder = tempfile.mkdtemp()
        FakeEngine.started = []
        FakeEngine.stopped = []
        FakeEngine.plans = {}
        engine_pool.BatchedEngine = FakeEngine
        # What the machine really uses would drown sizes of a few bytes.
        engine_pool.mx = _QuietMlx(engine_pool.mx)
        self.pool = engine_pool.EnginePool()
        self.pool._get_final_ceiling = lambda: ceiling
        self.pool._get_admission_soft_target = lambda: soft
        self.pool._get_admission_ceiling = lambda: fallback
        for name, size in sizes.items():
            self.pool._entries[name] = engine_pool.EngineEntry(
                model_id=name,
                model_path=make_model(self.folder, name),
                model_type="llm",
                engine_type="batched",
                estimated_size=size,
            )

    def entry(self, name):
        return self.pool._entries[name]

    @property
    def loaded(self):
        return sorted(self.pool.get_loaded_model_ids())

    async def load(self, *names, **keywords):
        for name in names:
            await self.pool.get_engine(name, **keywords)
            # Last use must differ, however coarse the clock is.
            self.entry(name).last_access = 1000.0 + len(FakeEngine.started)

    def plan(self, name, step):
        """Make a step of a model wait; returns what lets it go on."""
        event = asyncio.Event()
        FakeEngine.plans[name, step] = event
        return event


class _QuietMlx:
    def __init__(self, real):
        self._real = getattr(real, "_real", real)

    def get_active_memory(self):
        return 0

    def __getattr__(self, name):
        return getattr(self._real, name)


async def turns(count=50):
    """Let everything that can run, run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition):
    """Wait for a condition that other tasks bring about, executor hops included."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("what the script waits for never came")


async def outcome(awaitable):
    """``ok`` or the name of the error."""
    try:
        await awaitable
    except Exception as error:
        return type(error).__name__
    return "ok"


@contextlib.asynccontextmanager
async def cancelled_at_end(coroutine):
    """A task that does not outlive the block."""
    task = asyncio.ensure_future(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
