"""Request and answer formats, and the audio routes."""
