"""Requests of the demo and the live tests, timed from the client's side."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

#: Options of every call. A proxy from the environment must not see loopback
#: calls, and reading the certificate store costs 20 ms per client.
LOCAL: Any = {"verify": False, "trust_env": False}


@dataclass
class Answer:
    """What one client saw. Times are seconds of ``time.monotonic``.

    Attributes:
        status: HTTP status; 0 where the connection broke.
        chunks: moments at which stream events with content arrived.
        whole: a stream ended with its terminator, another answer is valid JSON.
    """

    label: str
    model: str
    started: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    first_byte: float | None = None
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    body: str = ""
    whole: bool = False
    error: str | None = None

    @property
    def seconds(self) -> float:
        """From the request to the end of the answer."""
        return self.ended - self.started

    @property
    def ok(self) -> bool:
        """200 and complete."""
        return self.status == 200 and self.whole and self.error is None


class Client:
    """One client of one server; every call is a new connection."""

    def __init__(
        self, url: str, timeout: float = 120.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._timeout = timeout
        self._clock = clock

    async def chat(
        self,
        model: str,
        *,
        tokens: int = 8,
        stream: bool = False,
        label: str = "",
        delay: float = 0.0,
        headers: dict[str, str] | None = None,
        hang_up_after: float | None = None,
    ) -> Answer:
        """``/v1/chat/completions`` after ``delay`` seconds; never raises for an answer.

        ``hang_up_after`` closes the connection that many seconds after the start.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": stream,
        }
        await asyncio.sleep(delay)
        call = self.post("/v1/chat/completions", body, label=label, headers=headers)
        if hang_up_after is None:
            return await call
        try:
            return await asyncio.wait_for(call, hang_up_after)
        except TimeoutError:
            now = self._clock()
            return Answer(label, model, now - hang_up_after, ended=now, error="hung up")

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        label: str = "",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One POST with a JSON body; streams are read event by event."""
        answer = Answer(label, str(body.get("model", "")), self._clock())
        try:
            async with (
                httpx.AsyncClient(timeout=self._timeout, **LOCAL) as http,
                http.stream("POST", self._url + path, json=body, headers=headers) as response,
            ):
                answer.status = response.status_code
                answer.headers = dict(response.headers)
                parts: list[str] = []
                async for text in response.aiter_text():
                    now = self._clock()
                    answer.first_byte = answer.first_byte or now
                    parts.append(text)
                    if '"content"' in text or "_delta" in text:
                        answer.chunks.append(now)
                answer.body = "".join(parts)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = self._clock()
        answer.whole = _whole(answer, streamed=bool(body.get("stream")))
        return answer

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of one GET."""
        async with httpx.AsyncClient(timeout=self._timeout, **LOCAL) as http:
            response = await http.get(self._url + path)
            return response.status_code, response.json()


def _whole(answer: Answer, streamed: bool) -> bool:
    if answer.status == 200 and streamed:
        return any(
            mark in answer.body
            for mark in ("data: [DONE]", "event: message_stop", "response.completed")
        )
    try:
        content = json.loads(answer.body)
    except ValueError:
        return False
    return not (answer.status == 200 and "error" in content and content["error"])
