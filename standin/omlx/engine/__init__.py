"""The engine kinds."""

from ..engine_core import AsyncEngineCore, EngineConfig, EngineCore
from .base import BaseEngine, BaseNonStreamingEngine, GenerationOutput
from .batched import BatchedEngine
from .embedding import EmbeddingEngine
from .reranker import RerankerEngine
from .sts import STSEngine
from .stt import STTEngine
from .tts import TTSEngine
from .vlm import VLMBatchedEngine

__all__ = [
    "AsyncEngineCore",
    "BaseEngine",
    "BaseNonStreamingEngine",
    "BatchedEngine",
    "EmbeddingEngine",
    "EngineConfig",
    "EngineCore",
    "GenerationOutput",
    "RerankerEngine",
    "STSEngine",
    "STTEngine",
    "TTSEngine",
    "VLMBatchedEngine",
]
