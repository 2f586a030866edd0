"""The table at the end: what a client saw, stock beside patched, in 100 columns."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from omlx_admission.surfaces.demo.client import Answer
from omlx_admission.surfaces.demo.runs import Run
from omlx_admission.surfaces.demo.scenarios import Scenario, retry_after
from omlx_admission.surfaces.demo.stage import outcome

WIDTH = 100
_LABEL, _STATUS, _TIME = 30, 10, 22


def lines(stock: Run, patched: Run, scenarios: Sequence[Scenario]) -> Iterator[str]:
    """The whole table; both runs hold every one of ``scenarios``."""
    yield _row("request", "stock", "", "patched", "")
    yield _row("", "status", "latency", "status", "latency")
    for number, scenario in enumerate(scenarios, 1):
        yield "-" * WIDTH
        yield f"{number}. {scenario.name}: {scenario.title}"
        left, right = stock.scenario(scenario.name), patched.scenario(scenario.name)
        for label in _labels(left.answers, right.answers):
            yield _row(f"  {label}", *cells(left.of(label)), *cells(right.of(label)))
        yield from _remark("wanted", [scenario.wanted])
        yield from _remark("stock", left.misses or ["as wanted"])
        yield from _remark("patched", [f"MISSED: {m}" for m in right.misses] or ["as wanted"])
    yield "-" * WIDTH


def cells(answers: Sequence[Answer]) -> tuple[str, str]:
    """Status and latency of all answers under one label."""
    if not answers:
        return "-", "-"
    counts = Counter(outcome(a) for a in answers)
    if len(answers) == 1:
        status = outcome(answers[0])
    else:
        status = ", ".join(f"{text} x{n}" for text, n in counts.items())
    middle = statistics.median(a.seconds for a in answers)
    time = f"{middle:.2f} s"
    if len(answers) > 1:
        time += f", worst {max(a.seconds for a in answers):.2f} s"
    elif seconds := retry_after(answers[0]):
        time += f", retry in {seconds} s"
    return status, time


def _labels(*sides: Sequence[Answer]) -> list[str]:
    return list(dict.fromkeys(a.label for side in sides for a in side))


def _row(label: str, *values: str) -> str:
    widths = (_STATUS, _TIME, _STATUS, _TIME)
    rest = "".join(f" {v:<{w}}" for v, w in zip(values, widths, strict=True))
    return f"{label:<{_LABEL}}{rest}".rstrip()


def _remark(side: str, texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(
            f"{side + ':':<9}{text}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * 11,
        )
