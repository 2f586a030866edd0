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

_RESIDENT_LOOK = {"facecolor": "#cfe3f2", "edgecolor": "#56789a", "linewidth": 0.6}
_LOADING_LOOK = {
    "facecolor": "#ffffff",
    "edgecolor": "#d55e00",
    "hatch": "////",
    "linewidth": 0.6,
}
_WAITING_LOOK = {
    "facecolor": "#ffffff",
    "edgecolor": "#444444",
    "hatch": "....",
    "linewidth": 0.6,
}
_ANSWERED_LOOK = {"facecolor": "#009e73", "edgecolor": "#00573f", "linewidth": 0.6}
_REFUSED = "#b03a00"

#: Heights in lanes: the model's own band, one request.
_BAND, _LANE = 0.9, 0.75
_INCH_PER_LANE = 0.26


@dataclass(frozen=True)
class Bar:
    """One request in a picture: its lane counts from 0 upwards within its model."""

    answer: Answer
    lane: int


def lanes(answers: Iterable[Answer]) -> list[Bar]:
    """Put requests of one model into lanes so that none overlap in time."""
    free_at: list[float] = []
    bars = []
    for answer in sorted(answers, key=lambda a: a.started):
        lane = next((i for i, end in enumerate(free_at) if end <= answer.started), len(free_at))
        free_at[lane : lane + 1] = [answer.ended]
        bars.append(Bar(answer, lane))
    return bars


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
    longest = max(panel.seconds for _, _, panel in panels)
    gap = 0.42  # inches between stock and patched, more before a new scenario
    heights = [panel.height * _INCH_PER_LANE for _, _, panel in panels]
    head, foot, between = 1.15, 0.6, 0.62
    total = head + foot + sum(heights) + len(scenarios) * (gap * 0.35 + between)
    width = 12.0
    figure = Figure(figsize=(width, total), dpi=130)
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.3 / total, title, fontsize=13, weight="bold", va="center")
    _legend(figure, total)
    top = total - head
    for index, ((scenario, run, panel), height) in enumerate(zip(panels, heights, strict=True)):
        first = index % 2 == 0
        if first:
            top -= between - 0.12
            number = index // 2 + 1
            figure.text(
                0.012,
                (top + 0.17) / total,
                f"{number}. {scenario.title}",
                fontsize=11,
                weight="bold",
                va="center",
            )
        axes = figure.add_axes((0.115, (top - height) / total, 0.87, height / total))
        panel.draw(axes, longest)
        axes.text(
            -0.125,
            0.5,
            run.mode,
            transform=axes.transAxes,
            fontsize=11,
            rotation=90,
            va="center",
            ha="left",
        )
        if first:
            axes.tick_params(labelbottom=False)
        last = index == len(panels) - 1
        if last:
            axes.set_xlabel("seconds since the scenario began", fontsize=10)
        top -= height + (gap * 0.35 if first else 0.12)
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
        bbox_to_anchor=(0.006, 1 - 0.45 / total),
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
        self.seconds = played.end - played.start

    def draw(self, axes: Any, longest: float) -> None:
        played = self._played
        axes.set_xlim(0, longest * 1.02)
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
        labels: dict[str, list[Bar]] = {}
        for bar in bars:
            self._request(axes, bar, bottom + bar.lane * _LANE)
            labels.setdefault(bar.answer.label, []).append(bar)
        for same in labels.values():
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
