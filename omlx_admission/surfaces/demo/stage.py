"""One server on which scenarios are played, and what was measured on it first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

import httpx

from omlx_admission.surfaces.demo import models
from omlx_admission.surfaces.demo.client import Answer, Client
from omlx_admission.surfaces.demo.models import Model
from omlx_admission.surfaces.demo.watch import Sample, Watch

#: Seconds that the long stream on A shall last, and below which it is of no use:
#: what happens beside it takes a second and a half.
STREAM_S = 3.0
LEAST_STREAM_S = 1.8

#: Label of that stream.
STREAM = "A streams"

#: Tokens of a short answer, and of the one that shows the speed of decoding.
SHORT, LONG = 8, 160

#: Seconds for the server to get back to "A resident, nothing else".
_SETTLE_S = 20.0


class StageError(Exception):
    """The server cannot be brought to where a scenario starts; one line."""


class TooShort(Exception):
    """The stream ended before what was to happen beside it; to be played again, longer."""


@dataclass
class Measures:
    """What one server does when nothing is in the way, in seconds.

    Attributes:
        load: the pause that stands for a load, as ordered.
        swap: a cold request for A on an empty server.
        alone: a short request for A, resident, nothing else going on.
        tokens: length of the long stream.
    """

    load: float
    swap: float = 0.0
    alone: float = 0.0
    tokens: int = 0


@dataclass
class Played:
    """One scenario on one server; times are seconds of ``time.monotonic``."""

    name: str
    start: float
    end: float
    answers: list[Answer]
    samples: list[Sample]
    measures: Measures
    misses: list[str] = field(default_factory=list)

    def of(self, label: str) -> list[Answer]:
        """All answers under one label, in the order in which they were asked."""
        return [a for a in self.answers if a.label == label]

    def one(self, label: str) -> Answer:
        """The only answer under ``label``."""
        (answer,) = self.of(label)
        return answer


@dataclass
class Stage:
    """Asks one server and keeps every answer."""

    client: Client
    watch: Watch
    measures: Measures
    say: Callable[[str], None]
    answers: list[Answer] = field(default_factory=list)

    async def ask(
        self,
        model: Model,
        label: str,
        *,
        tokens: int = SHORT,
        stream: bool = False,
        delay: float = 0.0,
        headers: dict[str, str] | None = None,
        quiet: bool = False,
    ) -> Answer:
        """One chat request, kept under ``label``; ``quiet`` reports no progress."""
        answer = await self.client.chat(
            model.name,
            tokens=tokens,
            stream=stream,
            label=label,
            delay=delay,
            headers=headers,
        )
        self.answers.append(answer)
        if not quiet:
            self.say(f"{label}: {outcome(answer)} after {answer.seconds:.2f} s")
        return answer

    async def measure(self) -> None:
        """Load A on the empty server and take the run's own yardsticks.

        Raises StageError where the server cannot even do that.
        """
        cold = await self.client.chat(models.A.name, tokens=1)
        if not cold.ok:
            raise StageError(f"the first request ended with {outcome(cold)}: {reason(cold)}")
        self.measures.swap = cold.seconds
        short = [await self.client.chat(models.A.name, tokens=SHORT) for _ in range(6)]
        self.measures.alone = statistics.median(a.seconds for a in short[1:])
        if not self.measures.tokens:
            # The best of three: a disturbance only ever makes it slower.
            long = [await self.client.chat(models.A.name, tokens=LONG) for _ in range(3)]
            self.measures.tokens = stream_tokens(
                min(a.seconds for a in short[1:]), min(a.seconds for a in long)
            )

    async def beside_stream(self, *others: Coroutine[None, None, Answer]) -> None:
        """The long stream on A, and ``others`` at the same time.

        Raises TooShort, when all have ended, where the stream was over too soon.
        """
        stream = self.ask(models.A, STREAM, tokens=self.measures.tokens, stream=True)
        answer, *_ = await asyncio.gather(stream, *others)
        if answer.ok and answer.seconds < LEAST_STREAM_S:
            raise TooShort

    async def settle(self) -> None:
        """Get to where every scenario starts: A resident and idle, nothing else."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + _SETTLE_S
        while clock() < deadline:
            seen = await self.watch.look()
            if seen is None or seen.loading:
                await asyncio.sleep(self.watch.interval)
            elif others := sorted(seen.loaded - {models.A.name}):
                for name in others:
                    with contextlib.suppress(httpx.HTTPError):
                        await self.client.post(f"/v1/models/{name}/unload", {})
                await asyncio.sleep(self.watch.interval)
            elif not seen.loaded:
                await self.client.chat(models.A.name, tokens=1)
            else:
                return
        raise StageError("the server did not get back to A resident and nothing else")


def stream_tokens(short_s: float, long_s: float) -> int:
    """Tokens of a stream that lasts STREAM_S, from the seconds of a short and a long answer."""
    rate = (LONG - SHORT) / max(0.01, long_s - short_s)
    return min(20_000, max(64, int(STREAM_S * rate)))


def outcome(answer: Answer) -> str:
    """A status as people read it: ``200``, ``507``, ``200, cut off``, ``no answer``."""
    if answer.status == 0:
        return "no answer"
    if answer.status == 200 and not answer.ok:
        return "200, cut off"
    return str(answer.status)


def reason(answer: Answer) -> str:
    """What the server said in an error, shortened to one line."""
    if answer.error:
        return answer.error
    try:
        content = json.loads(answer.body)
        text = content.get("error", content)
        text = text.get("message", text) if isinstance(text, dict) else text
    except (ValueError, AttributeError):
        text = answer.body
    line = " ".join(str(text).split())
    return line if len(line) <= 160 else line[:157] + "..."


def text_of(answer: Answer) -> str:
    """What the model said, put together from a stream's events."""
    return "".join(_deltas(answer.body))


def _deltas(body: str) -> Iterator[str]:
    for line in body.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        try:
            choices = json.loads(line[6:]).get("choices") or []
        except ValueError:
            continue
        for choice in choices:
            yield choice.get("delta", {}).get("content") or ""


def longest_gap(answer: Answer) -> float:
    """Longest pause in seconds between two pieces of a stream."""
    return max(
        (b - a for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)), default=0.0
    )
