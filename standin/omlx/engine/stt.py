"""Speech recognition, and what the audio engines have in common; oMLX's use mlx-audio."""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine_core import get_mlx_executor
from ..models.embedding import MLXEmbeddingModel
from .base import BaseNonStreamingEngine


class AudioEngine(BaseNonStreamingEngine):
    """A model that answers one call at a time with something made up.

    The weights are those of a tiny encoder; what matters is where the work runs
    and that it counts as activity only from the call on.
    """

    def __init__(self, model_name: str, **kwargs: Any):
        super().__init__()
        self._model_name = model_name
        self._model: MLXEmbeddingModel | None = None

    @property
    def model_name(self) -> str:
        return self._model_name

    async def start(self) -> None:
        if self._model is None:
            self._model = MLXEmbeddingModel(self._model_name)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(get_mlx_executor(), self._model.load)

    async def stop(self) -> None:
        if self._model is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(get_mlx_executor(), self._model.close)
            self._model = None

    async def run(self, text: str) -> list[float]:
        """A vector for ``text``, computed on the global thread."""
        model = self._model
        if model is None:
            raise RuntimeError("the audio engine is not started")
        activity = self._begin_activity("audio")
        try:
            loop = asyncio.get_running_loop()
            output = await loop.run_in_executor(get_mlx_executor(), model.embed, [text])
            return output.embeddings[0]
        finally:
            await self._finish_activity(activity)


class STTEngine(AudioEngine):
    """A speech recognition model."""
