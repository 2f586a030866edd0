"""Bodies of requests and answers in the shape of each API.

No counterpart in oMLX under this name.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..engine.base import GenerationOutput

DONE = "data: [DONE]\n\n"


def new_id(prefix: str, length: int = 8) -> str:
    """A fresh id, ``prefix`` and ``length`` hex digits."""
    return f"{prefix}{uuid.uuid4().hex[:length]}"


def dump(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def data(content: Any) -> str:
    return f"data: {dump(content)}\n\n"


def event(name: str, content: dict[str, Any]) -> str:
    """A named event whose data repeats the name as its type."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n"


def error_frames(error: Exception) -> str:
    return data({"error": {"message": str(error), "type": "server_error"}}) + DONE


def usage(output: GenerationOutput, seconds: float) -> dict[str, Any]:
    prompt, completion = output.prompt_tokens, output.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "input_tokens": prompt,
        "output_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        "total_time": round(seconds, 2),
    }


class Stream:
    """Reads an engine's outputs and remembers the last one."""

    def __init__(self, outputs: AsyncIterator[GenerationOutput]):
        self._outputs = outputs
        self.last: GenerationOutput | None = None
        self.started = time.perf_counter()

    async def __aiter__(self) -> AsyncIterator[GenerationOutput]:
        async for output in self._outputs:
            self.last = output
            yield output

    @property
    def final(self) -> GenerationOutput:
        return self.last or GenerationOutput(text="")

    def usage(self) -> dict[str, Any]:
        return usage(self.final, time.perf_counter() - self.started)


# -- chat completions -------------------------------------------------------


def chat_body(model: str, output: GenerationOutput, seconds: float) -> str:
    message = {"role": "assistant", "content": output.text}
    return dump(
        {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {"index": 0, "message": message, "finish_reason": output.finish_reason}
            ],
            "usage": usage(output, seconds),
        }
    )


def chat_keepalive(response_id: str) -> str:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    chunk = _chunk("chat.completion.chunk", response_id, "keepalive", [choice])
    return data({**chunk, "created": 0})


async def chat_stream(
    model: str, stream: Stream, response_id: str, include_usage: bool
) -> AsyncIterator[str]:

    def chunk(delta: dict[str, Any], **rest: Any) -> str:
        choice = {"index": 0, "delta": delta, **rest}
        return data(_chunk("chat.completion.chunk", response_id, model, [choice]))

    yield chunk({"role": "assistant"})
    try:
        async for output in stream:
            if output.new_text:
                yield chunk({"content": output.new_text})
    except Exception as error:  # noqa: BLE001 - the status is out; the stream must say it
        yield error_frames(error)
        return
    yield chunk({}, finish_reason=stream.final.finish_reason)
    if include_usage:
        last = _chunk("chat.completion.chunk", response_id, model, [])
        yield data({**last, "usage": stream.usage()})
    yield DONE


def _chunk(kind: str, response_id: str, model: str, choices: list[Any]) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
    }


# -- completions ------------------------------------------------------------


def completion_body(model: str, outputs: list[GenerationOutput], seconds: float) -> str:
    total = GenerationOutput(
        text="",
        prompt_tokens=sum(output.prompt_tokens for output in outputs),
        completion_tokens=sum(output.completion_tokens for output in outputs),
    )
    choices = [
        {"index": index, "text": output.text, "finish_reason": output.finish_reason}
        for index, output in enumerate(outputs)
    ]
    body = _chunk("text_completion", new_id("cmpl-"), model, choices)
    return dump({**body, "usage": usage(total, seconds)})


def completion_keepalive(response_id: str) -> str:
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
    chunk = _chunk("text_completion", response_id, "keepalive", [choice])
    return data({**chunk, "created": 0})


async def completion_stream(
    model: str, stream: Stream, response_id: str, include_usage: bool
) -> AsyncIterator[str]:
    try:
        async for output in stream:
            choice = {
                "index": 0,
                "text": output.new_text,
                "finish_reason": output.finish_reason if output.finished else None,
            }
            yield data(_chunk("text_completion", response_id, model, [choice]))
    except Exception as error:  # noqa: BLE001 - as above
        yield error_frames(error)
        return
    if include_usage:
        last = _chunk("text_completion", response_id, model, [])
        yield data({**last, "usage": stream.usage()})
    yield DONE


# -- Anthropic messages -----------------------------------------------------

