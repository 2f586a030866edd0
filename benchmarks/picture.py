"""Waits against swaps, as a picture: where each rule lies, and the curve of our dial W."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.compare import Effort
from benchmarks.simulation.policies import POLICIES
from benchmarks.simulation.traces import open_arrivals
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials

_TRACES = {
    "hot 0.4/s, two cold 0.02/s": {"H": 0.4, "C": 0.02, "D": 0.02},
    "hot 0.8/s, cold 0.01/s": {"H": 0.8, "C": 0.01},
    "three balanced 0.05/s": {"A": 0.05, "B": 0.05, "C": 0.05},
}
_AGES_S = (0.0, 30.0, 60.0, 100.0, 140.0, 200.0, 400.0)
_MARKERS = {"ours": "*", "exhaustive": "s", "gated": "o", "strict FCFS": "X"}


def draw(path: Path, effort: Effort) -> None:
    """Write the PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_TRACES), figsize=(15, 5), layout="constrained")
    hours = effort.horizon_s / 3600
    for axis, (title, rates) in zip(axes, _TRACES.items(), strict=True):

        def point(make: object, rates: dict[str, float] = rates) -> tuple[float, float]:
            assert callable(make)
            runs = [
                open_arrivals(make(), rates, seed, horizon_s=effort.horizon_s)
                for seed in range(effort.seeds)
            ]
            return mean(r.swaps for r in runs) / hours, max(r.worst for r in runs)

        curve = [point(lambda age=age: AdmissionPolicy(Dials(max_age=age))) for age in _AGES_S]
        axis.plot(*zip(*curve, strict=True), color="0.7", zorder=1, label="ours, W by hand")
        for (swaps, worst), age in zip(curve, _AGES_S, strict=True):
            axis.annotate(f"{age:.0f}", (swaps, worst), fontsize=7, color="0.4")
        for name, make in POLICIES.items():
            swaps, worst = point(make)
            size = 220 if name == "ours" else 70
            axis.scatter(swaps, worst, marker=_MARKERS[name], s=size, label=name, zorder=2)
        axis.set(title=title, xlabel="swaps per hour", ylabel="worst wait, s", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(
        f"Waits against swaps, simulated: swap 10 s, 8 slots, {effort.seeds} seeds of "
        f"{effort.horizon_s:.0f} s"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
