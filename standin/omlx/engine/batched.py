"""Text models, and what vision models have in common with them."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator
from typing import Any

from ..engine_core import AsyncEngineCore, EngineConfig, get_mlx_executor
from ..request import RequestOutput, SamplingParams
from ..scheduler import SchedulerConfig
from ..utils.model_loading import materialize_lazy_state
from .base import BaseEngine, GenerationOutput, _run_scheduler_preflight_with_cleanup_retry

logger = logging.getLogger(__name__)

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")


class TextEngine(BaseEngine):
    """What in oMLX each kind of text engine has for itself.

    An engine that was stopped starts itself again when someone still holding it
    generates: outside the pool's accounting, as oMLX's does (#2431).
    """

    def __init__(
        self,
        model_name: str,
        trust_remote_code: bool = False,
        scheduler_config: Any | None = None,
        stream_interval: int = 1,
        enable_thinking: bool | None = None,
        model_settings: Any | None = None,
        prefill_eviction_callback: Any | None = None,
    ):
        self._model_name = model_name
        self._trust_remote_code = trust_remote_code
        self._scheduler_config = scheduler_config
        self._stream_interval = stream_interval
        self._enable_thinking = enable_thinking
        self._model_settings = model_settings
        self._prefill_eviction_callback = prefill_eviction_callback
        self._model: Any = None
        self._tokenizer: Any = None
        self._engine: Any = None
        self._loaded = False

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def model_type(self) -> str | None:
        """``model_type`` of the model's config; None while not loaded."""
        return getattr(getattr(self._model, "args", None), "model_type", None)

    async def _begin(self) -> None:
        """Start the loop of the loaded model."""
        # A copy: the pool overwrites the shared one at the next load.
        config = copy.copy(self._scheduler_config) or SchedulerConfig()
        self._engine = AsyncEngineCore(
            self._model,
            self._tokenizer,
            EngineConfig(
                model_name=self._model_name,
                scheduler_config=config,
                stream_interval=self._stream_interval,
                prefill_eviction_callback=self._prefill_eviction_callback,
            ),
        )
        await self._engine.engine.start()
        self._loaded = True
        logger.info("loaded %s", self._model_name)

    async def stop(self) -> None:
        """End the loop and tear the core down, blocking the event loop meanwhile."""
        if self._engine is not None:
            await self._engine.stop()
            try:
                self._engine.engine.close()
            except Exception:
                logger.warning("closing %s failed", self._model_name, exc_info=True)
        self._engine = None
        self._model = None
        self._tokenizer = None
        self._loaded = False

    def _apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )

    def count_chat_tokens(self, messages: list[dict[str, Any]], **kwargs: Any) -> int:
        return len(self._tokenizer.encode(self._apply_chat_template(messages)))

    async def preflight_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise if the conversation cannot fit in memory."""
        if not self._loaded:
            await self.start()
        await self._preflight(self.count_chat_tokens(messages), request_id)

    async def preflight_completion(
        self, prompt: str, request_id: str | None = None, **kwargs: Any
    ) -> None:
        if not self._loaded:
            await self.start()
        await self._preflight(len(self._tokenizer.encode(prompt)), request_id)

    async def _preflight(self, tokens: int, request_id: str | None) -> None:
        raise NotImplementedError

    async def generate(self, prompt: str | list[int], **kwargs: Any) -> GenerationOutput:
        if not self._loaded:
            await self.start()
        output = await self._engine.generate(prompt, _sampling(kwargs))
        return _generation(output)

    async def stream_generate(
        self, prompt: str | list[int], **kwargs: Any
    ) -> AsyncIterator[GenerationOutput]:
        if not self._loaded:
            await self.start()
        engine = self._engine
        request_id = await engine.add_request(prompt, _sampling(kwargs))
        done = False
        try:
            async for output in engine.stream_outputs(request_id):
                done = output.finished
                yield _generation(output)
        finally:
            if not done:
                await engine.abort_request(request_id)

    async def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> GenerationOutput:
        if not self._loaded:
            await self.start()
        return await self.generate(self._apply_chat_template(messages), **kwargs)

    async def stream_chat(
        self, messages: list[dict[str, Any]], **kwargs: Any
    ) -> AsyncIterator[GenerationOutput]:
        if not self._loaded:
            await self.start()
        async for output in self.stream_generate(self._apply_chat_template(messages), **kwargs):
            yield output

    def has_active_requests(self) -> bool:
        """Whether any request has a mailbox: one still being tokenised has none."""
        core = getattr(self._engine, "engine", None)
        return bool(getattr(core, "_output_collectors", None))

    async def abort_all_requests(
        self, *, reason: str | None = None, error_code: str | None = None
    ) -> int:
        if self._engine is None:
            return 0
        return int(
            await self._engine.engine.abort_all_requests(reason=reason, error_code=error_code)
        )


class BatchedEngine(TextEngine):
    """A text model with its loop."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # In oMLX each class has these, and what follows, for itself.
        self._engine: Any = None
        self._loaded = False

    async def _preflight(self, tokens: int, request_id: str | None) -> None:
        scheduler = getattr(getattr(self._engine, "engine", None), "scheduler", None)
        if scheduler is not None:
            await self._preflight_or_raise_with_eviction(
                scheduler, num_prompt_tokens=tokens, request_id=request_id
            )

    async def _preflight_or_raise_with_eviction(
        self, scheduler: Any, *, num_prompt_tokens: int, request_id: str | None
    ) -> None:
        await _run_scheduler_preflight_with_cleanup_retry(
            scheduler,
            num_prompt_tokens=num_prompt_tokens,
            request_id=request_id,
            eviction_callback=self._prefill_eviction_callback,
            executor=getattr(getattr(self._engine, "engine", None), "_mlx_executor", None),
        )

    async def start(self) -> None:
        """Load the model on the global thread and start the loop."""
        if self._loaded:
            return

        def _load_model_sync() -> tuple[Any, Any]:
            from mlx_lm import load

            model, tokenizer = load(self._model_name)
            return model, tokenizer

        loop = asyncio.get_running_loop()
        self._model, self._tokenizer = await loop.run_in_executor(
            get_mlx_executor(), _load_model_sync
        )
        # The steps run on another thread, where nothing lazy of this one can be used.
        await loop.run_in_executor(get_mlx_executor(), materialize_lazy_state, self._model)
        await self._begin()

    async def stop(self) -> None:
        """End the loop and tear the core down, blocking the event loop meanwhile."""
        await super().stop()


def _sampling(options: dict[str, Any]) -> SamplingParams:
    given = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    return SamplingParams(**given)


def _generation(output: RequestOutput) -> GenerationOutput:
    return GenerationOutput(
        text=output.output_text,
        tokens=output.output_token_ids,
        prompt_tokens=output.prompt_tokens,
        completion_tokens=output.completion_tokens,
        finish_reason=output.finish_reason,
        new_text=output.new_text,
        finished=output.finished,
        cached_tokens=output.cached_tokens,
        generated_at=output.generated_at,
        generated_until=output.generated_until,
        first_token_at=output.first_token_at,
    )
