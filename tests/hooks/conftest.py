"""The hooks in this process, on the pool of the stand-in or of a real oMLX.

One process imports one ``omlx``: the first ``--omlx-src``, else the stand-in.
Engines are fakes whose loads and teardowns end when the test says so, so that
every race is made by order and none by time.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

import standin
from omlx_admission.core.request import Request, current
from omlx_admission.hooks import install
from omlx_admission.hooks.patching import gate
from omlx_admission.hooks.pool.port import admission_refused
from omlx_admission.hooks.pool.state import state_of
from omlx_admission.settings import Settings
from tests.hooks.decided import decided
from tests.hooks.gpu_rig import Bench, bench  # noqa: F401 - a fixture


def pytest_configure(config: pytest.Config) -> None:
    sources = config.getoption("--omlx-src")
    sys.path.insert(0, sources[0] if sources else str(standin.PATH))


class DFlashEngine(MagicMock):
    """Of this class's name only one engine may live."""


class House:
    """One pool with fake engines. Sizes are bytes; the ceiling is 1000."""

    def __init__(self, pool: Any, module: Any) -> None:
        self.pool = pool
        self.module = module
        self.events: list[str] = []
        self.hold_loads = False
        self.hold_unloads = False
        self.fail: dict[str, Exception] = {}
        self.ceiling = 1000
        #: Models whose engine is one of the kind of which only one may live.
        self.dflash: set[str] = set()
        #: What of the ceiling is fixed; None: all of it.
        self.fixed_ceiling: int | None = None
        self._load_gates: dict[str, asyncio.Event] = {}
        self._unload_gates: dict[str, asyncio.Event] = {}

    def breakdown(self) -> dict[str, int]:
        """The parts of the ceiling, as an enforcer of tier `balanced` tells them."""
        static = self.ceiling if self.fixed_ceiling is None else self.fixed_ceiling
        parts = {"static": static, "dynamic": self.ceiling, "metal_cap": 0}
        return parts | {"hard_limit": self.ceiling}

    def engine(self, *args: Any, **keywords: Any) -> MagicMock:
        """What stands in for ``BatchedEngine(...)``."""
        path = keywords.get("model_name") or keywords.get("model_path") or args[0]
        name = Path(str(path)).name

        async def start() -> None:
            await self._start(name)

        async def stop() -> None:
            await self._stop(name)

        kind = DFlashEngine if name in self.dflash else MagicMock
        engine = kind(name=f"engine-{name}")
        engine.has_active_requests = MagicMock(return_value=False)
        engine.scheduler = engine._engine = None
        engine.start = AsyncMock(side_effect=start)
        engine.stop = AsyncMock(side_effect=stop)
        engine.abort_all_requests = AsyncMock(return_value=0)
        return engine

    async def _start(self, name: str) -> None:
        self.events.append(f"load {name}")
        if self.hold_loads:
            gate_ = self._load_gates[name] = asyncio.Event()
            await gate_.wait()
        if name in self.fail:
            raise self.fail[name]
        self.events.append(f"loaded {name}")

    async def _stop(self, name: str) -> None:
        self.events.append(f"unload {name}")
        if self.hold_unloads:
            gate_ = self._unload_gates[name] = asyncio.Event()
            await gate_.wait()
        self.events.append(f"unloaded {name}")

    async def let_load(self, name: str) -> None:
        """Let the load of ``name`` end, once it has begun."""
        await until(lambda: name in self._load_gates)
        self._load_gates.pop(name).set()

    async def let_unload(self, name: str) -> None:
        """Let the teardown of ``name`` end, once it has begun."""
        await until(lambda: name in self._unload_gates)
        self._unload_gates.pop(name).set()

    async def get(
        self, model: str, lease: bool = True, *, by: Request | None = None, **keywords: Any
    ) -> Any:
        """``get_engine``, leased unless said otherwise; within the request ``by``."""
        if lease:
            keywords["_lease"] = True
        with within(by):
            return await self.pool.get_engine(model, **keywords)

    def ask(self, model: str, lease: bool = True, **keywords: Any) -> asyncio.Task[Any]:
        """``get_engine`` in a task of its own."""
        return asyncio.get_running_loop().create_task(self.get(model, lease, **keywords))

    async def waits(self, model: str, lease: bool = True, **keywords: Any) -> asyncio.Task[Any]:
        """``ask`` for what is not to be had yet."""
        asked = self.ask(model, lease, **keywords)
        await settle()
        assert not asked.done()
        return asked

    async def release(self, model: str, times: int = 1, *, by: Request | None = None) -> None:
        with within(by):
            for _ in range(times):
                await self.pool.release_engine(model)

    async def use(self, *models: str) -> None:
        """One request for each, one after the other: what fits is loaded and idle then."""
        for model in models:
            await self.get(model)
            await self.release(model)

    async def held_load(self, model: str) -> asyncio.Task[Any]:
        """A request for ``model`` whose load has begun and ends by :meth:`let_load`."""
        self.hold_loads = True
        asked = self.ask(model)
        await until(lambda: f"load {model}" in self.events)
        return asked

    async def held_unload(self, model: str) -> asyncio.Future[Any]:
        """A teardown of ``model`` that has begun and ends by :meth:`let_unload`."""
        self.hold_unloads = True
        unload = asyncio.ensure_future(self.pool._unload_engine(model))
        await until(lambda: f"unload {model}" in self.events)
        return unload

    def entry(self, model: str) -> Any:
        return self.pool._entries[model]

    def resident(self) -> set[str]:
        return {m for m, e in self.pool._entries.items() if e.engine is not None}

    def tracked(self) -> int:
        """What the pool's own count of bytes has to be: the sum of what is resident."""
        return sum(SIZES[model] for model in self.resident())

    @property
    def admission(self) -> Any:
        return state_of(self.pool).admission

    async def ends_idle(self, *models: str) -> None:
        """The last leases come back, and nothing is left of any request."""
        for model in models:
            await self.release(model)
        self.assert_idle()

    def assert_idle(self) -> None:
        """K8: leases, waiters, marks and teardowns are all gone."""
        entries = self.pool._entries
        assert {m: e.in_use for m, e in entries.items() if e.in_use} == {}
        assert {m for m, e in entries.items() if e.pending_unload_reason} == set()
        assert {m for m, e in entries.items() if e.is_loading} == set()
        assert state_of(self.pool).unloading == {}
        if self.admission is not None:
            assert self.admission.policy.waiting == 0
            assert self.admission.policy.swap is None
            assert self.admission.gated == frozenset()


