"""Text models."""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine_core import get_mlx_executor
from ..utils.model_loading import materialize_lazy_state
from .text import TextEngine


class BatchedEngine(TextEngine):
    """A text model with its loop."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # In oMLX each class has these, and what follows, for itself.
        self._engine: Any = None
        self._loaded = False

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
