"""A model of a kind that a route cannot serve: say so before it is loaded.

A route alone finds out after the load, for which other models were evicted.
"""

from __future__ import annotations

from typing import Any

from .refusal import Refusal

_TEXT = frozenset({"batched", "vlm"})

#: Kind of engine (``EngineEntry.engine_type``): what such a model is, and its route.
#: A kind that is not listed is left to the route.
_KINDS = {
    "batched": ("a text model", "/v1/chat/completions"),
    "vlm": ("a text model", "/v1/chat/completions"),
    "embedding": ("an embedding model", "/v1/embeddings"),
    "reranker": ("a reranker", "/v1/rerank"),
    "audio_stt": ("a speech-to-text model", "/v1/audio/transcriptions"),
    "audio_tts": ("a text-to-speech model", "/v1/audio/speech"),
    "audio_sts": ("an audio processing model", "/v1/audio/process"),
}

#: Which kinds a route serves. Routes that are not listed load any kind.
_SERVED = {
    "/v1/chat/completions": _TEXT,
    "/v1/completions": _TEXT,
    "/v1/messages": _TEXT,
    "/v1/messages/count_tokens": _TEXT,
    "/v1/responses": _TEXT,
    "/v1/embeddings": frozenset({"embedding"}),
    "/v1/rerank": frozenset({"reranker"}),
    "/v1/audio/transcriptions": frozenset({"audio_stt"}),
    "/v1/audio/transcriptions/realtime": frozenset({"audio_stt"}),
    "/v1/audio/speech": frozenset({"audio_tts"}),
    "/v1/audio/process": frozenset({"audio_sts"}),
}


def is_helper(entry: Any) -> bool:
    """Whether a model helps chat models, and does not count against the limit on those.

    A kind that is not known counts.
    """
    kind = getattr(entry, "engine_type", None)
    return kind in _KINDS and kind not in _TEXT


def refusal(path: str, entry: Any) -> Refusal | None:
    """The 400 for a model of the wrong kind; None where it may serve the route."""
    served = _SERVED.get(path)
    kind = getattr(entry, "engine_type", None)
    if served is None or kind in served or kind not in _KINDS:
        return None
    what, route = _KINDS[kind]
    name = getattr(entry, "model_id", "?")
    text = f"Model '{name}' is {what}, which this route cannot serve: use {route}."
    return Refusal(400, "wrong_model_kind", text)