Make = Callable[..., House]


async def never() -> Any:
    await asyncio.Event().wait()


def request_to(path: str) -> Request:
    return Request({"path": path, "headers": []}, never)


@contextmanager
def within(request: Request | None) -> Iterator[None]:
    """What is asked in this block, and what is started in it, belongs to ``request``."""
    token = request and current.set(request)
    try:
        yield
    finally:
        if token:
            current.reset(token)


async def refused(asked: Awaitable[Any]) -> Any:
    """The refusal that ``asked`` ends in."""
    with pytest.raises(admission_refused()) as raised:
        await asked
    return raised.value.refusal


def by_profile(house: House, mocker: Any) -> None:
    """A model's variant is what the caller's settings say under ``mtp``."""
    mocker.patch.object(
        house.pool,
        "_engine_runtime_signature",
        lambda _m, s=None, **_k: (("mtp_enabled", str((s or {}).get("mtp"))),),
    )


async def until(condition: Callable[[], bool], turns: int = 20000) -> None:
    """Let the loop run until ``condition`` holds; fails after ``turns`` turns of 1 ms.

    Stock hops to its executor thread within an unload, so the loop has to turn in
    real time; no outcome depends on how long a turn takes.
    """
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("what the test waits for never happened")


def enforcer_of(pool: Any, usage: int = 0, **arguments: Any) -> Any:
    """Stock's memory enforcer, not polling; its reading is its ``usage``, the ceiling 1000."""
    from omlx.process_memory_enforcer import ProcessMemoryEnforcer

    class Enforcer(ProcessMemoryEnforcer):  # type: ignore[misc]
        def _current_usage_bytes(self) -> int:
            return int(self.usage)

        def _get_hard_limit_bytes(self) -> int:
            return 1000

        def _propagate_memory_limit(self) -> None:
            pass

    enforcer = Enforcer(pool, **arguments)
    enforcer.usage = usage
    pool._process_memory_enforcer = enforcer
    return enforcer


