# SPDX-License-Identifier: Apache-2.0
"""A process whose GPU submissions the driver ignores leaves with status 70."""

import asyncio
import inspect
import sys
import threading
from types import ModuleType
from unittest.mock import MagicMock, patch

import pytest

from omlx import engine_core
from omlx.engine.vlm import VLMBatchedEngine
from omlx.engine_core import EngineCore, get_mlx_executor
from omlx.request import Request, SamplingParams
from omlx.scheduler import Scheduler, SchedulerConfig
from omlx.utils import fatal, metal_sync

IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU "
    "errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
HANG = (
    "[METAL] Command buffer execution failed: Caused GPU Hang Error "
    "(00000003:kIOGPUCommandBufferCallbackErrorHang)"
)


class Left(BaseException):
    """Stands for the end of the process; nothing may handle it."""


@pytest.fixture(autouse=True)
def left(monkeypatch):
    """The exit statuses that were asked for."""
    codes = []

    def leave(code):
        codes.append(code)
        raise Left

    monkeypatch.setattr(fatal.os, "_exit", leave)
    monkeypatch.setattr(fatal.faulthandler, "dump_traceback", lambda **_: None)
    return codes


def _raised(error, *, cause=None, context=None, hidden=False):
    try:
        try:
            raise context or KeyError("unrelated")
        except Exception:
            if cause is not None or hidden:
                raise error from cause
            raise error  # noqa: B904
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(IGNORED),
        RuntimeError("ANE kernel command buffer failed: ...ErrorSubmissionsIgnored"),
        _raised(ValueError("prefill failed"), cause=RuntimeError(IGNORED)),
        _raised(ValueError("clean-up failed"), context=RuntimeError(IGNORED)),
    ],
)
def test_it_leaves_with_status_70(error, left):
    with pytest.raises(Left):
        fatal.exit_if_gpu_submissions_ignored(error)
    assert left == [fatal.FATAL_EXIT_CODE] == [70]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(HANG),
        RuntimeError("There is no Stream(gpu, 0) in current thread"),
        RuntimeError(f"cannot parse the prompt: {IGNORED}"),  # it quotes somebody
        ValueError(IGNORED),  # MLX raises RuntimeError
        _raised(ValueError("later"), cause=KeyError("x"), context=RuntimeError(IGNORED)),
        _raised(ValueError("later"), context=RuntimeError(IGNORED), hidden=True),
    ],
)
def test_it_stays_for_everything_else(error, left):
    fatal.exit_if_gpu_submissions_ignored(error)
    assert left == []


def test_a_chain_that_bites_its_tail_ends(left):
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    fatal.exit_if_gpu_submissions_ignored(one)
    assert left == []


def _fail(text):
    raise RuntimeError(text)


def test_work_on_the_shared_thread_that_meets_it_leaves(left):
    with pytest.raises(Left):
        get_mlx_executor().submit(_fail, IGNORED).result(20)
    assert left == [70]


def _fail_for_another_reason(text):
    raise ValueError("the batch is broken") from RuntimeError(text)


def test_work_on_the_shared_thread_that_hides_it_leaves(left):
    with pytest.raises(Left):
        get_mlx_executor().submit(_fail_for_another_reason, IGNORED).result(20)
    assert left == [70]


def test_other_work_on_the_shared_thread_is_as_ever(left):
    executor = get_mlx_executor()
    assert executor.submit(lambda a, *, b: a + b, 1, b=2).result(20) == 3
    with pytest.raises(RuntimeError, match="Caused GPU Hang"):
        executor.submit(_fail, HANG).result(20)
    with pytest.raises(ValueError, match="the batch is broken"):
        executor.submit(_fail_for_another_reason, HANG).result(20)
    assert left == []


def test_work_on_an_engines_thread_that_meets_it_leaves(left):
    with patch.object(engine_core, "Scheduler"):
        core = EngineCore(MagicMock(), MagicMock())
    try:
        with pytest.raises(Left):
            core._mlx_executor.submit(_fail, IGNORED).result(20)
    finally:
        core._mlx_executor.shutdown()
    assert left == [70]


def test_a_cache_clear_that_swallows_errors_does_not_swallow_this(monkeypatch, left):
    text = ["There is no Stream(gpu, 0) in current thread"]

    def synchronize(*stream):
        if stream:
            raise RuntimeError(text[0])

    monkeypatch.setattr(metal_sync.mx, "synchronize", synchronize)
    metal_sync._sync_and_clear_cache(object())
    assert left == []
    text[0] = IGNORED
    with pytest.raises(Left):
        metal_sync._sync_and_clear_cache(object())
    assert left == [70]


