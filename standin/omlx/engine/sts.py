"""The class of speech processing engines."""

from .base import AudioEngine


class STSEngine(AudioEngine):
    """A speech processing model."""
