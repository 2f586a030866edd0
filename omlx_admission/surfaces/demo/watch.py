"""Which model is loaded or loading, asked of the server every few hundredths of a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from omlx_admission.surfaces.demo.client import LOCAL

#: Seconds between two looks.
INTERVAL_S = 0.05

LOADING = "loading"
RESIDENT = "resident"


@dataclass(frozen=True)
class Sample:
    """What the server said at one moment (seconds of ``time.monotonic``)."""

    at: float
    loaded: frozenset[str]
    loading: frozenset[str]

    def state(self, model: str) -> str | None:
        """``loading``, ``resident`` or None."""
        if model in self.loading:
            return LOADING
        return RESIDENT if model in self.loaded else None


@dataclass(frozen=True)
class Span:
    """A model in one state from ``start`` to ``end``."""

    model: str
    state: str
    start: float
    end: float


@dataclass
class Watch:
    """Samples a server in the background; use as an asynchronous context manager."""

    url: str
    interval: float = INTERVAL_S
    clock: Callable[[], float] = time.monotonic
    samples: list[Sample] = field(default_factory=list)

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> Sample | None:
        """One sample now, also kept; None where the server did not answer."""
        try:
            # A new connection each time: on one that is kept, oMLX's answer comes
            # 40 ms late (its listening socket lacks TCP_NODELAY).
            async with httpx.AsyncClient(timeout=5.0, **LOCAL) as http:
                response = await http.get(f"{self.url}/v1/models/status")
            models = response.json()["models"]
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        loading = frozenset(m["id"] for m in models if m["is_loading"])
        loaded = frozenset(m["id"] for m in models if m["loaded"])
        sample = Sample(self.clock(), loaded, loading)
        self.samples.append(sample)
        return sample

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.interval)


def spans(samples: Sequence[Sample], models: Sequence[str]) -> list[Span]:
    """Samples of each model joined to spans; a span ends where the next state is seen."""
    found: list[Span] = []
    for model in models:
        state: str | None = None
        start = 0.0
        for sample in samples:
            now = sample.state(model)
            if now == state:
                continue
            if state is not None:
                found.append(Span(model, state, start, sample.at))
            state, start = now, sample.at
        if state is not None and samples[-1].at > start:
            found.append(Span(model, state, start, samples[-1].at))
    return found
