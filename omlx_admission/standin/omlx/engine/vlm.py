"""Vision models. Served as text models here; the class is what the pool asks about."""

from __future__ import annotations

from typing import Any

from ..utils.model_loading import materialize_lazy_state
from .text import TextEngine


class VLMBatchedEngine(TextEngine):
    """A vision model, which ``force_lm`` reloads as a plain text model."""

    # On this class itself, as in oMLX, for whoever wraps them here.
    async def start(self) -> None:
        """Load the model on the global thread and start the loop."""

        def _load_vlm_sync() -> tuple[Any, Any]:
            from mlx_lm import load

            model, tokenizer = load(self._model_name)
            return model, tokenizer

        await self._start(_load_vlm_sync, materialize_lazy_state)

    async def stop(self) -> None:
        """End the loop and tear the core down, blocking the event loop meanwhile."""
        await super().stop()
