"""An error as the end of an event stream, in the form of each API.

The status line says 200 by then. OpenAI's streams end with ``[DONE]``, Anthropic's
with the error itself. OpenAI's Responses have two forms: the event ``error``,
which the stock client raises if its data has a field ``error``, and
``response.failed``, which others wait for; both are sent, in that order, because
the stock client's accumulator refuses any other first event.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

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


def frames(protocol: str, status: int, error: Mapping[str, Any], model: str) -> bytes:
    """The events that end a stream of ``protocol`` with ``error``.

    Args:
        protocol: oMLX's name of the API, as in ``_resolve_keepalive``.
        status: the HTTP status that the error would have had.
        error: ``message``, and ``type``, ``code`` and others where they are known.
        model: the name that the request gave.
    """
    if protocol == "anthropic":
        known = {name: value for name, value in error.items() if value is not None}
        kind = _ANTHROPIC.get(status, "api_error")
        return _event("error", {"error": {**known, "type": kind}})
    if protocol == "openai_responses":
        return _event("error", _error(error)) + _event("response.failed", _failed(error, model))
    return f"data: {json.dumps({'error': dict(error)})}\n\ndata: [DONE]\n\n".encode()


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n".encode()


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: error.get(name) for name in ("code", "message", "param")}
    return {**plain, "sequence_number": 0, "error": dict(error)}


def _failed(error: Mapping[str, Any], model: str) -> dict[str, Any]:
    cause = {"code": error.get("code") or "server_error", "message": error.get("message")}
    response = {
        "id": f"resp_{uuid.uuid4().hex[:24]}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "failed",
        "error": cause,
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
    return {"response": response, "sequence_number": 1}
