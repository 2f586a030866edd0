"""Streams that wait long: ``python -m benchmarks.stream_hold [--omlx-src DIR]``.

Clients with a read time-out of 15 s ask for a model behind one that is busy for 40 s,
on all four routes: raw, and through the stock ``openai`` and ``anthropic`` clients;
once with keep-alives and once without (``OMLX_ADMISSION_STREAM_HOLD_S=0``). Others
may wait 25 s. Last, stock clients with their default retries where a request may
wait 5 s and the model is busy for 20 s. About two and a half minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

import standin
from benchmarks.arguments import checkout
from benchmarks.server import models
from benchmarks.table import Row, render
from omlx_admission.surfaces.demo.client import LOCAL
from standin.server import Server

READ_TIMEOUT_S = 15.0
BUSY_S, BUDGET_S = 40.0, 25.0
SHORT_BUSY_S, SHORT_BUDGET_S = 20.0, 5.0

_MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}

#: Enough tokens for a stream that lasts until its client leaves.
_ENDLESS = 20_000


@dataclass
class Seen:
    """What one client saw: how it ended, after how long, and its longest silence."""

    outcome: str
    seconds: float
    silence: float = 0.0
    keepalives: int = 0

    def __str__(self) -> str:
        extra = f", {self.keepalives} keep-alives" if self.keepalives else ""
        silence = f", silent for {self.silence:.1f} s at most" if self.silence else ""
        return f"{self.outcome} after {self.seconds:.1f} s{extra}{silence}"


async def raw(server: Server, path: str, headers: dict[str, str]) -> Seen:
    """A stream read as it comes, with the read time-out."""
    started = last = time.monotonic()
    silence, text = 0.0, ""
    body = {"model": "b", "stream": True, **BODIES[path]}
    options: Any = {**LOCAL, "timeout": httpx.Timeout(300, read=READ_TIMEOUT_S)}
    outcome = "cut off"
    try:
        async with (
            httpx.AsyncClient(**options) as http,
            http.stream("POST", server.url + path, json=body, headers=headers) as response,
        ):
            async for piece in response.aiter_text():
                now = time.monotonic()
                silence, last = max(silence, now - last), now
                text += piece
            if re.search(r"\[DONE\]|message_stop|response\.(completed|incomplete)", text):
                outcome = f"{response.status_code}, served"
            if response.status_code != 200 or "model_swap_timeout" in text:
                outcome = f"{response.status_code}, refused"
    except httpx.ReadTimeout:
        outcome = "ReadTimeout"
    count = len(re.findall(r'"model":"keepalive"|event: ping|^: keep-alive', text, re.M))
    # Of a response each is one event more that it is in progress; its own is the last.
    count += max(0, text.count("event: response.in_progress") - 1)
    return Seen(outcome, time.monotonic() - started, silence, count)


class Stock:
    """The stock clients, with their default retries or with none."""

    def __init__(self, server: Server, headers: dict[str, str], **options: Any) -> None:
        common = {"api_key": "x", "default_headers": headers, **options}
        self.ours = openai.AsyncOpenAI(base_url=f"{server.url}/v1", **common)
        self.theirs = anthropic.AsyncAnthropic(base_url=server.url, **common)
        ours, theirs = self.ours, self.theirs
        self.calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "/v1/chat/completions": ours.chat.completions.create,
            "/v1/completions": ours.completions.create,
            "/v1/messages": theirs.messages.create,
            "/v1/responses": ours.responses.create,
        }

    async def ask(self, path: str, stream: bool = True) -> Seen:
        """One call and all of its answer; what the caller gets is the outcome."""
        started = time.monotonic()
        outcome = "served"
        body = {"model": "b", **BODIES[path]}
        try:
            if stream:
                async for _ in await self.calls[path](**body, stream=True):
                    pass
            else:
                await self.calls[path](**body)
        except (openai.APIError, anthropic.APIError) as error:
            outcome = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"
            known = error.body
            if isinstance(known, dict):
                inner = known.get("error", known)
                outcome += f" ({inner.get('type')}, {inner.get('code')})"
        return Seen(outcome, time.monotonic() - started)

    async def close(self) -> None:
        """Close both."""
        await self.ours.close()
        await self.theirs.close()


@asynccontextmanager
async def busy(server: Server) -> AsyncIterator[None]:
    """A is loaded and generates until the end of the block."""
    async with httpx.AsyncClient(timeout=300, **LOCAL) as http:
        body = {"model": "a", "messages": _MESSAGES, "max_tokens": _ENDLESS, "stream": True}
        url = f"{server.url}/v1/chat/completions"
        async with http.stream("POST", url, json=body) as response:
            pieces = response.aiter_raw()
            await anext(pieces)
            drain = asyncio.create_task(_drain(pieces))
            yield
            if drain.done():
                raise RuntimeError("A's stream ended too soon: the figures say nothing")
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


async def beside(server: Server, seconds: float, calls: Sequence[Any]) -> list[Any]:
    """All of ``calls``, begun while A is busy, which it is for ``seconds``."""
    async with busy(server):
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(seconds)
    return list(await asyncio.gather(*tasks))


async def long_waits(server: Server) -> dict[str, Seen]:
    """Every route behind 40 s of another model, raw and stock, served and refused."""
    # Of the HTTP library that the stock clients use.
    timeout = openai.Timeout(300, read=READ_TIMEOUT_S)
    stock = {
        limit: Stock(server, headers, max_retries=0, timeout=timeout)
        for limit, headers in _LIMITS.items()
    }
    names, calls = [], []
    for path in BODIES:
        for limit, headers in _LIMITS.items():
            names += [f"{path}, {limit}, raw", f"{path}, {limit}, stock client"]
            calls += [raw(server, path, headers), stock[limit].ask(path)]
    found = await beside(server, BUSY_S, calls)
    for one in stock.values():
        await one.close()
    return dict(zip(names, found, strict=True))


_LIMITS: dict[str, dict[str, str]] = {
    "may wait 300 s": {},
    f"may wait {BUDGET_S:.0f} s": {"X-OMLX-Max-Wait": f"{BUDGET_S:.0f}"},
}


async def short_waits(server: Server) -> dict[str, Seen]:
    """Stock clients as they are, behind 20 s of another model with a budget of 5 s."""
    stock = Stock(server, {})
    names = [(path, stream) for path in BODIES for stream in (False, True)]
    calls = [stock.ask(path, stream) for path, stream in names]
    found = await beside(server, SHORT_BUSY_S, calls)
    await stock.close()
    kind = {False: "whole", True: "stream"}
    return {f"{path}, {kind[s]}": seen for (path, s), seen in zip(names, found, strict=True)}


def measure(source: Path, python: str | None, root: Path) -> list[Row]:
    """All rows on one oMLX."""
    made = models(root / "models")
    extra = {"python": python} if python else {}

    def run(
        name: str, scenario: Callable[[Server], Any], **environment: str
    ) -> tuple[dict[str, Seen], str]:
        plan = {"load_s": 1.0}
        with Server(
            made,
            root / name,
            patched=True,
            source=source,
            plan=plan,
            environment=environment,
            **extra,
        ) as server:
            return asyncio.run(scenario(server)), server.log

    kept, _ = run("kept", long_waits)
    silent, _ = run("silent", long_waits, OMLX_ADMISSION_STREAM_HOLD_S="0")
    retried, log = run("retried", short_waits, OMLX_ADMISSION_MAX_WAIT_S=f"{SHORT_BUDGET_S:g}")
    on = f"{source.name}, A busy for {BUSY_S:.0f} s, read time-out {READ_TIMEOUT_S:.0f} s"
    rows = [
        Row(name, {"hold 10 s": str(seen), "hold 0": str(silent[name])}, on)
        for name, seen in kept.items()
    ]
    on = f"{source.name}, A busy for {SHORT_BUSY_S:.0f} s, budget {SHORT_BUDGET_S:.0f} s"
    refusals = log.count("refused (model_swap_timeout)")
    rows += [
        Row(
            f"{name}, default retries",
            {"hold 10 s": str(seen)},
            on,
            "served",
            seen.outcome == "served",
        )
        for name, seen in retried.items()
    ]
    rows.append(
        Row("refusals that those retries made up for", {"hold 10 s": str(refusals)}, on)
    )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream_hold")
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=None, metavar="PATH")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.omlx_src, arguments.omlx_python, Path(folder))
    print(render(rows))


if __name__ == "__main__":
    main()
