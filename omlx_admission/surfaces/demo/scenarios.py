"""The sequences that users reported, and what each has to look like when it is right.

Every bound is a relation within one run (to the load, to the same request
without disturbance), because the demo runs on machines of any speed and load.
Figures that are worth quoting come from ``benchmarks/``.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from omlx_admission.surfaces.demo.client import Answer
from omlx_admission.surfaces.demo.models import A, B, C, D, Model
from omlx_admission.surfaces.demo.stage import (
    STREAM,
    Played,
    Stage,
    longest_gap,
    outcome,
    text_of,
)
from omlx_admission.surfaces.demo.watch import LOADING, RESIDENT

#: Seconds of grace on sums of swaps: an unload settles in steps of half a second,
#: and a machine that is busy with something else does everything later.
_SLACK_S = 2.0

#: Wait budget in seconds of the request that is to run out of it.
BUDGET_S = 1.0


@dataclass(frozen=True)
class Scenario:
    """One sequence.

    Attributes:
        wanted: what is right, for people.
        pair: the models that take part.
        play: asks the server; A is resident and idle when it starts.
        check: one line for everything that is not right.
    """

    name: str
    title: str
    wanted: str
    pair: tuple[Model, Model]
    play: Callable[[Stage], Awaitable[None]]
    check: Callable[[Played], Iterator[str]]


# --- memory for one: A streams, B is asked for ----------------------------------------


async def _play_busy(stage: Stage) -> None:
    await stage.beside_stream(
        stage.ask(B, "B while A streams", delay=0.5),
        stage.ask(A, "A again, B waiting", delay=1.0),
    )


def _check_busy(played: Played) -> Iterator[str]:
    stream, b, again = (
        played.one(label) for label in (STREAM, "B while A streams", "A again, B waiting")
    )
    yield from _served(stream, b, again)
    yield from _never_both(played, A, B)
    if stream.ok:
        yield from _whole(stream, played)
        yield from _stalled(stream, played)
        if (loading := _first(played, B, LOADING)) and loading < stream.ended - 0.2:
            yield f"B began to load {stream.ended - loading:.2f} s before A's stream ended"
    if again.ok and again.seconds > played.measures.load / 2:
        yield f"A's short request took {again.seconds:.2f} s although A was resident"
    if stream.ok and b.ok:
        late = b.ended - stream.ended
        if late > 2 * played.measures.swap + _SLACK_S:
            yield f"B was served {late:.2f} s after A's stream ended, more than two swaps"


# --- memory for one: B is cold, A is asked for while B loads --------------------------


async def _play_cold(stage: Stage) -> None:
    await asyncio.gather(
        stage.ask(B, "B, cold, A idle"),
        stage.ask(A, "A while B loads", delay=stage.measures.load / 2),
    )


def _check_cold(played: Played) -> Iterator[str]:
    b, a = played.one("B, cold, A idle"), played.one("A while B loads")
    yield from _served(b, a)
    yield from _never_both(played, A, B)
    swap = played.measures.swap
    if b.ok and b.seconds > 2 * swap + _SLACK_S:
        yield f"B took {b.seconds:.2f} s, more than two swaps"
    if b.ok and a.ok:
        if a.ended < b.ended:
            yield "A was served before B, for which it had been evicted"
        late = a.ended - b.ended
        if late > 2 * swap + _SLACK_S:
            yield f"A was served {late:.2f} s after B, more than two swaps"
        if not _is(played, A, RESIDENT):
            yield "A is not resident at the end"


# --- room for both: D loads beside A ---------------------------------------------------


async def _play_neighbour(stage: Stage) -> None:
    for _ in range(8):
        await stage.ask(A, "A alone", quiet=True)
    loading = asyncio.create_task(stage.ask(D, "D, cold, fits beside A"))
    await asyncio.sleep(min(0.3, stage.measures.load / 4))
    while not loading.done():
        await stage.ask(A, "A while D loads", quiet=True)
    await loading
    worst = max(a.seconds for a in stage.answers if a.label == "A while D loads")
    stage.say(f"A while D loads: worst {worst:.2f} s")


def _check_neighbour(played: Played) -> Iterator[str]:
    alone, during = played.of("A alone"), played.of("A while D loads")
    d = played.one("D, cold, fits beside A")
    yield from _served(d, *alone, *during)
    worst = max(a.seconds for a in during)
    if worst > played.measures.load / 2:
        yield f"A, resident, took up to {worst:.2f} s while D loaded"
    usual = statistics.median(a.seconds for a in alone)
    typical = statistics.median(a.seconds for a in during)
    if typical > 3 * usual:
        yield f"A, resident, took {typical / usual:.0f} times as long while D loaded"
    if _gone(played, A):
        yield "A was evicted for a model that fits beside it"


# --- the wait budget runs out ----------------------------------------------------------


async def _play_budget(stage: Stage) -> None:
    header = {"X-OMLX-Max-Wait": f"{BUDGET_S:g}"}
    await stage.beside_stream(
        stage.ask(B, f"B, waits {BUDGET_S:g} s at most", delay=0.5, headers=header),
    )


def _check_budget(played: Played) -> Iterator[str]:
    stream, b = played.one(STREAM), played.one(f"B, waits {BUDGET_S:g} s at most")
    yield from _served(stream)
    if stream.ok:
        yield from _whole(stream, played)
        yield from _stalled(stream, played)
    if b.status != 503:
        yield f"B got {outcome(b)} instead of 503 when its wait was over"
    elif not 0.9 * BUDGET_S <= b.seconds <= BUDGET_S + played.measures.load / 2:
        yield f"B was refused after {b.seconds:.2f} s; its budget was {BUDGET_S:g} s"
    if b.status == 503 and not 1 <= retry_after(b) <= 60:
        yield f"B's Retry-After is {b.headers.get('retry-after', 'missing')!r}"
    if _gone(played, A) or _first(played, B, LOADING) is not None:
        yield "the refused request moved a model"


# --- a model that never fits -----------------------------------------------------------


async def _play_too_large(stage: Stage) -> None:
    await stage.ask(C, "C, larger than the memory")
    await stage.ask(A, "A afterwards")


def _check_too_large(played: Played) -> Iterator[str]:
    c, a = played.one("C, larger than the memory"), played.one("A afterwards")
    if c.status != 507:
        yield f"C got {outcome(c)} instead of 507"
    elif c.seconds > played.measures.load / 2:
        yield f"C was refused only after {c.seconds:.2f} s"
    if "retry-after" in c.headers:
        yield "C was told to come back, which cannot help"
    yield from _served(a)
    if a.ok and a.seconds > played.measures.load / 2:
        yield f"A took {a.seconds:.2f} s afterwards: it had been evicted"
    if _gone(played, A):
        yield "A was evicted for a model that never fits"


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "busy",
        "Memory for one: A streams, B is asked for, then A again",
        "A's stream stays whole, A goes on answering, B waits for the stream and is served",
        (A, B),
        _play_busy,
        _check_busy,
    ),
    Scenario(
        "cold",
        "Memory for one: B loads in A's place, A is asked for meanwhile",
        "B is served, then A comes back and is served; neither is refused",
        (A, B),
        _play_cold,
        _check_cold,
    ),
    Scenario(
        "neighbour",
        "Room for both: D loads beside A, A is asked for all the time",
        "A answers as fast as ever",
        (A, D),
        _play_neighbour,
        _check_neighbour,
    ),
    Scenario(
        "budget",
        f"Memory for one: A streams, B may wait {BUDGET_S:g} s and no longer",
        "B gets 503 with Retry-After when its wait is over; A notices nothing",
        (A, B),
        _play_budget,
        _check_budget,
    ),
    Scenario(
        "too-large",
        "C is larger than the memory, A is idle",
        "C gets 507 at once, A stays resident",
        (A, C),
        _play_too_large,
        _check_too_large,
    ),
)


def retry_after(answer: Answer) -> int:
    """The header's whole seconds; 0 where there is none or it is no whole number."""
    text = answer.headers.get("retry-after", "")
    return int(text) if text.isdecimal() else 0


