"""The picture at the end: per scenario, stock above patched, on one axis of seconds.

Nothing is said by colour alone: states differ in hatching, every request ends
in its status. The colours are Okabe and Ito's, which stay apart for
colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omlx_admission.surfaces.demo.client import Answer
from omlx_admission.surfaces.demo.models import Model
from omlx_admission.surfaces.demo.runs import Run
from omlx_admission.surfaces.demo.scenarios import Scenario, retry_after
from omlx_admission.surfaces.demo.stage import Played, outcome
from omlx_admission.surfaces.demo.watch import LOADING, Span, spans

_RESIDENT_LOOK: dict[str, Any] = {
    "facecolor": "#cfe3f2",
    "edgecolor": "#56789a",
    "linewidth": 0.6,
}
_LOADING_LOOK: dict[str, Any] = {
    "facecolor": "#ffffff",
    "edgecolor": "#d55e00",
    "hatch": "////",
    "linewidth": 0.6,
}
_WAITING_LOOK: dict[str, Any] = {
    "facecolor": "#ffffff",
    "edgecolor": "#444444",
    "hatch": "....",
    "linewidth": 0.6,
}
_ANSWERED_LOOK: dict[str, Any] = {
    "facecolor": "#009e73",
    "edgecolor": "#00573f",
    "linewidth": 0.6,
}
_REFUSED = "#b03a00"

#: Heights in lanes: the model's own band, one request.
_BAND, _LANE = 0.9, 0.75
_INCH_PER_LANE = 0.26

#: Inches round and between the panels.
_LEFT, _AXES_INCHES, _RIGHT = 0.95, 11.0, 0.25
_HEAD, _TITLE, _PAIR_GAP, _GAP, _FOOT = 0.85, 0.5, 0.12, 0.42, 0.25

#: Width in inches of one character of a caption, on the safe side.
_CHARACTER = 0.083


@dataclass(frozen=True)
class Bar:
    """One request in a picture: its lane counts from 0 upwards within its model."""

    answer: Answer
    lane: int


def lanes(answers: Iterable[Answer]) -> list[Bar]:
    """Give each label lanes of its own, so that no two requests of a lane overlap in time.

    A lane that is shared by labels would have one's caption run over another's bars.
    """
    free_at: dict[str, list[float]] = {}
    inner: list[tuple[Answer, int]] = []
    for answer in sorted(answers, key=lambda a: a.started):
        ends = free_at.setdefault(answer.label, [])
        lane = next((i for i, end in enumerate(ends) if end <= answer.started), len(ends))
        ends[lane : lane + 1] = [answer.ended]
        inner.append((answer, lane))
    below = 0
    first: dict[str, int] = {}
    for label, ends in free_at.items():
        first[label] = below
        below += len(ends)
    return [Bar(answer, first[answer.label] + lane) for answer, lane in inner]


def draw(
    path: Path, stock: Run, patched: Run, scenarios: Sequence[Scenario], title: str
) -> None:
    """Write the picture to ``path`` as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (scenario, run, _Panel(scenario, run.scenario(scenario.name)))
        for scenario in scenarios
        for run in (stock, patched)
    ]
    limit = max(panel.limit(_AXES_INCHES) for _, _, panel in panels)
    inches = [panel.height * _INCH_PER_LANE for _, _, panel in panels]
    total = _HEAD + _FOOT + sum(inches) + len(scenarios) * (_TITLE + _PAIR_GAP + _GAP)
    figure = Figure(figsize=(_LEFT + _AXES_INCHES + _RIGHT, total), dpi=130)
    FigureCanvasAgg(figure)
    x = 0.012
    figure.text(x, 1 - 0.3 / total, title, fontsize=13, weight="bold", va="center")
    _legend(figure, total)
    top = total - _HEAD
    for index, ((scenario, run, panel), height) in enumerate(zip(panels, inches, strict=True)):
        first = index % 2 == 0
        if first:
            name = f"{index // 2 + 1}. {scenario.title}"
            figure.text(x, (top - 0.12) / total, name, fontsize=11, weight="bold", va="center")
            wanted = f"wanted: {scenario.wanted}"
            figure.text(x, (top - 0.34) / total, wanted, fontsize=10, va="center")
            top -= _TITLE
        axes = figure.add_axes(
            (
                _LEFT / figure.get_figwidth(),
                (top - height) / total,
                _AXES_INCHES / figure.get_figwidth(),
                height / total,
            )
        )
        panel.draw(axes, limit)
        middle = (top - height / 2) / total
        figure.text(x, middle, run.mode, fontsize=11, rotation=90, va="center")
        if first:
            axes.tick_params(labelbottom=False)
        if index == len(panels) - 1:
            axes.set_xlabel("seconds since the scenario began", fontsize=10)
        top -= height + (_PAIR_GAP if first else _GAP)
    figure.savefig(path, format="png")


