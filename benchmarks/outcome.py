"""What became of one request, judged by what its client saw alone (K1, K2, K4, K7).

Each request has exactly one right outcome: a whole answer, a refusal before the first
byte in the shape of its route, or, where the first byte had to come before the outcome
was known, an error event with the end of the stream behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: How a request of a client that behaves is to end, and of the models that are special.
NORMAL, FAILING, NEVER = "normal", "failing", "never"

#: What ends a stream, by route.
_ENDS = {
    "/v1/chat/completions": ("data: [DONE]",),
    "/v1/completions": ("data: [DONE]",),
    "/v1/messages": ("event: message_stop", "event: error"),
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
}

#: What says in a whole answer that all tokens came.
_ALL_TOKENS = ('"finish_reason":"length"', '"stop_reason":"max_tokens"', "max_output_tokens")


@dataclass
class Record:
    """One request. Times are seconds of ``time.monotonic``.

    Attributes:
        left: why the client ended it itself; None where it waited for the end.
        broken: how the connection failed; None where it did not.
        content: when the first token, or the whole plain answer, came.
    """

    number: int
    sender: str
    path: str
    model: str
    stream: bool
    tokens: int
    started: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    first: float | None = None
    content: float | None = None
    ended: float = 0.0
    left: str | None = None
    broken: str | None = None


def judge(record: Record, model: str = NORMAL, cut: bool = False) -> tuple[str, str | None]:
    """The outcome and what is wrong with it, if anything.

    ``cut``: an unload that ends what runs was asked for while the request was there.
    """
    if record.left is not None:
        return record.left, None
    if record.broken is not None:
        return "broken", record.broken
    if record.status == 200:
        return _served(record, model, cut)
    outcome = str(record.status)
    wrong = _shape(record)
    after = record.headers.get("retry-after")
    if record.status == 503:
        if after is None or not after.isdigit() or int(after) < 1:
            wrong = wrong or f"503 with Retry-After {after!r}"
        if model == NEVER:
            wrong = wrong or "503 for a model that can never fit"
    elif record.status == 507:
        if model != NEVER:
            wrong = wrong or "507 for a model that fits"
        if after is not None:
            wrong = wrong or "507 with a Retry-After"
    elif not (record.status == 500 and model == FAILING):
        wrong = wrong or f"status {record.status}"
    return outcome, wrong


def _served(record: Record, model: str, cut: bool) -> tuple[str, str | None]:
    body = record.body.replace(": ", ":").replace(", ", ",")
    failed = _has_error(record)
    if record.stream:
        if not any(end in record.body for end in _ENDS[record.path]):
            return "cut", "the stream ends without its terminator"
    elif not failed and _json(record.body) is None:
        return "cut", "the body is not whole"
    if failed:
        # Before its first token a stream was held; after it only an unload by hand may.
        held = record.stream and record.content is None
        if held or cut or model == FAILING:
            return "error event", None
        return "error event", "an error in the middle of the answer"
    if model != NORMAL:
        return "200", f"200 of a model that is {model}"
    if record.tokens and not any(mark in body for mark in _ALL_TOKENS):
        return "200", "not all tokens came"
    return "200", None


def _has_error(record: Record) -> bool:
    if record.stream:
        marks = ('data: {"error"', "event: error", "response.failed", "[Error")
        return any(mark in record.body for mark in marks)
    content = _json(record.body)
    return bool(isinstance(content, dict) and content.get("error"))


def _shape(record: Record) -> str | None:
    """What is wrong with an error body: OpenAI's shape, Anthropic's on its routes."""
    content = _json(record.body)
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return f"the body of {record.status} is no error of its route"
    assert isinstance(content, dict)
    if record.path.startswith("/v1/messages") and content.get("type") != "error":
        return f"the body of {record.status} has not Anthropic's shape"
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def overtaken(burst: Sequence[Record]) -> int:
    """Most later requests of one burst that were served before an earlier one (K7)."""
    served = [r for r in burst if r.status == 200 and r.content is not None]
    served.sort(key=lambda r: r.started)
    return max(
        (
            sum(b.content < a.content for b in served[n + 1 :])  # type: ignore[operator]
            for n, a in enumerate(served)
        ),
        default=0,
    )