ANTHROPIC_PING = 'event: ping\ndata: {"type":"ping"}\n\n'


def _stop_reason(output: GenerationOutput) -> str:
    return "max_tokens" if output.finish_reason == "length" else "end_turn"


def _message(model: str, content: list[Any], stop_reason: str | None, counts: Any) -> Any:
    return {
        "id": new_id("msg_", 24),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": counts,
    }


def message_body(model: str, output: GenerationOutput) -> str:
    counts = {
        "input_tokens": output.prompt_tokens,
        "output_tokens": output.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
    }
    content = [{"type": "text", "text": output.text, "cache_control": None}]
    return dump(_message(model, content, _stop_reason(output), counts))


async def message_stream(model: str, stream: Stream, prompt_tokens: int) -> AsyncIterator[str]:
    counts = {"input_tokens": prompt_tokens, "output_tokens": 0}
    yield event("message_start", {"message": _message(model, [], None, counts)})
    block = {"index": 0, "content_block": {"type": "text", "text": ""}}
    yield event("content_block_start", block)
    try:
        async for output in stream:
            if output.new_text:
                delta = {"type": "text_delta", "text": output.new_text}
                yield event("content_block_delta", {"index": 0, "delta": delta})
    except Exception as error:  # noqa: BLE001 - as above
        yield event("error", {"error": {"type": "api_error", "message": str(error)}})
        return
    yield event("content_block_stop", {"index": 0})
    final = stream.final
    yield event(
        "message_delta",
        {
            "delta": {"stop_reason": _stop_reason(final), "stop_sequence": None},
            "usage": {
                "output_tokens": final.completion_tokens,
                "input_tokens": final.prompt_tokens,
            },
        },
    )
    yield event("message_stop", {})


# -- Responses --------------------------------------------------------------


def _item(item_id: str, status: str, text: str | None) -> dict[str, Any]:
    parts = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": item_id,
        "status": status,
        "role": "assistant",
        "content": parts,
    }


def _response(
    model: str,
    response_id: str,
    limit: int | None,
    output: GenerationOutput | None,
    item_id: str,
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "output": [],
        "tool_choice": "auto",
        "tools": [],
        "max_output_tokens": limit,
        "metadata": {},
    }
    if output is None:
        return body
    cut = output.finish_reason == "length"
    return {
        **body,
        "status": "incomplete" if cut else "completed",
        "output": [_item(item_id, "completed", output.text)],
        "usage": {
            "input_tokens": output.prompt_tokens,
            "output_tokens": output.completion_tokens,
            "total_tokens": output.prompt_tokens + output.completion_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }


def response_body(model: str, output: GenerationOutput, limit: int | None) -> str:
    body = _response(model, new_id("resp_", 24), limit, output, new_id("msg_", 24))
    return dump(body)


async def response_stream(model: str, stream: Stream, limit: int | None) -> AsyncIterator[str]:
    # Read at each call, as oMLX does.
    from .shared_models import IDPrefix, generate_id

    response_id, item_id = generate_id(IDPrefix.RESPONSE), generate_id(IDPrefix.MESSAGE)
    number = 0

    def numbered(name: str, **content: Any) -> str:
        nonlocal number
        number += 1
        return event(name, {**content, "sequence_number": number})

    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    empty = _response(model, response_id, limit, None, item_id)
    yield numbered("response.created", response=empty)
    yield numbered("response.in_progress", response=empty)
    item = _item(item_id, "in_progress", None)
    yield numbered("response.output_item.added", output_index=0, item=item)
    part = {"type": "output_text", "text": "", "annotations": []}
    yield numbered("response.content_part.added", **place, part=part)
    try:
        async for output in stream:
            if output.new_text:
                yield numbered("response.output_text.delta", **place, delta=output.new_text)
    except Exception as error:  # noqa: BLE001 - as above
        failed = {
            **empty,
            "status": "failed",
            "error": {"code": "server_error", "message": str(error)},
        }
        yield numbered("response.failed", response=failed)
        return
    text = stream.final.text
    yield numbered("response.output_text.done", **place, text=text)
    yield numbered("response.content_part.done", **place, part={**part, "text": text})
    item = _item(item_id, "completed", text)
    yield numbered("response.output_item.done", output_index=0, item=item)
    final = _response(model, response_id, limit, stream.final, item_id)
    yield numbered(f"response.{final['status']}", response=final)


# -- requests: unknown fields are accepted and ignored ------------------------


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