# --- handlers of the scheduler that keep only the error's text --------------------


def _scheduler(chunked):
    tokenizer = MagicMock()
    tokenizer.eos_token_id = 2
    model = MagicMock()
    model.layers = []
    config = SchedulerConfig(
        max_num_seqs=8,
        prefill_step_size=4,
        chunked_prefill=chunked,
        paged_cache_block_size=0,
    )
    scheduler = Scheduler(model=model, tokenizer=tokenizer, config=config)
    scheduler.batch_generator = MagicMock()
    scheduler._current_sampler_params = ()
    return scheduler


def _request(tokens):
    request = Request(
        request_id="r",
        prompt=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=4),
    )
    request.prompt_token_ids = list(range(tokens))
    request.num_prompt_tokens = tokens
    request.remaining_tokens = list(range(tokens))
    return request


@pytest.mark.parametrize(
    ("chunked", "fails"),
    [(True, "_step_prefill_chunk"), (False, "_do_external_prefill")],
)
def test_a_prefill_that_meets_it_leaves(chunked, fails, left):
    scheduler = _scheduler(chunked)
    request = _request(10)
    scheduler.waiting.append(request)
    scheduler.requests["r"] = request
    with (
        patch.object(scheduler, "_begin_prefill", return_value=MagicMock()),
        patch.object(scheduler, fails, side_effect=RuntimeError(IGNORED)),
        pytest.raises(Left),
    ):
        scheduler._schedule_waiting()
    assert left == [70]


def test_a_later_chunk_that_meets_it_leaves(left):
    scheduler = _scheduler(True)
    request = _request(10)
    scheduler.prefilling.append(request)
    scheduler._prefill_states["r"] = MagicMock()
    with (
        patch.object(scheduler, "_step_prefill_chunk", side_effect=RuntimeError(IGNORED)),
        pytest.raises(Left),
    ):
        scheduler._advance_chunked_prefills([], [])
    assert left == [70]


def test_clean_up_after_an_error_that_meets_it_leaves(left):
    scheduler = _scheduler(False)
    with (
        patch("omlx.scheduler._sync_and_clear_cache", side_effect=RuntimeError(IGNORED)),
        pytest.raises(Left),
    ):
        scheduler.fail_all_requests()
    assert left == [70]


# --- handlers that hand the error to a reader -------------------------------------


async def _diffuse(text):
    engine = VLMBatchedEngine.__new__(VLMBatchedEngine)
    engine._diffusion_lock = asyncio.Lock()
    engine._diffusion_active_requests = 0
    engine._diffusion_cancel_events = set()
    engine._iter_diffusion_outputs_sync = lambda *_, **__: _fail(text)
    async for _ in engine._stream_diffusion_inputs({}, max_tokens=1, temperature=0.0):
        raise AssertionError("there is nothing to read")


@pytest.mark.asyncio
async def test_a_diffusion_that_meets_it_leaves(left):
    with pytest.raises(Left):
        await _diffuse(IGNORED)
    assert left == [70]


@pytest.mark.asyncio
async def test_another_error_of_a_diffusion_goes_to_its_reader(left):
    with pytest.raises(RuntimeError, match="Caused GPU Hang"):
        await _diffuse(HANG)
    assert left == []


def _stream_with_dflash(monkeypatch, text):
    dflash = pytest.importorskip("omlx.engine.dflash")
    for name in ("dflash_mlx", "dflash_mlx.engine", "dflash_mlx.engine.events"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    events = sys.modules["dflash_mlx.engine.events"]
    events.SummaryEvent = events.TokenEvent = object
    engine = MagicMock()
    engine._stream_dflash_events.side_effect = RuntimeError(text)
    run = dflash.DFlashEngine._run_generate_streaming
    arguments = dict.fromkeys(inspect.signature(run).parameters)
    queue = MagicMock()
    arguments.update(self=engine, queue=queue, stop_event=threading.Event())
    with patch.object(dflash.asyncio, "run_coroutine_threadsafe"):
        run(**arguments)
    return str(queue.put.call_args_list)


def test_a_stream_of_dflash_that_meets_it_leaves(monkeypatch, left):
    with pytest.raises(Left):
        _stream_with_dflash(monkeypatch, IGNORED)
    assert left == [70]


def test_another_error_of_dflash_goes_to_its_reader(monkeypatch, left):
    assert "Caused GPU Hang" in _stream_with_dflash(monkeypatch, HANG)
    assert left == []
