"""Vision models. Served as text models here; the class is what the pool asks about."""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine_core import get_mlx_executor
from ..utils.model_loading import materialize_lazy_state
from .base import _run_scheduler_preflight_with_cleanup_retry
from .batched import TextEngine


class VLMBatchedEngine(TextEngine):
    """A vision model, which ``force_lm`` reloads as a plain text model."""

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

        def _load_vlm_sync() -> tuple[Any, Any]:
            from mlx_lm import load

            model, tokenizer = load(self._model_name)
            return model, tokenizer

        # Not by the loop's own method, by which `patches/` knows oMLX's vision code, which is
        # not here.
        thread = get_mlx_executor()
        loaded = asyncio.wrap_future(thread.submit(_load_vlm_sync))
        self._model, self._tokenizer = await loaded
        await asyncio.wrap_future(thread.submit(materialize_lazy_state, self._model))
        await self._begin()

    async def stop(self) -> None:
        """End the loop and tear the core down, blocking the event loop meanwhile."""
        await super().stop()
