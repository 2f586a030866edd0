"""One engine's queue and its decode steps.

Everything here but ``add_request`` and ``abort_request`` runs on the engine's
own thread. A step gives each running request one token; the token after it is
already submitted when the step returns, as mlx-lm's batch generator does.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .decode_activity import get_decode_activity
from .exceptions import PrefillMemoryExceededError, SchedulerQueueFullError
from .request import Request, RequestOutput, RequestStatus
from .utils.metal_sync import _sync_and_clear_cache
from .utils.proc_memory import get_phys_footprint

logger = logging.getLogger(__name__)


@dataclass
class SchedulerConfig:
    """Limits and sizes. One instance is shared by the pool and overwritten per load."""

    max_num_seqs: int = 256
    embedding_batch_size: int = 32
    prefill_step_size: int = 2048
    chunked_prefill: bool = False
    decode_fairness: bool = True
    model_name: str = ""
    model_path: str = ""


@dataclass
class PrefillEvictionRequest:
    """A prompt that fits only if the pool evicts something first."""

    request_id: str
    target_cap_bytes: int
    predicted_transient_bytes: int


@dataclass
class SchedulerOutput:
    """What one step did; ``has_work`` False lets the loop sleep."""

    scheduled_request_ids: list[str] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    finished_request_ids: set[str] = field(default_factory=set)
    outputs: list[RequestOutput] = field(default_factory=list)
    prefill_eviction_request: PrefillEvictionRequest | None = None
    has_work: bool = False


class Scheduler:
    """Queue, admission and decode of one model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: SchedulerConfig | None = None,
        stream: Any = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or SchedulerConfig()
        self._stream = stream
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._sequences: dict[str, Sequence] = {}
        self.prefilling: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._pending_abort_ids: set[str] = set()
        self._abort_lock = threading.Lock()
        self._decode_activity_key = f"{self.config.model_name}:{id(self):x}"
        # Written by the memory enforcer, in bytes; 0 is no limit.
        self._memory_limit_bytes = 0
        self._memory_hard_limit_bytes = 0
        self._memory_hard_watermark_bytes = 0
        self._prefill_memory_guard = True
        self._admission_paused = False
        self._last_mlx_active_memory_bytes = 0
        self._kv_bytes_per_token = 0

    # -- from the event loop ------------------------------------------------

    def abort_request(self, request_id: str) -> bool:
        """Mark for removal at the start of the next step; True if it is known."""
        with self._abort_lock:
            self._pending_abort_ids.add(request_id)
        return request_id in self.requests

    def has_requests(self) -> bool:
        return bool(self.waiting or self.running or self.prefilling or self._pending_abort_ids)

    def preflight_eviction_request(
        self,
        *,
        num_prompt_tokens: int,
        cached_tokens: int = 0,
        request_id: str | None = None,
    ) -> PrefillEvictionRequest | None:
        """What would have to be freed for this prompt; None when it fits."""
        limit = self._memory_hard_limit_bytes
        if limit <= 0 or not self._prefill_memory_guard:
            return None
        predicted = (num_prompt_tokens - cached_tokens) * self._token_bytes()
        usage = self._current_usage_bytes(refresh_mlx_active=False)
        if usage + predicted <= limit:
            return None
        return PrefillEvictionRequest(request_id or "preflight", limit, predicted)

    def preflight_or_raise(
        self,
        *,
        num_prompt_tokens: int,
        cached_tokens: int = 0,
        request_id: str | None = None,
    ) -> None:
        """Raise PrefillMemoryExceededError for a prompt that does not fit."""
        needed = self.preflight_eviction_request(
            num_prompt_tokens=num_prompt_tokens,
            cached_tokens=cached_tokens,
            request_id=request_id,
        )
        if needed is not None:
            usage = self._current_usage_bytes(refresh_mlx_active=False)
            estimated = usage + needed.predicted_transient_bytes
            raise PrefillMemoryExceededError(
                f"a prompt of {num_prompt_tokens} tokens needs about {estimated} bytes",
                request_id=request_id,
                estimated_bytes=estimated,
                limit_bytes=needed.target_cap_bytes,
            )

    def has_pending_route_preflight_cleanup(self) -> bool:
        """Whether memory of finished requests is still on its way out (never here)."""
        return False

    # -- on the engine's thread ---------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request; raises SchedulerQueueFullError at the depth limit."""
        limit = max(self.config.max_num_seqs * 4, 32)
        if len(self.waiting) >= limit:
            raise SchedulerQueueFullError(current_depth=len(self.waiting), max_depth=limit)
        if request.prompt_token_ids is None:
            prompt = request.prompt
            request.prompt_token_ids = list(
                self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            )
        request.num_prompt_tokens = len(request.prompt_token_ids)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def step(self) -> SchedulerOutput:
        """Admit what may start, then one token for each running request."""
        output = SchedulerOutput()
        get_decode_activity().publish(self._decode_activity_key, len(self.running))
        self._drop_aborted()
        self._admit(output)
        if self.running:
            output.has_work = True
            for request_id in list(self.running):
                result = self._sequences[request_id].advance()
                output.outputs.append(result)
                if result.finished:
                    output.finished_request_ids.add(request_id)
                    self._forget(request_id)
            self._last_mlx_active_memory_bytes = mx.get_active_memory()
        return output

    def fail_all_requests(self) -> list[str]:
        """Drop everything after an error in a step; returns the ids dropped."""
        failed = list(self.requests)
        self._clear()
        _sync_and_clear_cache(self._stream)
        return failed

    def _current_usage_bytes(self, *, refresh_mlx_active: bool = True) -> int:
        if refresh_mlx_active:
            self.refresh_route_preflight_usage()
        return max(self._last_mlx_active_memory_bytes, get_phys_footprint())

    def refresh_route_preflight_usage(self) -> None:
        self._last_mlx_active_memory_bytes = mx.get_active_memory()

    def _reclaim_prefill_headroom(self) -> None:
        """Give cached buffers back before a prompt is judged too large."""
        _sync_and_clear_cache(self._stream)
        self.refresh_route_preflight_usage()

    def reset(self) -> None:
        """Drop all requests and leave the activity registry."""
        get_decode_activity().remove(self._decode_activity_key)
        self._clear()

    def shutdown(self) -> None:
        self.reset()

    def deep_reset(self) -> None:
        """Second part of a teardown: nothing may keep the weights alive."""
        self.reset()
        self.model = None
        self.tokenizer = None
        gc.collect()

    # -- internals ----------------------------------------------------------

    def _admit(self, output: SchedulerOutput) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            # Under pressure nothing may join, but an empty engine takes one: it
            # could otherwise never finish the work that would end the pressure.
            if self._admission_paused and self.running:
                return
            request = self.waiting[0]
            needed = self.preflight_eviction_request(
                num_prompt_tokens=request.num_prompt_tokens, request_id=request.request_id
            )
            if needed is not None and not request.eviction_tried:
                request.eviction_tried = True
                output.prefill_eviction_request = needed
                output.has_work = True
                return
            self.waiting.popleft()
            if needed is not None:
                output.outputs.append(self._rejection(request, needed))
                output.has_work = True
                self._forget(request.request_id)
                continue
            output.scheduled_request_ids.append(request.request_id)
            output.num_scheduled_tokens += request.num_prompt_tokens
            request.status = RequestStatus.RUNNING
            sequence = Sequence(self.model, self.tokenizer, request, self._stream)
            sequence.prefill(self.config.prefill_step_size, self._on_prompt_progress)
            self.running[request.request_id] = request
            self._sequences[request.request_id] = sequence
            self._kv_bytes_per_token = self._kv_bytes_per_token or sequence.bytes_per_token()

    def _on_prompt_progress(self, updates: list[tuple[int, int, int]]) -> None:
        """Told after each chunk of a prompt: (uid, processed, total)."""

    def _rejection(self, request: Request, needed: PrefillEvictionRequest) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            finished=True,
            finish_reason="error",
            error=f"the prompt needs about {needed.predicted_transient_bytes} bytes more",
            error_code="prefill_memory_exceeded",
            error_metadata={
                "request_id": request.request_id,
                "estimated_bytes": needed.predicted_transient_bytes,
                "limit_bytes": needed.target_cap_bytes,
            },
        )

    def _drop_aborted(self) -> None:
        with self._abort_lock:
            aborted, self._pending_abort_ids = self._pending_abort_ids, set()
        for request_id in aborted:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        self.running.pop(request_id, None)
        self._sequences.pop(request_id, None)
        if request is not None:
            request.status = RequestStatus.FINISHED
            with suppress(ValueError):
                self.waiting.remove(request)

    def _clear(self) -> None:
        self.waiting.clear()
        self.running.clear()
        self._sequences.clear()
        self.prefilling.clear()
        self.requests.clear()
        with self._abort_lock:
            self._pending_abort_ids.clear()

    def _token_bytes(self) -> int:
        # Before the first request nothing is known; a kilobyte is a tiny model's KV.
        return self._kv_bytes_per_token or 1024


