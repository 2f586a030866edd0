"""Servers that several tests share: starting one costs more than a test."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.routes_matrix.routes import BROKEN, KEY, MEMORY_GB, Reply, Route, ask
from omlx_admission.surfaces.demo.client import LOCAL, Answer, Client
from standin.server import Server

from .conftest import Omlx, said, streaming

#: A stream that outlasts what happens beside it, unless its client leaves.
_FOREVER = 5000

_AUTH = {"Authorization": f"Bearer {KEY}"}

#: Of each kind of server: its variables, and files below its base.
KINDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "plain": ({}, {}),
    "short queue": ({"OMLX_ADMISSION_MAX_QUEUE": "1"}, {}),
    "one model": ({"OMLX_ADMISSION_MAX_MODELS": "1"}, {}),
    "settings": (
        {},
        {
            "settings.json": {"model": {"model_fallback": True}},
            "model_settings.json": {
                "version": 1,
                "models": {"small": {"is_pinned": True}, "text": {"is_default": True}},
            },
        },
    ),
}

#: Loads that have to be long enough for something to happen meanwhile, in seconds.
_LOADS = {"any": 1.5, "any-broken": 1.0, "small": 0.0, "tiny": 0.0}


def start(kind: str, omlx: Omlx, models: Path, base: Path) -> Server:
    """A running server of that kind; the caller ends it."""
    environment, files = KINDS[kind]
    for name, content in files.items():
        (base / name).write_text(json.dumps(content))
    server = Server(
        models,
        base,
        patched=True,
        source=omlx.source,
        plan={"load_s": 0.2, "per_model": _LOADS, "failing": BROKEN, "pretend_audio": True},
        environment={"OMLX_API_KEY": KEY, **environment},
        memory_gb=MEMORY_GB,
        start_s=120.0,
        **({"python": omlx.python} if omlx.python else {}),
    )
    return server.__enter__()


@dataclass
class House:
    """A running server, as one test sees it."""

    server: Server
    since: int

    @property
    def log(self) -> str:
        """What was logged since the test began."""
        return self.server.log[self.since :]

    @property
    def swaps(self) -> list[str]:
        """Models whose load ended, in order."""
        return re.findall(r"admission: '([\w-]+)' resident", self.log)

    async def said(self, words: str, times: int = 1) -> None:
        """Return when these words have been logged so often."""
        await said(self.server, words, times, self.since)

    async def chat(self, model: str, **options: Any) -> Answer:
        """One conversation's next turn."""
        return await Client(self.server.url).chat(model, headers=_AUTH, **options)

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        return await Client(self.server.url).post(path, body, headers=_AUTH)

    async def ask(self, route: Route, model: str, **options: Any) -> Reply:
        return await ask(self.server.url, route, model, **options)

    async def loaded(self) -> list[str]:
        """Models in memory, by name."""
        async with httpx.AsyncClient(timeout=30, headers=_AUTH, **LOCAL) as http:
            found = (await http.get(f"{self.server.url}/api/status")).json()
        return sorted(found["loaded_models"])

    async def busy(self) -> asyncio.Task[Answer]:
        """``busy`` streams, until :meth:`hang_up`."""
        await self.chat("busy", tokens=2)
        return await streaming(self.server, "busy", _FOREVER, headers=_AUTH)

    async def hang_up(self, stream: asyncio.Task[Answer]) -> None:
        """The client of the stream leaves."""
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


def error_of(reply: Reply) -> dict[str, Any]:
    """The error object of a refusal."""
    error: dict[str, Any] = json.loads(reply.body)["error"]
    return error
