"""The class of speech synthesis engines."""

from __future__ import annotations

from .stt import AudioEngine


class TTSEngine(AudioEngine):
    """A speech synthesis model."""
