"""Embedding models."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import mlx.core as mx

from ..engine_core import get_mlx_executor
from ..models.embedding import EmbeddingOutput, MLXEmbeddingModel
from .base import BaseNonStreamingEngine


class EmbeddingEngine(BaseNonStreamingEngine):
    """An embedding model; every forward runs on the global thread."""

    def __init__(
        self,
        model_name: str,
        trust_remote_code: bool = False,
        batch_size: int | None = None,
        *,
        scheduler_config: Any | None = None,
    ):
        super().__init__()
        self._model_name = model_name
        self._trust_remote_code = trust_remote_code
        default = getattr(scheduler_config, "embedding_batch_size", 32)
        self._batch_size = max(1, int(batch_size or default))
        self._model: MLXEmbeddingModel | None = None

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def hidden_size(self) -> int | None:
        return self._model.hidden_size if self._model else None

    async def start(self) -> None:
        if self._model is not None:
            return
        self._model = MLXEmbeddingModel(self._model_name, self._trust_remote_code)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(get_mlx_executor(), self._model.load)

    async def stop(self) -> None:
        if self._model is None:
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(get_mlx_executor(), self._model.close)
        self._model = None
        gc.collect()

    async def embed(
        self,
        texts: list[str],
        max_length: int | None = None,
        padding: bool = True,
        truncation: bool = True,
    ) -> EmbeddingOutput:
        model = self._model
        if model is None:
            raise RuntimeError("the embedding engine is not started")
        loop = asyncio.get_running_loop()
        result = EmbeddingOutput(embeddings=[], total_tokens=0)
        activity = self._begin_activity("embedding", total_items=len(texts))
        try:
            for start in range(0, len(texts), self._batch_size):
                batch = texts[start : start + self._batch_size]

                def _embed_sync(batch: list[str] = batch) -> EmbeddingOutput:
                    try:
                        return model.embed(batch, max_length=max_length)
                    finally:
                        mx.synchronize()
                        mx.clear_cache()

                part = await loop.run_in_executor(get_mlx_executor(), _embed_sync)
                result.embeddings += part.embeddings
                result.total_tokens += part.total_tokens
                result.dimensions = part.dimensions
            return result
        finally:
            self._end_activity(activity)
