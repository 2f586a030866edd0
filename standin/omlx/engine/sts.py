"""The class of speech processing engines."""

from __future__ import annotations

from .stt import AudioEngine


class STSEngine(AudioEngine):
    """A speech processing model."""
