"""The class of speech recognition engines."""

from __future__ import annotations

from .audio import AudioEngine


class STTEngine(AudioEngine):
    """A speech recognition model."""
