"""An error as the end of an event stream, in the form of each API.

The status line says 200 by then. OpenAI's streams end with ``[DONE]``, Anthropic's
with the error itself. OpenAI's Responses have two forms: the event ``error``,
which OpenAI's own client raises if its data has a field ``error``, and
``response.failed``, which others wait for; both are sent, in that order, because
its accumulator refuses any other first event.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Types of Anthropic's errors by HTTP status; any other is ``api_error``.
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Begun(NamedTuple):
    """The first and the last events of a stream that is ended in the middle."""

    first: bytes
    last: bytes

    def response(self) -> Mapping[str, Any]:
        """What a stream of Responses said of itself when it began."""
        response = _data(self.first).get("response")
        return response if isinstance(response, dict) else {}

    def number(self) -> int:
        """The number of the event that comes next in a stream of Responses."""
        last = _data(self.last).get("sequence_number")
        return last + 1 if isinstance(last, int) else 0


def _data(events: bytes) -> dict[str, Any]:
    """The data of the last of some events; nothing where it is not one of them."""
    _, found, data = events.rstrip().rpartition(b"data:")
    try:
        content = json.loads(data) if found else None
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {}


def in_progress(response_id: str, model: str, number: int) -> bytes:
    """The event with that ``number`` of a response whose work has yet to begin."""
    name = "response.created" if number == 1 else "response.in_progress"
    response = _response(response_id, model, "in_progress", None)
    return _event(name, {"response": response, "sequence_number": number})


def frames(
    protocol: str,
    status: int,
    error: Mapping[str, Any],
    model: str = "",
    begun: Begun | None = None,
) -> bytes:
    """The events that end a stream of ``protocol`` with ``error``.

    Args:
        protocol: oMLX's name of the API, as in ``_resolve_keepalive``.
        status: the HTTP status that the error would have had.
        error: ``message``, and ``type``, ``code`` and others where they are known.
        model: the name that the request gave.
        begun: what of the stream is out; None where that is nothing but keep-alives.
    """
    if protocol == "anthropic":
        known = {name: value for name, value in error.items() if value is not None}
        kind = _ANTHROPIC.get(status, "api_error")
        return _event("error", {"error": {**known, "type": kind}})
    if protocol == "openai_responses":
        number = begun.number() if begun is not None else 0
        failed = _failed(error, model)
        if begun is not None:
            known = {**failed, **begun.response()}
            failed = {**known, "status": failed["status"], "error": failed["error"]}
        return _event("error", _error(error, number)) + _event(
            "response.failed", {"response": failed, "sequence_number": number + 1}
        )
    return f"data: {json.dumps({'error': dict(error)})}\n\ndata: [DONE]\n\n".encode()


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n".encode()


def _error(error: Mapping[str, Any], number: int) -> dict[str, Any]:
    plain = {name: error.get(name) for name in ("code", "message", "param")}
    return {**plain, "sequence_number": number, "error": dict(error)}


def new_id() -> str:
    """An id of a response, as oMLX makes them."""
    return f"resp_{uuid.uuid4().hex[:24]}"


def _failed(error: Mapping[str, Any], model: str) -> dict[str, Any]:
    cause = {"code": error.get("code") or "server_error", "message": error.get("message")}
    return _response(new_id(), model, "failed", cause)


def _response(response_id: str, model: str, status: str, error: Any) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": error,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
