"""Streams as their clients see them: read while they come, and compared when whole."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from omlx_admission.surfaces.demo.client import LOCAL
from standin.server import Server

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}

#: Tokens of a stream that lasts until its client leaves.
_ENDLESS = 20_000

#: What differs between two equal answers.
_OWN = re.compile(r'("(?:id|item_id)": ?")[^"]*"|("created(?:_at)?": ?)\d+')
_SECONDS = re.compile(r'("(?:total_time|[a-z_]*duration|[a-z_]*second[a-z_]*)": ?)[0-9.]+')
_NUMBER = re.compile(r'"sequence_number": ?\d+')
_REASON = re.compile(r', ?"finish_reason": ?(?:null|"(\w+)")')


@dataclass
class Reading:
    """One answer while it comes."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def keepalives(self) -> int:
        """How many have come."""
        return sum(is_keepalive(block) for block in self.text.split("\n\n"))

    async def until_kept_alive(self, times: int) -> None:
        """Return when that many keep-alives have come."""
        while self.keepalives < times:
            self.news.clear()
            await self.news.wait()

    @property
    def events(self) -> list[str]:
        """Its events without keep-alives, ids and times; a text in pieces is one piece.

        What begins a response counts as one: it says nothing that its end does not say.
        """
        blocks = [b for b in self.text.split("\n\n") if b and not is_keepalive(b)]
        plain = [_SECONDS.sub(r"\1", _OWN.sub(r'\1\2"', b)) for b in blocks]
        return _joined(plain)


def is_keepalive(block: str) -> bool:
    """Whether an event of a stream says nothing."""
    nothing = ("event: ping", "event: response.created", "event: response.in_progress")
    return block.startswith((":", *nothing)) or '"model":"keepalive"' in block


def _joined(blocks: list[str]) -> list[str]:
    """How many tokens one event brings is a matter of time: neighbours are put together."""
    joined: list[str] = []
    for block in blocks:
        text = re.search(r'"(content|text|delta)": ?"((?:[^"\\]|\\.)*)"', block)
        shape = block if text is None else block[: text.start(2)] + block[text.end(2) :]
        shape = _NUMBER.sub("", shape)
        said = ""
        if text is not None:
            reason = _REASON.search(shape)
            shape = _REASON.sub("", shape)
            said = text[2] + (f" <{reason[1]}>" if reason and reason[1] else "")
        if text is not None and joined and joined[-1].startswith(shape + "\t"):
            joined[-1] += said
        else:
            joined.append(f"{shape}\t{said}")
    return joined


class Door:
    """One HTTP client of one server."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.AsyncClient(base_url=server.url, timeout=60, **LOCAL)

    async def __aenter__(self) -> Door:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.http.__aexit__(*error)

    async def read(self, path: str, reading: Reading, **more: Any) -> Reading:
        """One request, whose answer is put into ``reading`` as it comes."""
        body = {"model": "b", "stream": True, "temperature": 0.0, **ROUTES[path], **more}
        async with self.http.stream("POST", path, json=body) as response:
            reading.status, reading.headers = response.status_code, dict(response.headers)
            async for text in response.aiter_text():
                reading.text += text
                reading.news.set()
        return reading

    def start(self, path: str, **more: Any) -> tuple[Reading, asyncio.Task[Reading]]:
        """The same in a task of its own."""
        reading = Reading()
        return reading, asyncio.create_task(self.read(path, reading, **more))

    @asynccontextmanager
    async def busy(self, model: str = "a") -> AsyncIterator[None]:
        """``model`` is loaded and generates until the end of the block."""
        path = "/v1/chat/completions"
        body = {"model": model, "stream": True, **ROUTES[path], "max_tokens": _ENDLESS}
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            while not (line := await anext(lines)).startswith("data: ") or (
                not json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                pass
            drain = asyncio.create_task(_drain(lines))
            try:
                yield
            finally:
                drain.cancel()
                await asyncio.gather(drain, return_exceptions=True)


async def _drain(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass
