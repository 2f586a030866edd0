"""One model's loop: bursts of scheduler steps on a thread of its own.

Loads, embeddings and cache clears of all models share one more thread, the
global executor (``mlx-global``); a text model's steps never run there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .exceptions import PrefillMemoryAbortedError, PrefillMemoryExceededError
from .request import Request, RequestOutput, SamplingParams
from .scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from .utils.fatal import FATAL_TEARDOWN_TIMEOUT_S, fatal_exit
from .utils.metal_sync import _sync_and_clear_cache

logger = logging.getLogger(__name__)

_global_mlx_executor: concurrent.futures.ThreadPoolExecutor | None = None

#: Threads of closed engines. A thread that ran compiled MLX functions must not
#: end before the process does, and there is no way to clear its cache here.
_immortal_mlx_executors: list[concurrent.futures.ThreadPoolExecutor] = []
_immortal_mlx_streams: list[Any] = []

#: Seconds a finished request may stay unread before its mailbox is dropped.
_ORPHAN_GRACE_S = 5.0


def _init_mlx_thread() -> None:
    """Give the global thread a default stream of its own."""
    stream = mx.new_thread_local_stream(mx.default_device())
    logger.debug("the global MLX thread uses %s", stream)


def get_mlx_executor() -> concurrent.futures.ThreadPoolExecutor:
    """The one thread that all loads, embeddings and cache clears share."""
    global _global_mlx_executor
    if _global_mlx_executor is None:
        _global_mlx_executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="mlx-global", initializer=_init_mlx_thread
        )
    return _global_mlx_executor


def _final_engine_thread_reclaim(stream: Any) -> None:
    gc.collect()
    _sync_and_clear_cache(stream)


def _raise_request_output_error(output: RequestOutput) -> None:
    details = output.error_metadata or {}
    kinds = {
        "prefill_memory_exceeded": PrefillMemoryExceededError,
        "prefill_memory_aborted": PrefillMemoryAbortedError,
    }
    kind = kinds.get(output.error_code or "")
    if kind is None:
        raise RuntimeError(output.error)
    raise kind(
        output.error or "",
        request_id=details.get("request_id") or output.request_id,
        estimated_bytes=details.get("estimated_bytes"),
        limit_bytes=details.get("limit_bytes"),
    )


def _number(name: str, default: str) -> float:
    return float(os.environ.get(name, default))


@dataclass
class EngineConfig:
    """How one engine runs; budgets and intervals in seconds."""

    model_name: str = ""
    scheduler_config: SchedulerConfig | None = None
    step_interval: float = 0.05
    stream_interval: int = 1
    prefill_eviction_callback: Callable[[Any], Awaitable[bool]] | None = None
    decode_burst_max_steps: int = field(
        default_factory=lambda: int(_number("OMLX_DECODE_BURST_MAX_STEPS", "64"))
    )
    decode_burst_budget_single_s: float = field(
        default_factory=lambda: _number("OMLX_DECODE_BURST_BUDGET_SINGLE_S", "0.1")
    )
    decode_burst_budget_s: float = field(
        default_factory=lambda: _number("OMLX_DECODE_BURST_BUDGET_S", "0.03")
    )


class RequestOutputCollector:
    """The mailbox of one reader: a slow one gets several tokens merged into one output."""

    def __init__(self, aggregate: bool = True):
        self.output: RequestOutput | None = None
        self.ready = asyncio.Event()
        self.aggregate = aggregate

    def put(self, output: RequestOutput) -> None:
        """Add an output; called on the event loop only."""
        held = self.output
        if held is not None and self.aggregate:
            output.new_token_ids = held.new_token_ids + output.new_token_ids
            output.new_text = held.new_text + output.new_text
            output.generated_at = held.generated_at or output.generated_at
        self.output = output
        self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        output, self.output = self.output, None
        self.ready.clear()
        return output

    async def get(self) -> RequestOutput:
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def clear(self) -> None:
        self.output = None
        self.ready.clear()


class EngineCore:
    """Loop, thread, stream and mailboxes of one model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig | None = None,
        engine_id: str | None = None,
        force_model_ownership: bool = True,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self._engine_id = engine_id or str(uuid.uuid4())
        self._closed = False
        self._mlx_stream = mx.new_thread_local_stream(mx.default_device())
        self._mlx_executor: concurrent.futures.ThreadPoolExecutor | None = (
            concurrent.futures.ThreadPoolExecutor(
                max_workers=1, thread_name_prefix=f"mlx-engine-{self._engine_id[:8]}"
            )
        )
        self.scheduler: Any = Scheduler(
            model, tokenizer, self.config.scheduler_config, stream=self._mlx_stream
        )
        self._output_collectors: dict[str, RequestOutputCollector] = {}
        self._finished_events: dict[str, asyncio.Event] = {}
        self._finished_at: dict[str, float] = {}
        self._last_reap = 0.0
        self._running = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_event: asyncio.Event | None = None
        self._steps_executed = 0

    @property
    def engine_id(self) -> str:
        return self._engine_id

    async def start(self) -> None:
        if self._running:
            return
        self._loop = asyncio.get_running_loop()
        self._wake_event = asyncio.Event()
        self._running = True
        self._task = asyncio.create_task(self._engine_loop())

    async def stop(self) -> None:
        """End the loop. A burst already on the thread runs to its end there."""
        self._running = False
        self._wake_engine_loop()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._wake_event = None
        self._loop = None

    def _wake_engine_loop(self) -> None:
        if self._wake_event is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake_event.set)

    def _step_burst(self) -> list[SchedulerOutput]:
        """Several steps in one hop to the thread, within a time budget."""
        outputs = [self.scheduler.step()]
        alone = len(self.scheduler.running) <= 1
        config = self.config
        budget = config.decode_burst_budget_single_s if alone else config.decode_burst_budget_s
        if budget <= 0:
            return outputs
        deadline = time.monotonic() + budget
        while len(outputs) < config.decode_burst_max_steps:
            last = outputs[-1]
            if not last.has_work or last.prefill_eviction_request is not None:
                break
            if not self.scheduler.has_requests() or time.monotonic() >= deadline:
                break
            outputs.append(self.scheduler.step())
        return outputs

    async def _engine_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            try:
                now = time.monotonic()
                if now - self._last_reap >= 1.0:
                    self._last_reap = now
                    self._reap_orphaned_collectors(now)
                if not self.scheduler.has_requests():
                    await self._sleep(recheck=True)
                    continue
                outputs = await loop.run_in_executor(self._mlx_executor, self._step_burst)
                self._steps_executed += len(outputs)
                if self._distribute(outputs):
                    await asyncio.sleep(0)
                wanted = next(
                    (o.prefill_eviction_request for o in outputs if o.prefill_eviction_request),
                    None,
                )
                if wanted is not None:
                    # No request of this engine advances while the pool evicts.
                    if self.config.prefill_eviction_callback is not None:
                        await self.config.prefill_eviction_callback(wanted)
                elif not outputs[-1].has_work:
                    await self._sleep(recheck=False)
            except asyncio.CancelledError:
                break
            except Exception as error:
                logger.exception("a step of engine %s failed", self._engine_id)
                failed = await loop.run_in_executor(
                    self._mlx_executor, self.scheduler.fail_all_requests
                )
                for request_id in failed:
                    self._deliver_error(request_id, str(error), "error")
                await asyncio.sleep(0.1)

    async def _sleep(self, *, recheck: bool) -> None:
        event = self._wake_event
        if event is None:
            await asyncio.sleep(self.config.step_interval)
            return
        event.clear()
        if recheck and self.scheduler.has_requests():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), timeout=self.config.step_interval)

    def _distribute(self, outputs: list[SchedulerOutput]) -> bool:
        any_output = False
        for step in outputs:
            for output in step.outputs:
                any_output = True
                collector = self._output_collectors.get(output.request_id)
                if collector is not None:
                    collector.put(output)
                if output.finished:
                    self._mark_request_finished(output.request_id)
        return any_output

    async def add_request(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Queue a prompt; returns its id. Waits for the burst in progress.

        Real engines take a score of further options here; they are ignored.
        """
        request_id = request_id or str(uuid.uuid4())
        request = Request(request_id, prompt, sampling_params or SamplingParams())
        self._output_collectors[request_id] = RequestOutputCollector(aggregate=True)
        self._finished_events[request_id] = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._mlx_executor, self.scheduler.add_request, request)
        except BaseException:
            if self.scheduler is not None:
                self.scheduler.abort_request(request_id)
            self._cleanup_request(request_id)
            raise
        self._wake_engine_loop()
        return request_id

    async def abort_request(self, request_id: str) -> bool:
        """End one request; its reader gets an error output."""
        if self._closed or self.scheduler is None:
            return False
        known = bool(self.scheduler.abort_request(request_id))
        self._deliver_error(request_id, "Request aborted", "abort")
        self._wake_engine_loop()
        return known

    async def abort_all_requests(
        self, *, reason: str | None = None, error_code: str | None = None
    ) -> int:
        """End every live request; returns how many. No reason means memory pressure."""
        live = [
            request_id
            for request_id in self._output_collectors
            if request_id not in self._finished_at
        ]
        text = reason or "the process passed its memory limit"
        for request_id in live:
            self.scheduler.abort_request(request_id)
            self._deliver_error(
                request_id,
                text,
                "error",
                code=error_code or "prefill_memory_aborted",
                new_text=f"\n\n[Error: {text}]",
            )
        if live:
            self._wake_engine_loop()
        return len(live)

    def _deliver_error(
        self,
        request_id: str,
        error: str,
        finish_reason: str,
        *,
        code: str | None = None,
        new_text: str = "",
    ) -> None:
        collector = self._output_collectors.get(request_id)
        if collector is not None:
            collector.put(
                RequestOutput(
                    request_id=request_id,
                    new_text=new_text,
                    finished=True,
                    finish_reason=finish_reason,
                    error=error,
                    error_code=code,
                )
            )
        self._mark_request_finished(request_id)

    def _mark_request_finished(self, request_id: str) -> None:
        self._finished_at.setdefault(request_id, time.monotonic())
        event = self._finished_events.get(request_id)
        if event is not None:
            event.set()

    def _reap_orphaned_collectors(self, now: float, grace: float = _ORPHAN_GRACE_S) -> int:
        """Drop mailboxes nobody read for ``grace`` seconds."""
        stale = [rid for rid, since in self._finished_at.items() if now - since >= grace]
        for request_id in stale:
            self._output_collectors.pop(request_id, None)
            self._finished_events.pop(request_id, None)
            self._finished_at.pop(request_id, None)
        return len(stale)

    def _cleanup_request(self, request_id: str) -> None:
        collector = self._output_collectors.pop(request_id, None)
        if collector is not None:
            collector.clear()
        self._finished_events.pop(request_id, None)
        self._finished_at.pop(request_id, None)

    async def stream_outputs(
        self, request_id: str, timeout: float | None = None
    ) -> AsyncIterator[RequestOutput]:
        collector = self._output_collectors.get(request_id)
        if collector is None:
            return
        try:
            while True:
                output = collector.get_nowait() or await asyncio.wait_for(
                    collector.get(), timeout
                )
                yield output
                if output.error:
                    _raise_request_output_error(output)
                if output.finished:
                    return
        finally:
            self._cleanup_request(request_id)

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> RequestOutput:
        request_id = await self.add_request(prompt, sampling_params, request_id, **kwargs)
        event = self._finished_events[request_id]
        collector = self._output_collectors[request_id]
        try:
            await event.wait()
        except asyncio.CancelledError:
            await self.abort_request(request_id)
            self._cleanup_request(request_id)
            raise
        output = collector.get_nowait()
        self._cleanup_request(request_id)
        if output is None:
            raise RuntimeError(f"request {request_id} finished without output")
        if output.error:
            _raise_request_output_error(output)
        return output

    def close(self) -> None:
        """Tear down on the engine's thread, blocking the caller until done.

        The caller is the event loop. A step that does not end in
        FATAL_TEARDOWN_TIMEOUT_S seconds ends the process.
        """
        if self._closed:
            return
        self._closed = True
        self._on_thread(self.scheduler.shutdown)
        self._on_thread(self.scheduler.deep_reset)
        for collector in self._output_collectors.values():
            collector.clear()
        self._output_collectors.clear()
        self._finished_events.clear()
        self._finished_at.clear()
        self.model = None
        self.tokenizer = None
        self.scheduler = None
        self._on_thread(_final_engine_thread_reclaim, self._mlx_stream)
        if self._mlx_executor is not None:
            _immortal_mlx_executors.append(self._mlx_executor)
            _immortal_mlx_streams.append(self._mlx_stream)
            self._mlx_executor = None

    def _on_thread(self, call: Callable[..., Any], *args: Any) -> None:
        if self._mlx_executor is None:
            return
        try:
            self._mlx_executor.submit(call, *args).result(timeout=FATAL_TEARDOWN_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            fatal_exit(f"engine {self._engine_id}: {call.__name__} did not end")
        except Exception:
            logger.warning("engine %s: %s failed", self._engine_id, call, exc_info=True)


class AsyncEngineCore:
    """The handle that engines hold; the core is ``.engine``."""

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig | None = None):
        self.engine = EngineCore(model, tokenizer, config)

    @property
    def _mlx_executor(self) -> concurrent.futures.ThreadPoolExecutor | None:
        return self.engine._mlx_executor

    async def stop(self) -> None:
        await self.engine.stop()

    async def add_request(self, *args: Any, **kwargs: Any) -> str:
        return await self.engine.add_request(*args, **kwargs)

    async def abort_request(self, request_id: str) -> bool:
        return await self.engine.abort_request(request_id)

    async def abort_all_requests(
        self, *, reason: str | None = None, error_code: str | None = None
    ) -> int:
        return await self.engine.abort_all_requests(reason=reason, error_code=error_code)

    async def stream_outputs(
        self, request_id: str, timeout: float | None = None
    ) -> AsyncIterator[RequestOutput]:
        async for output in self.engine.stream_outputs(request_id, timeout):
            yield output

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        **kwargs: Any,
    ) -> RequestOutput:
        return await self.engine.generate(prompt, sampling_params, **kwargs)