class Sequence:
    """Prompt, KV cache and the token in flight; lives on the engine's thread."""

    def __init__(self, model: Any, tokenizer: Any, request: Request, stream: Any):
        self._model = model
        self._request = request
        self._stream = stream
        self._cache = make_prompt_cache(model)
        self._detokenizer = tokenizer.detokenizer
        self._eos = set(tokenizer.eos_token_ids)
        self._tokens = request.output_token_ids
        self._text = ""
        self._in_flight: mx.array | None = None
        self._first_token_at: float | None = None
        seed = request.sampling_params.seed
        self._seed = time.monotonic_ns() if seed is None else seed

    def prefill(
        self, chunk: int, progress: Callable[[list[tuple[int, int, int]]], None]
    ) -> None:
        """Run the prompt, ``chunk`` tokens at a time, and submit the first token."""
        tokens = self._request.prompt_token_ids or [0]
        for start in range(0, len(tokens) - 1, chunk):
            part = tokens[start : min(start + chunk, len(tokens) - 1)]
            with mx.stream(self._stream):
                self._model(mx.array([part]), cache=self._cache)
                mx.eval([layer.state for layer in self._cache])
            progress([(0, start + len(part), len(tokens))])
        self._submit(mx.array([tokens[-1]]))

    def advance(self) -> RequestOutput:
        """The token in flight, with the one after it submitted first."""
        token = self._in_flight
        assert token is not None
        self._submit(token)
        value = int(token.item())
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        stopped = value in self._eos
        new_text = "" if stopped else self._add(value)
        cut = self._stop_position()
        if cut is not None:
            new_text = new_text[: max(0, cut - len(self._text) + len(new_text))]
            self._text, stopped = self._text[:cut], True
        length = len(self._tokens) >= self._request.sampling_params.max_tokens
        if length and not stopped:
            # Bytes of an unfinished character are still held back.
            self._detokenizer.finalize()
            rest = str(self._detokenizer.last_segment)
            self._text += rest
            new_text += rest
        now = time.perf_counter()
        return RequestOutput(
            request_id=self._request.request_id,
            new_token_ids=[value],
            new_text=new_text,
            output_token_ids=list(self._tokens) if stopped or length else [],
            output_text=self._text,
            finished=stopped or length,
            finish_reason="stop" if stopped else "length" if length else None,
            prompt_tokens=self._request.num_prompt_tokens,
            completion_tokens=len(self._tokens),
            generated_at=now,
            generated_until=now,
            first_token_at=self._first_token_at,
        )

    def bytes_per_token(self) -> int:
        """KV bytes of one token, from this sequence's cache."""
        offset = max(1, int(self._cache[0].offset))
        arrays = [a for layer in self._cache for a in layer.state if isinstance(a, mx.array)]
        return sum(int(array.nbytes) for array in arrays) // offset

    def _submit(self, token: mx.array) -> None:
        params = self._request.sampling_params
        with mx.stream(self._stream):
            logits = self._model(token[None], cache=self._cache)[:, -1, :]
            if params.temperature <= 0:
                following = mx.argmax(logits, axis=-1)
            else:
                # A key per token: the global random state belongs to one thread.
                self._seed = (self._seed + 1) % (1 << 62)
                following = mx.random.categorical(
                    logits / params.temperature, key=mx.random.key(self._seed)
                )
            mx.async_eval(following)
        self._in_flight = following

    def _add(self, token: int) -> str:
        self._tokens.append(token)
        self._detokenizer.add_token(token)
        segment = str(self._detokenizer.last_segment)
        self._text += segment
        return segment

    def _stop_position(self) -> int | None:
        found = [self._text.find(stop) for stop in self._request.sampling_params.stop or []]
        hits = [position for position in found if position >= 0]
        return min(hits) if hits else None