# --- what checks share -------------------------------------------------------------------


def _served(*answers: Answer) -> Iterator[str]:
    for answer in answers:
        if not answer.ok:
            yield f"{answer.label}: {outcome(answer)} instead of an answer"


def _whole(stream: Answer, played: Played) -> Iterator[str]:
    got = len(text_of(stream))
    if got != played.measures.tokens:
        yield f"A's stream has {got} of {played.measures.tokens} tokens"


def _stalled(stream: Answer, played: Played) -> Iterator[str]:
    gap = longest_gap(stream)
    if gap > played.measures.load / 2:
        yield f"A's stream stood still for {gap:.2f} s"


def _never_both(played: Played, one: Model, other: Model) -> Iterator[str]:
    names = {one.name, other.name}
    if any(names <= sample.loaded | sample.loading for sample in played.samples):
        yield f"{one.letter} and {other.letter} were in memory together"


def _first(played: Played, model: Model, state: str) -> float | None:
    return next((s.at for s in played.samples if s.state(model.name) == state), None)


def _is(played: Played, model: Model, state: str) -> bool:
    return bool(played.samples) and played.samples[-1].state(model.name) == state


def _gone(played: Played, model: Model) -> bool:
    return any(s.state(model.name) != RESIDENT for s in played.samples)
