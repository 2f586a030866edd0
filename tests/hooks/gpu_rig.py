"""An engine core whose scheduler does what the test says, on the thread that oMLX gives it."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks import install
from omlx_admission.settings import Settings
from tests.hooks.decided import decided

PATIENCE_S = 20.0


class Gate:
    """A place in the work where the engine's thread stops until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._go.wait(PATIENCE_S)

    def open(self) -> None:
        self._go.set()

    async def until_reached(self) -> None:
        for _ in range(int(PATIENCE_S * 1000)):
            if self.reached.is_set():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the work never came to this place")


def fake_scheduler(scheduler_module: Any) -> type:
    """A Scheduler class: each step gives every running request one token."""

    class FakeScheduler:
        def __init__(self, *_args: Any, stream: Any, config: Any = None, **_: Any) -> None:
            self.config = config
            self._stream = stream
            self.running: dict[str, Any] = {}
            self.waiting: deque[Any] = deque()
            self.prefilling: list[Any] = []
            self.requests: dict[str, Any] = {}
            self.paged_ssd_cache_manager = None
            self._specprefill_draft_model = None
            self.script: deque[Callable[[], None]] = deque()
            self.steps = 0
            self.progress: list[list[tuple[int, int, int]]] = []
            self._decode_activity_key = f"fake:{id(self):x}"

        def add_request(self, request: Any) -> None:
            request.output_token_ids = []
            request.num_prompt_tokens = 1
            self.running[request.request_id] = self.requests[request.request_id] = request

        def abort_request(self, request_id: str) -> bool:
            self.requests.pop(request_id, None)
            return self.running.pop(request_id, None) is not None

        def has_requests(self) -> bool:
            return bool(self.running or self.waiting or self.prefilling)

        def step(self) -> Any:
            from omlx.request import RequestOutput

            self.steps += 1
            if self.script:
                self.script.popleft()()
            output = scheduler_module.SchedulerOutput()
            for request_id, request in list(self.running.items()):
                request.output_token_ids.append(7)
                done = len(request.output_token_ids) >= request.sampling_params.max_tokens
                output.outputs.append(
                    RequestOutput(
                        request_id=request_id,
                        new_token_ids=[7],
                        new_text="x",
                        output_token_ids=list(request.output_token_ids),
                        output_text="x" * len(request.output_token_ids),
                        finished=done,
                        finish_reason="length" if done else None,
                        completion_tokens=len(request.output_token_ids),
                    )
                )
                output.has_work = True
                if done:
                    del self.running[request_id], self.requests[request_id]
            return output

        def _on_prompt_progress(self, updates: list[tuple[int, int, int]]) -> None:
            self.progress.append(updates)

        def fail_all_requests(self) -> list[str]:
            failed = list(self.requests)
            if self.script:
                self.script.popleft()()
            self.running.clear()
            self.requests.clear()
            return failed

        def get_stats(self) -> dict[str, Any]:
            return {}

        def shutdown(self) -> None:
            """Nothing to write."""

        def deep_reset(self) -> None:
            self.running.clear()

    return FakeScheduler


class Model:
    """What an engine core is given as its model: it is never called."""


@contextmanager
def installed(*modules: str, scheduler: type | None = None, **values: Any) -> Iterator[Any]:
    """Apply the hooks that ``values`` switch on to ``modules``, then undo them."""
    off = {"resident_path": False, "queue": False, "errors": False}
    quiet = {"exposure": False, "exit_on_gpu_lockout": False}
    report = decided(Settings(**{**off, **quiet, **values}))
    installer = install.Installer(report)
    try:
        for name in modules:
            module: Any = importlib.import_module(name)
            if name == "omlx.scheduler" and scheduler is not None:
                module = types.ModuleType(name)
                module.Scheduler = scheduler  # type: ignore[attr-defined]
            installer.on_import(module)
        bad = [v for v in report.verdicts if v.state is install.State.FAILED]
        assert not bad, bad
        yield installer
    finally:
        installer.undo()


@contextmanager
def cores(monkeypatch: Any, **values: Any) -> Iterator[type]:
    """Like `installed`, round engines whose cores are oMLX's and whose schedulers are ours."""
    import omlx.engine_core
    import omlx.scheduler

    fake = fake_scheduler(omlx.scheduler)
    monkeypatch.setattr(omlx.engine_core, "Scheduler", fake)
    modules = ("scheduler", "engine_pool", "engine_core", "engine.batched", "engine.vlm")
    with installed(*(f"omlx.{name}" for name in modules), scheduler=fake, **values):
        yield fake


class Bench:
    """Engines with fake schedulers, the turn on."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.cores: list[Any] = []

    def core(self, name: str, *, budget_s: float = 0.0) -> Any:
        """An engine core; one step a burst unless a budget is given."""
        config = self.module.EngineConfig(model_name=f"/models/{name}")
        config.decode_burst_budget_s = config.decode_burst_budget_single_s = budget_s
        core = self.module.EngineCore(Model(), Model(), config)
        self.cores.append(core)
        return core

    async def generate(self, core: Any, tokens: int = 3) -> Any:
        """One request from beginning to end."""
        from omlx.request import SamplingParams

        return await core.generate([1, 2], SamplingParams(max_tokens=tokens))

    def ask(self, core: Any, tokens: int = 3) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(self.generate(core, tokens))

    async def aclose(self) -> None:
        """Close all engines, and see that the turn is free."""
        for core in self.cores:
            if not core._closed:
                await core.stop()
                core.close()
        if gpu_turn.current is not None:
            state = gpu_turn.current.snapshot()
            assert (state.holder, state.waiting) == (None, ())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bench]:
    values = getattr(request, "param", {"serialize_engine_gpu": True})
    with cores(monkeypatch, **values):
        yield Bench(sys.modules["omlx.engine_core"])


def a_request(tokens: int = 100) -> Any:
    from omlx.request import Request, SamplingParams

    return Request("r", "x", SamplingParams(max_tokens=tokens))


def fail(error: str | Exception = "of the work") -> Callable[[], None]:
    def step() -> None:
        raise RuntimeError(error) if isinstance(error, str) else error

    return step
