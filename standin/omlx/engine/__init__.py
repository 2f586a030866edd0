"""The engine kinds."""

from .base import BaseEngine
from .batched import BatchedEngine
from .embedding import EmbeddingEngine
from .reranker import RerankerEngine

__all__ = ["BaseEngine", "BatchedEngine", "EmbeddingEngine", "RerankerEngine"]
