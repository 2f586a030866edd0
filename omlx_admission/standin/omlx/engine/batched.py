"""Text models."""

from __future__ import annotations

from typing import Any

from ..utils.model_loading import materialize_lazy_state
from .text import TextEngine


class BatchedEngine(TextEngine):
    """A text model with its loop."""

    # On this class itself, as in oMLX, for whoever wraps them here.
    async def start(self) -> None:
        """Load the model on the global thread and start the loop."""

        def _load_model_sync() -> tuple[Any, Any]:
            from mlx_lm import load

            model, tokenizer = load(self._model_name)
            return model, tokenizer

        await self._start(_load_model_sync, materialize_lazy_state)

    async def stop(self) -> None:
        """End the loop and tear the core down, blocking the event loop meanwhile."""
        await super().stop()
