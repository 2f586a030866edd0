"""Bodies of requests. Unknown fields are accepted and ignored.

No counterpart in oMLX under this name; it has one module per API.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool = False


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    include_usage: bool = False


class ChatCompletionRequest(_Body):
    """``POST /v1/chat/completions``."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(_Body):
    """``POST /v1/completions``."""

    model: str
    prompt: str | list[str]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None


class AnthropicMessagesRequest(_Body):
    """``POST /v1/messages``."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = 4096
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None


class ResponsesRequest(_Body):
    """``POST /v1/responses``."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None


class EmbeddingRequest(BaseModel):
    """``POST /v1/embeddings``."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[str] | None = None
    dimensions: int | None = None
    max_length: int | None = None


class RerankRequest(BaseModel):
    """``POST /v1/rerank``."""

    model_config = ConfigDict(extra="allow")

    model: str
    query: str
    documents: list[Any]
    top_n: int | None = None
    return_documents: bool = False


def text_of(content: Any) -> str:
    """The text of a message's content, whatever API it came through."""
    if isinstance(content, str):
        return content
    parts = [part.get("text") or "" for part in content or [] if isinstance(part, dict)]
    return "\n".join(part for part in parts if part)


def plain_messages(messages: list[dict[str, Any]], system: Any = None) -> list[dict[str, str]]:
    """Messages as role and text only; ``developer`` counts as ``system``."""
    found = [{"role": "system", "content": text_of(system)}] if system else []
    for message in messages:
        role = str(message.get("role") or "user")
        found.append(
            {
                "role": "system" if role == "developer" else role,
                "content": text_of(message.get("content")),
            }
        )
    return found
