"""Every route that may need a model, and a request to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from omlx_admission.surfaces.demo.client import LOCAL
from standin import tinymodels

#: Bytes counted by oMLX. The guard stands at 2.7 GiB: one of these fits, not two.
_SIZE = 1_650_000_000
_NEVER = 5_000_000_000
MEMORY_GB = 2.7

_MESSAGES = [{"role": "user", "content": "hello"}]

#: The key of the servers: the admin's load route asks for one, whatever else is open.
KEY = "sesame-open"

#: What is uploaded where audio is; nobody decodes it.
_SOUND = ("sound.wav", b"RIFF" + bytes(64), "audio/wav")


@dataclass(frozen=True)
class Route:
    """One route with one kind of request.

    Attributes:
        name: the route, and how the answer is wanted where it may come in two ways.
        kind: which models it serves: ``text``, ``embed``, ``rerank``, ``stt`` ...;
            ``any`` for a route that only loads.
        body: JSON body without the model.
        form: sent as a form with an upload instead of JSON.
    """

    name: str
    path: str
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    form: bool = False

    def request(self, model: str) -> tuple[str, dict[str, Any]]:
        """Path and arguments of the POST for ``model``."""
        path = self.path.replace("{id}", model)
        if self.form:
            return path, {"data": {"model": model}, "files": {"file": _SOUND}}
        if self.path != path:
            return path, {}
        return path, {"json": {"model": model, **self.body}}


def _both(path: str, body: dict[str, Any]) -> tuple[Route, Route]:
    return (
        Route(path, path, "text", {**body, "stream": False}),
        Route(f"{path}, stream", path, "text", {**body, "stream": True}),
    )


#: It asks for a model only to count, so none is moved for it.
COUNT = "/v1/messages/count_tokens"

ROUTES: tuple[Route, ...] = (
    *_both("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 4}),
    *_both("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
    *_both("/v1/messages", {"messages": _MESSAGES, "max_tokens": 4}),
    Route(COUNT, COUNT, "text", {"messages": _MESSAGES, "max_tokens": 4}),
    *_both("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    Route("/v1/embeddings", "/v1/embeddings", "embed", {"input": "hello"}),
    Route("/v1/rerank", "/v1/rerank", "rerank", {"query": "a", "documents": ["a", "b"]}),
    Route("/v1/audio/transcriptions", "/v1/audio/transcriptions", "stt", form=True),
    Route("/v1/audio/speech", "/v1/audio/speech", "tts", {"input": "hello"}),
    Route("/v1/audio/process", "/v1/audio/process", "sts", form=True),
    Route("/v1/models/{id}/load", "/v1/models/{id}/load", "any"),
    Route("/admin/api/models/{id}/load", "/admin/api/models/{id}/load", "any"),
)

_AUDIO = ("stt", "tts", "sts")
KINDS = ("text", "embed", "rerank", *_AUDIO)


def make_models(root: Path) -> Path:
    """``busy`` to keep the room, and of each kind a model that fits beside nothing
    (``text``), one that never fits (``text-never``) and one whose load fails
    (``text-broken``)."""
    tinymodels.make_text_model(root, name="busy", counted_bytes=_SIZE, hidden=512, layers=8)
    for seed, kind in enumerate((*KINDS, "any")):
        for suffix, size in (("", _SIZE), ("-never", _NEVER), ("-broken", 300_000_000)):
            _make(root, kind, kind + suffix, size, seed)
    return root


def _make(root: Path, kind: str, name: str, size: int, seed: int) -> None:
    if kind in ("text", "any"):
        tinymodels.make_text_model(root, name=name, counted_bytes=size, seed=seed)
    elif kind == "embed":
        tinymodels.make_embedder(root, name=name, counted_bytes=size, seed=seed)
    elif kind == "rerank":
        tinymodels.make_reranker(root, name=name, counted_bytes=size, seed=seed)
    else:
        tinymodels.make_audio_model(root, name=name, kind=kind, counted_bytes=size, seed=seed)


#: Models whose load fails, for the launcher's plan.
BROKEN: Sequence[str] = [f"{kind}-broken" for kind in (*KINDS, "any")]


@dataclass(frozen=True)
class Reply:
    """What a client saw: status (0: the connection broke), headers and body."""

    status: int
    headers: dict[str, str]
    body: str


async def ask(
    url: str, route: Route, model: str, *, max_wait: float | None = None, timeout: float = 60.0
) -> Reply:
    """One request to ``route``; never raises for an answer."""
    path, arguments = route.request(model)
    arguments["headers"] = {"Authorization": f"Bearer {KEY}"}
    if max_wait is not None:
        arguments["headers"]["X-OMLX-Max-Wait"] = f"{max_wait:g}"
    try:
        async with httpx.AsyncClient(timeout=timeout, **LOCAL) as http:
            answer = await http.post(url + path, **arguments)
    except httpx.HTTPError as error:
        return Reply(0, {}, f"{type(error).__name__}: {error}")
    return Reply(answer.status_code, dict(answer.headers), answer.text)