def _legend(figure: Any, total: float) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(label="model loading", **_LOADING_LOOK),
            Patch(label="model resident", **_RESIDENT_LOOK),
            Patch(label="request waiting (no byte yet)", **_WAITING_LOOK),
            Patch(label="request being answered", **_ANSWERED_LOOK),
        ],
        loc="upper left",
        bbox_to_anchor=(0.004, 1 - 0.42 / total),
        ncols=4,
        frameon=False,
        fontsize=10,
        handlelength=2.4,
        handleheight=1.2,
    )


class _Panel:
    """One scenario on one server: two models, each a band with its requests above."""

    def __init__(self, scenario: Scenario, played: Played) -> None:
        self._played = played
        self._models: list[tuple[Model, list[Bar], float]] = []
        bottom = 0.0
        for model in reversed(scenario.pair):
            bars = lanes(a for a in played.answers if a.model == model.name)
            self._models.append((model, bars, bottom))
            bottom += _BAND + _LANE * (1 + max((b.lane for b in bars), default=0)) + 0.35
        self.height = bottom

    def limit(self, inches: float) -> float:
        """Seconds at the right end of an axis that is ``inches`` wide, captions included."""
        played = self._played
        limits = [played.end - played.start]
        for _, bars, _ in self._models:
            for same in _by_label(bars).values():
                room = inches - _CHARACTER * len(_caption([b.answer for b in same])) - 0.1
                limits.append((same[-1].answer.ended - played.start) * inches / room)
        return max(limits)

    def draw(self, axes: Any, limit: float) -> None:
        """Fill ``axes``, ``limit`` seconds long."""
        played = self._played
        axes.set_xlim(0, limit)
        axes.set_ylim(-0.1, self.height)
        axes.set_yticks(
            [bottom + _BAND / 2 for _, _, bottom in self._models],
            [model.letter for model, _, _ in self._models],
            fontsize=11,
        )
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        names = [model.name for model, _, _ in self._models]
        states = spans(played.samples, names)
        for model, bars, bottom in self._models:
            for span in states:
                if span.model == model.name:
                    self._band(axes, span, bottom)
            self._requests(axes, bars, bottom + _BAND)

    def _band(self, axes: Any, span: Span, bottom: float) -> None:
        look = _LOADING_LOOK if span.state == LOADING else _RESIDENT_LOOK
        start = max(0.0, span.start - self._played.start)
        end = span.end - self._played.start
        axes.broken_barh([(start, end - start)], (bottom, _BAND * 0.8), **look)
        if end - start > 0.6:
            axes.text(
                (start + end) / 2,
                bottom + _BAND * 0.4,
                span.state,
                fontsize=9,
                ha="center",
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            )

    def _requests(self, axes: Any, bars: Sequence[Bar], bottom: float) -> None:
        for bar in bars:
            self._request(axes, bar, bottom + bar.lane * _LANE)
        for same in _by_label(bars).values():
            last = same[-1]
            refused = any(not b.answer.ok for b in same)
            axes.annotate(
                _caption([b.answer for b in same]),
                (last.answer.ended - self._played.start, bottom + (last.lane + 0.4) * _LANE),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=9,
                weight="bold" if refused else "normal",
                color=_REFUSED if refused else "black",
                va="center",
            )

    def _request(self, axes: Any, bar: Bar, bottom: float) -> None:
        answer, zero = bar.answer, self._played.start
        start, end = answer.started - zero, answer.ended - zero
        served = end
        if answer.status == 200 and answer.first_byte is not None:
            served = answer.first_byte - zero
        size = (bottom + 0.06, _LANE * 0.72)
        if served > start:
            axes.broken_barh([(start, served - start)], size, **_WAITING_LOOK)
        if end > served:
            axes.broken_barh([(served, end - served)], size, **_ANSWERED_LOOK)


def _by_label(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    found: dict[str, list[Bar]] = {}
    for bar in bars:
        found.setdefault(bar.answer.label, []).append(bar)
    return found


def _caption(answers: Sequence[Answer]) -> str:
    texts = dict.fromkeys(outcome(a) for a in answers)
    status = ", ".join(texts)
    if len(answers) > 1:
        worst = max(a.seconds for a in answers)
        return f"{answers[0].label}: {status} x{len(answers)}, worst {worst:.2f} s"
    (answer,) = answers
    text = f"{answer.label}: {status} after {answer.seconds:.2f} s"
    if seconds := retry_after(answer):
        text += f", retry in {seconds} s"
    return text
