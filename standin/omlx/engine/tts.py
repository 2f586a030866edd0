"""The class of text-to-speech engines."""

from .base import AudioEngine


class TTSEngine(AudioEngine):
    """A text-to-speech model."""
