"""What the demo calls right: each check is silent on a right run and speaks on a wrong one."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from omlx_admission.surfaces import demo
from omlx_admission.surfaces.demo.models import A, B, D
from omlx_admission.surfaces.demo.scenarios import SCENARIOS
from omlx_admission.surfaces.demo.stage import (
    STREAM,
    Played,
    longest_gap,
    outcome,
    reason,
    text_of,
)
from tests.surfaces.demo_runs import START, TOKENS, answer, right, samples, stream

CHECKS = {scenario.name: scenario.check for scenario in SCENARIOS}
BUDGET = "B, waits 1 s at most"


def test_the_command_line_knows_every_scenario() -> None:
    assert tuple(s.name for s in SCENARIOS) == demo.NAMES


@pytest.mark.parametrize("name", demo.NAMES)
def test_a_right_run_has_no_misses(name: str) -> None:
    assert list(CHECKS[name](right(name))) == []


def _refuse(label: str, status: int = 507) -> Callable[[Played], None]:
    def change(played: Played) -> None:
        played.one(label).status = status

    return change


def _late(label: str, end: float) -> Callable[[Played], None]:
    def change(played: Played) -> None:
        played.one(label).ended = START + end

    return change


def _cut(played: Played) -> None:
    played.one(STREAM).whole = False


def _fewer_tokens(played: Played) -> None:
    played.answers[0] = stream(3.0, tokens=TOKENS - 4)


def _stalled(played: Played) -> None:
    chunks = played.one(STREAM).chunks
    chunks[1:] = [chunks[0] + 1.2]


def _see(*phases: tuple[float, list, list]) -> Callable[[Played], None]:  # type: ignore[type-arg]
    def change(played: Played) -> None:
        played.samples = samples(*phases)

    return change


def _slow_neighbour(played: Played) -> None:
    played.of("A while D loads")[0].ended = START + 2.9


def _slower_neighbour(played: Played) -> None:
    for one in played.of("A while D loads"):
        one.ended = one.started + 0.5


def _header(label: str, value: str | None) -> Callable[[Played], None]:
    def change(played: Played) -> None:
        headers = played.one(label).headers
        headers.pop("retry-after", None)
        if value is not None:
            headers["retry-after"] = value

    return change


WRONG = [
    ("busy", _refuse("B while A streams"), "B while A streams: 507"),
    ("busy", _refuse("A again, B waiting", 409), "A again, B waiting: 409"),
    ("busy", _refuse("B while A streams", 0), "B while A streams: no answer"),
    ("busy", _cut, "A streams: 200, cut off"),
    ("busy", _fewer_tokens, "8 of 12 tokens"),
    ("busy", _stalled, "stood still for 1.20 s"),
    ("busy", _see((1.0, [A], []), (3.0, [A], [B]), (5.8, [B], [])), "in memory together"),
    ("busy", _see((1.0, [A], []), (3.0, [], [B]), (5.8, [B], [])), "2.00 s before A's stream"),
    ("busy", _late("A again, B waiting", 2.5), "took 1.50 s although A was resident"),
    ("busy", _late("B while A streams", 10.0), "7.00 s after A's stream ended"),
    ("cold", _refuse("A while B loads"), "A while B loads: 507"),
    ("cold", _refuse("B, cold, A idle"), "B, cold, A idle: 507"),
    ("cold", _late("B, cold, A idle", 7.0), "B took 7.00 s"),
    ("cold", _late("A while B loads", 2.0), "A was served before B"),
    ("cold", _late("A while B loads", 9.5), "7.00 s after B, more than two swaps"),
    ("cold", _see((1.0, [A], []), (3.0, [A, B], []), (5, [A], [])), "in memory together"),
    ("cold", _see((1.0, [A], []), (5.0, [B], [])), "A is not resident at the end"),
    ("neighbour", _refuse("D, cold, fits beside A"), "D, cold, fits beside A: 507"),
    ("neighbour", _slow_neighbour, "took up to 1.90 s while D loaded"),
    ("neighbour", _slower_neighbour, "5 times as long while D loaded"),
    ("neighbour", _see((1.0, [A], []), (3.0, [D], [])), "evicted for a model that fits"),
    ("budget", _refuse(BUDGET), "B got 507 instead of 503"),
    ("budget", _refuse(BUDGET, 200), "B got 200 instead of 503"),
    ("budget", _late(BUDGET, 0.6), "refused after 0.10 s; its budget was 1 s"),
    ("budget", _late(BUDGET, 2.9), "refused after 2.40 s; its budget was 1 s"),
    ("budget", _header(BUDGET, None), "Retry-After is 'missing'"),
    ("budget", _header(BUDGET, "0"), "Retry-After is '0'"),
    ("budget", _header(BUDGET, "61"), "Retry-After is '61'"),
    ("budget", _header(BUDGET, "1.5"), "Retry-After is '1.5'"),
    ("budget", _cut, "A streams: 200, cut off"),
    ("budget", _fewer_tokens, "8 of 12 tokens"),
    ("budget", _stalled, "stood still"),
    ("budget", _see((1.0, [A], []), (3.0, [], [B])), "moved a model"),
    ("budget", _see((1.0, [A], []), (3.0, [A], [B])), "moved a model"),
    ("too-large", _refuse("C, larger than the memory", 503), "C got 503 instead of 507"),
    ("too-large", _late("C, larger than the memory", 1.4), "refused only after 1.40 s"),
    ("too-large", _header("C, larger than the memory", "5"), "told to come back"),
    ("too-large", _refuse("A afterwards"), "A afterwards: 507"),
    ("too-large", _late("A afterwards", 2.1), "it had been evicted"),
    ("too-large", _see((0.1, [A], []), (0.2, [], [])), "evicted for a model that never fits"),
]


@pytest.mark.parametrize(
    ("name", "change", "said"), WRONG, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(WRONG)]
)
def test_a_wrong_run_is_told(name: str, change: Callable[[Played], None], said: str) -> None:
    played = right(name)
    change(played)
    misses = list(CHECKS[name](played))
    assert any(said in miss for miss in misses), misses


def test_what_a_status_is_called() -> None:
    good = answer(A, "x", 0, 1)
    assert outcome(good) == "200"
    assert outcome(replace(good, whole=False)) == "200, cut off"
    assert outcome(replace(good, error="ReadError")) == "200, cut off"
    assert outcome(replace(good, status=507)) == "507"
    assert outcome(replace(good, status=0)) == "no answer"


def test_the_reason_of_an_error_is_one_short_line() -> None:
    base = answer(A, "x", 0, 1, 500)
    assert reason(base) == "no"
    assert (
        reason(replace(base, body='{"detail": "not\\n found"}')) == "{'detail': 'not\\n found'}"
    )
    assert reason(replace(base, body="<html>\nbroken")) == "<html> broken"
    assert reason(replace(base, body='"text"')) == '"text"'
    assert reason(replace(base, error="ReadError: x")) == "ReadError: x"
    assert len(reason(replace(base, body="a" * 500))) == 160


def test_a_streams_text_and_its_longest_gap() -> None:
    made = stream(4.0)
    assert text_of(made) == "a" * TOKENS
    assert longest_gap(made) == pytest.approx(1.0)
    made.chunks = []
    assert longest_gap(made) == 0.0
    made.body = "data: {broken\n\n: keep-alive\n\ndata: " + json.dumps({"choices": None})
    assert text_of(made) == ""
