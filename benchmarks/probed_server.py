"""Servers that write down how their loop beats, and what their figures say."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from standin.server import Server


@dataclass
class ProbedServer(Server):
    """Starts `benchmarks.loop_probe` instead of the launcher.

    Attributes:
        probe: the plan; see `benchmarks.loop_probe`.
    """

    probe: Mapping[str, object] = field(default_factory=dict)

    module = "benchmarks.loop_probe"

    def _environment(self) -> dict[str, str]:
        variables = super()._environment()
        variables["LOOP_PROBE"] = str(self._lines)
        variables["LOOP_PROBE_PLAN"] = json.dumps(self.probe)
        return variables

    @property
    def _lines(self) -> Path:
        return self.base.resolve() / "loop-probe"

    def lines(self, kind: str) -> list[list[float | str]]:
        """What was recorded of one kind so far: ``beat``, ``gc``, ``close`` or ``flush``."""
        found = []
        for line in self._lines.read_text().splitlines(keepends=True):
            if line.endswith("\n") and (values := json.loads(line))[0] == kind:
                found.append(values[1:])
        return found

    def lags(self, start: float, end: float) -> list[float]:
        """Lag in seconds of every beat that came between two moments."""
        return [float(lag) for at, lag in self.lines("beat") if start <= float(at) <= end]


def spread(seconds: Sequence[float]) -> str:
    """Least, median, 95th percentile and greatest, in milliseconds."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    at95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    values = (ordered[0], statistics.median(ordered), at95, ordered[-1])
    return " / ".join(f"{value * 1e3:.1f}" for value in values)


def histogram(seconds: Sequence[float], edges: Sequence[float]) -> str:
    """How many lie below each edge (in seconds) and not below the one before."""
    parts, low = [], 0.0
    for edge in (*edges, float("inf")):
        count = sum(low <= value < edge for value in seconds)
        name = f"<{edge * 1e3:g} ms" if edge < float("inf") else f">={low * 1e3:g} ms"
        parts.append(f"{name}: {count}")
        low = edge
    return ", ".join(parts)
