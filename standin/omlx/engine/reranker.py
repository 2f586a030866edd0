"""Reranking models."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..engine_core import get_mlx_executor
from ..models.reranker import MLXRerankerModel
from .base import BaseNonStreamingEngine


@dataclass
class RerankOutput:
    """Scores by document, and document positions from best to worst."""

    scores: list[float]
    indices: list[int]
    total_tokens: int


class RerankerEngine(BaseNonStreamingEngine):
    """A reranking model; every forward runs on the global thread."""

    def __init__(self, model_name: str, trust_remote_code: bool = False, **kwargs: Any):
        super().__init__()
        self._model_name = model_name
        self._model: MLXRerankerModel | None = None

    @property
    def model_name(self) -> str:
        return self._model_name

    async def start(self) -> None:
        if self._model is None:
            self._model = MLXRerankerModel(self._model_name)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(get_mlx_executor(), self._model.load)

    async def stop(self) -> None:
        if self._model is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(get_mlx_executor(), self._model.close)
            self._model = None
            gc.collect()

    async def rerank(
        self,
        query: str,
        documents: list[Any],
        top_n: int | None = None,
        max_length: int | None = None,
    ) -> RerankOutput:
        """Score ``documents`` against ``query``; at most ``top_n`` positions come back."""
        model = self._model
        if model is None:
            raise RuntimeError("the reranker is not started")
        texts = [d if isinstance(d, str) else str(d.get("text", "")) for d in documents]
        activity = self._begin_activity("rerank", total_items=len(texts))

        def _rerank_sync() -> tuple[list[float], int]:
            try:
                return model.rerank(query, texts, max_length)
            finally:
                mx.synchronize()
                mx.clear_cache()

        try:
            loop = asyncio.get_running_loop()
            scores, tokens = await loop.run_in_executor(get_mlx_executor(), _rerank_sync)
        finally:
            await self._finish_activity(activity)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return RerankOutput(scores, order[:top_n], tokens)