class Loop(asyncio.SelectorEventLoop):
    """Its clock can be moved on: see `later`."""

    ahead = 0.0
    bound: asyncio.Timeout

    def time(self) -> float:
        return super().time() + self.ahead


async def later(seconds: float) -> None:
    """Let so much time pass on the loop's clock, in steps, with all that is due in it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    for _ in range(max(1, round(seconds / 0.05))):
        loop.ahead += 0.05
        await settle()
    when = loop.bound.when()
    assert when is not None
    loop.bound.reschedule(when + seconds)


async def soon(task: asyncio.Future[Any]) -> Any:
    """Await ``task`` with time passing fifty times as fast.

    Not faster, for what it waits for may be done by a thread, in real time.
    """
    while not task.done():
        await later(0.05)
        await asyncio.sleep(0.001)
    return await task


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


SIZES = {"a": 600, "b": 600, "d": 300, "p": 300, "x": 1200}


@pytest.fixture(scope="session")
def omlx_found() -> gate.Found:
    return gate.find()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Model folders whose weight files have the sizes of ``SIZES`` (less oMLX's 5 %)."""
    root = tmp_path / "models"
    for name, size in SIZES.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "model.safetensors").write_bytes(b"0" * size)
    return root


@pytest.fixture
def make_house(
    models: Path, mocker: Any, omlx_found: gate.Found
) -> Iterator[Callable[..., House]]:
    """Make a patched pool: ``make_house(max_wait_s=1.0, ...)`` sets variables by field."""
    import omlx.engine_pool as module

    installers: list[install.Installer] = []

    def make(*, features: set[str] | None = None, **values: Any) -> House:
        switches = {"resident_path": "resident", "queue": "queue", "errors": "errors"}
        if features is not None:
            values |= {field: name in features for field, name in switches.items()}
        report = decided(Settings(**values))
        installer = install.Installer(report)
        installer.on_import(module)
        installers.append(installer)
        pool = module.EnginePool()
        house = House(pool, module)
        mocker.patch.object(module, "BatchedEngine", house.engine)
        mocker.patch.object(module.mx, "get_active_memory", lambda: 0)
        mocker.patch.object(module, "get_phys_footprint", lambda: 0)
        pool._get_final_ceiling = lambda: house.ceiling
        pool._process_memory_enforcer = SimpleNamespace(
            get_ceiling_breakdown=house.breakdown,
            _memory_guard_tier="balanced",
            memory_guard_tier="balanced",
            wake=lambda **_keywords: None,
            _propagate_memory_limit=lambda: None,
        )
        pool.discover_models([str(models)], [])
        for name, size in SIZES.items():
            pool._entries[name].estimated_size = size
        return house

    yield make
    for installer in reversed(installers):
        installer.undo()


@pytest.fixture
def house(make_house: Make) -> House:
    """A patched pool with the default of each variable."""
    return make_house()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An ``async def`` test runs on a `Loop`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names}

    async def test() -> None:
        async with AsyncExitStack() as ends:
            for bench in given.values():
                if isinstance(bench, Bench):  # its engines run on this loop
                    ends.push_async_callback(bench.aclose)
            await pyfuncitem.obj(**given)

    run(test)
    return True


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run one test coroutine with a limit on its turns round the loop's clock."""

    async def bounded() -> None:
        async with asyncio.timeout(30) as bound:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Loop)
            loop.bound = bound
            await test()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(bounded())
