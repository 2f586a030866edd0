"""The class of speech recognition engines."""

from .base import AudioEngine


class STTEngine(AudioEngine):
    """A speech recognition model."""
