"""Vision models. Served as text models here; the class is what the pool asks about."""

from __future__ import annotations

from .batched import BatchedEngine


class VLMBatchedEngine(BatchedEngine):
    """A vision model, which ``force_lm`` reloads as a plain text model."""
