"""Loads on a thread of their own: what goes there, what stays, and what it leaves behind."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.patching.gate import find
from omlx_admission.hooks.pool import load_thread

from .gpu_rig import PATIENCE_S, Gate, installed
from .test_gpu_jobs import _jobs_of, _sources, as_if_of

CORE = "omlx.engine_core"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """oMLX's engine core, with a global executor of this test's own."""
    import omlx.engine_core as module

    monkeypatch.setattr(module, "_global_mlx_executor", None)
    return module


@pytest.fixture
def executor(module: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    values = getattr(request, "param", {})
    with installed(CORE, load_thread=True, **values):
        yield module.get_mlx_executor()


def where() -> str:
    return threading.current_thread().name.partition("_")[0]


def load(call: Callable[..., Any], name: str = "_load_model_sync") -> Callable[..., Any]:
    return as_if_of("omlx.engine.batched", name, lambda *a, **k: call(*a, **k))


@pytest.mark.parametrize("name", sorted(load_thread.LOADS))
def test_a_load_has_its_own_thread(executor: Any, name: str) -> None:
    job = load(lambda *a, **k: (where(), a, k), name)
    expected = ("mlx-load", (1,), {"b": 2})
    assert executor.submit(job, 1, b=2).result(PATIENCE_S) == expected
    assert executor.submit(functools.partial(job, 1), b=2).result(PATIENCE_S) == expected


@pytest.mark.parametrize(
    ("module_name", "name"),
    [
        ("omlx.engine.embedding", "_embed_sync"),
        ("omlx.models.embedding", "load"),
        ("omlx.models.reranker", "load"),
        ("omlx.engine.tts", "_load_sync"),
        ("omlx.engine.dflash", "_load_models"),
        ("somebody.else", "_load_model_sync"),
    ],
)
def test_what_is_used_where_it_was_loaded_stays(
    executor: Any, module_name: str, name: str
) -> None:
    job = as_if_of(module_name, name, lambda: where())
    assert executor.submit(job).result(PATIENCE_S) == "mlx-global"
    assert executor.submit(where).result(PATIENCE_S) == "mlx-global"


def test_the_global_thread_works_while_a_model_loads(executor: Any) -> None:
    gate = Gate()
    loading = executor.submit(load(gate))
    second = executor.submit(load(where))
    assert gate.reached.wait(PATIENCE_S)
    assert executor.submit(where).result(PATIENCE_S) == "mlx-global"
    assert not second.done()  # loads stay one at a time, in order
    gate.open()
    assert second.result(PATIENCE_S) == "mlx-load"
    assert loading.done()


def test_the_global_thread_starts_before_the_first_load(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it starts it replaces the stream that mlx-lm made at import, as in stock."""
    loaded = threading.Event()
    seen: list[tuple[str, bool]] = []

    def init() -> None:
        # The load has all the time it needs to come first, were it let.
        seen.append((where(), loaded.wait(0.1)))

    monkeypatch.setattr(module, "_init_mlx_thread", init)
    with installed(CORE, load_thread=True):
        module.get_mlx_executor().submit(load(loaded.set)).result(PATIENCE_S)
    assert seen == [("mlx-global", False)]
    assert loaded.is_set()


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import mlx.core as mx

    seen: list[str] = []
    stock = mx.synchronize

    def synchronize(*args: Any) -> None:
        seen.append(where())
        stock(*args)

    monkeypatch.setattr(mx, "synchronize", synchronize)
    return seen


def test_a_load_ends_when_its_work_has(executor: Any, synchronised: list[str]) -> None:
    executor.submit(load(lambda: synchronised.append("load"))).result(PATIENCE_S)
    assert synchronised == ["load", "mlx-load"]


def test_a_load_that_fails_is_drained_and_its_error_is_its_own(
    executor: Any, synchronised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise KeyError("of the load")

    with pytest.raises(KeyError, match="of the load"):
        executor.submit(load(fails)).result(PATIENCE_S)
    assert synchronised == ["mlx-load"]

    def broken() -> None:
        raise RuntimeError("of the GPU")

    monkeypatch.setattr(load_thread, "_tidy", broken)
    with pytest.raises(KeyError, match="of the load"):
        executor.submit(load(fails)).result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="of the GPU"):
        executor.submit(load(where)).result(PATIENCE_S)


def test_the_compile_cache_of_the_thread_is_cleared(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a load compiles would hold its weights for as long as the thread lives."""
    import sys
    import types

    cleared: list[str] = []
    stub: Any = types.ModuleType("omlx.utils.compile_cache")
    stub.clear_thread_compile_cache = lambda: cleared.append(where())
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    executor.submit(load(where)).result(PATIENCE_S)
    assert cleared == ["mlx-load"]


@pytest.mark.parametrize("executor", [{"serialize_engine_gpu": True}], indirect=True)
def test_turns_are_for_the_global_thread_as_before(executor: Any) -> None:
    turn = gpu_turn.current
    assert turn is not None
    speech = as_if_of("omlx.engine.sts", "_process_sync", lambda: (where(), turn.held()))
    assert executor.submit(speech).result(PATIENCE_S) == ("mlx-global", True)
    job = load(lambda: (where(), turn.held()))
    assert executor.submit(job).result(PATIENCE_S) == ("mlx-load", False)


def test_undone_loads_go_back(module: Any) -> None:
    with installed(CORE, load_thread=True):
        executor = module.get_mlx_executor()
        executor.submit(load(where)).result(PATIENCE_S)
    assert "submit" not in vars(executor)
    assert executor.submit(load(where)).result(PATIENCE_S) == "mlx-global"
    assert process.executors._route is None


def test_off_it_is_not_there(module: Any) -> None:
    with installed(CORE):
        executor = module.get_mlx_executor()
        assert "submit" not in vars(executor)


def test_every_job_of_such_a_load_is_known(pytestconfig: pytest.Config) -> None:
    """One that stayed behind would meet arrays that only the load thread may evaluate."""
    for source in _sources(pytestconfig):
        jobs = {
            name
            for (module_name, name) in _jobs_of(find(source).root)
            if module_name in ("batched", "vlm", "engine_pool")
            and (module_name, name) not in gpu_jobs.JOBS
            and name not in ("clear", "load")
        }
        assert jobs <= load_thread.LOADS, source


async def test_no_load_waits_for_itself(executor: Any) -> None:
    """The loop hands jobs over one after another and waits for each: so does a load."""
    loop = asyncio.get_running_loop()
    for name in ("_load_model_sync", "materialize_lazy_state"):
        assert await loop.run_in_executor(executor, load(where, name)) == "mlx-load"
