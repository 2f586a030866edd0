"""Rules beside each other, simulated: ``python -m benchmarks.compare`` (some minutes).

Our policy, the rule of its peers (exhaustive) and gated service on the same traces, and
our swaps beside the fewest that a clairvoyant needs. ``tests/policy/test_simulation.py``
holds a short profile of it to the same limits. 1 where an aim was missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import mean

from benchmarks.simulation.optimum import fewest_swaps
from benchmarks.simulation.policies import POLICIES
from benchmarks.simulation.retry import LOADS, Retry, expired, full_queue
from benchmarks.simulation.traces import (
    Result,
    agents,
    bound_s,
    burst,
    open_arrivals,
    overlap,
    serial_s,
)
from benchmarks.table import Row, render
from omlx_admission.core.policy.admission import AdmissionPolicy

Run = Callable[[AdmissionPolicy, int], Result]

#: How much is simulated: seeds of agents and of open arrivals, traces for the optimum.
_AGENTS, _SEEDS, _TRACES, _HORIZON_S = 30, 5, 10, 20_000.0

#: W of our policy for a swap of 10 s, from ``Dials.age_for``.
_W_S = 140.0

#: Longest makespan of the agents in multiples of doing them one after another: 475 s
#: where that takes 415.5 s.
_MAKESPAN = 475 / 415.5


def rows() -> Iterator[Row]:
    """All simulated rows, one after another as they are ready."""
    yield from _burst()
    yield from _agents(10.0, 0.0)
    yield from _agents(10.0, 0.6)
    yield from _agents(30.0, 0.6)
    yield from _open("hot 0.4/s + 2 cold 0.02/s", {"H": 0.4, "C": 0.02, "D": 0.02}, True)
    yield from _open("hot 0.8/s + cold 0.01/s", {"H": 0.8, "C": 0.01}, False)
    yield from _open("3 balanced 0.05/s", {"A": 0.05, "B": 0.05, "C": 0.05}, False)
    yield _overlap()
    yield from _optimum()
    yield from _retry()


def _all(run: Run, seeds: int) -> dict[str, list[Result]]:
    return {
        name: [run(make(), seed) for seed in range(seeds)] for name, make in POLICIES.items()
    }


def _burst() -> Iterator[Row]:
    found = {name: runs[0] for name, runs in _all(burst, 1).items()}
    on = "simulated, swap 10 s, 8 slots, 5 s each"
    yield Row(
        "ABCABC x 60 at once: swaps",
        {name: str(r.swaps) for name, r in found.items()},
        on,
        "3",
        found["ours"].swaps == 3,
    )
    yield Row(
        "ABCABC x 60 at once: makespan s",
        {name: f"{r.makespan:.0f}" for name, r in found.items()},
        on,
    )


def _agents(swap_s: float, spread: float) -> Iterator[Row]:
    """Limits for a swap of 10 s: for the means over seeds, and for the worst wait of all."""

    def run(policy: AdmissionPolicy, seed: int) -> Result:
        return agents(policy, seed, swap_s=swap_s, spread=spread)

    found = _all(run, _AGENTS)
    kind = f"lognormal (sigma {spread:g})" if spread else "equal"
    on = f"simulated, {_AGENTS} seeds, think 1.5 s, services {kind}, mean 5 s"
    name = f"3 agents x 20 steps, swap {swap_s:.0f} s, {'uneven' if spread else 'even'}"
    ours, limited = found["ours"], swap_s == 10.0
    swaps = mean(r.swaps for r in ours)
    yield Row(
        f"{name}: swaps, mean (most)",
        {
            n: f"{mean(r.swaps for r in q):.1f} ({max(r.swaps for r in q)})"
            for n, q in found.items()
        },
        on,
        "<= 10" if limited else "",
        swaps <= 10 if limited else None,
    )
    makespan = mean(r.makespan for r in ours)
    serial = mean(serial_s(r, swap_s=swap_s) for r in ours)
    yield Row(
        f"{name}: makespan s, mean (serially {serial:.0f})",
        {n: f"{mean(r.makespan for r in q):.0f}" for n, q in found.items()},
        on,
        f"<= {serial * _MAKESPAN:.0f}" if limited else "",
        makespan <= serial * _MAKESPAN if limited else None,
    )
    worst = max(r.worst for r in ours)
    yield Row(
        f"{name}: worst wait s, mean (most)",
        {
            n: f"{mean(r.worst for r in q):.0f} ({max(r.worst for r in q):.0f})"
            for n, q in found.items()
        },
        on,
        "<= 170" if limited else "",
        worst <= 170 if limited else None,
    )


def _open(what: str, rates: dict[str, float], limited: bool) -> Iterator[Row]:
    def run(policy: AdmissionPolicy, seed: int) -> Result:
        return open_arrivals(policy, rates, seed, horizon_s=_HORIZON_S)

    found = _all(run, _SEEDS)
    hours = _HORIZON_S / 3600
    per_hour = {n: mean(r.swaps for r in q) / hours for n, q in found.items()}
    worst = {n: max(r.worst for r in q) for n, q in found.items()}
    on = f"simulated, swap 10 s, {_SEEDS} x {_HORIZON_S:.0f} s"
    yield Row(
        f"{what}: swaps/h",
        {n: f"{value:.1f}" for n, value in per_hour.items()},
        on,
        "<= 1.2 exhaustive" if limited else "",
        per_hour["ours"] <= 1.2 * per_hour["exhaustive"] if limited else None,
    )
    yield Row(
        f"{what}: wait s, mean / p99",
        {
            n: f"{mean(r.mean for r in q):.0f} / {mean(r.quantile(0.99) for r in q):.0f}"
            for n, q in found.items()
        },
        on,
    )
    yield Row(
        f"{what}: worst wait s",
        {n: f"{value:.0f}" for n, value in worst.items()},
        on,
        "<= half of exhaustive" if limited else "",
        worst["ours"] <= worst["exhaustive"] / 2 if limited else None,
    )


def _overlap() -> Row:
    found = _all(overlap, _AGENTS)
    kept = all(
        r.worst <= bound_s(r, age_s=_W_S, swap_s=10.0, models=2, queued=0, slots=8)
        for r in found["ours"]
    )
    return Row(
        "A in use without a gap for 1 h: worst wait for B s",
        {name: f"{max(r.worst for r in runs):.0f}" for name, runs in found.items()},
        f"simulated, swap 10 s, {_AGENTS} seeds",
        "<= W + R + S in all seeds",
        kept,
    )


def _optimum() -> Iterator[Row]:
    """Swaps against the fewest that a clairvoyant needs, by dynamic programming."""
    on = f"simulated, {_TRACES} x 3600 s a trace, finished"
    families: dict[str, dict[str, float]] = {
        "hot and cold": {"H": 0.4, "C": 0.02, "D": 0.02},
        "hotter and cold": {"H": 0.8, "C": 0.01},
        "two loaded": {"A": 0.3, "B": 0.3},
        "three loaded": {"A": 0.2, "B": 0.2, "C": 0.2},
        "three balanced": {"A": 0.05, "B": 0.05, "C": 0.05},
        "two sparse": {"A": 0.01, "B": 0.01},
    }
    same: list[float] = []
    loaded: list[float] = []
    light: list[float] = []
    for name, rates in families.items():
        for seed in range(_TRACES):
            run = open_arrivals(POLICIES["ours"](), rates, seed, horizon_s=3600.0, finish=True)
            same.append(run.swaps / fewest_swaps(run.arrivals, run.waits))
            ratio = run.swaps / fewest_swaps(run.arrivals, _W_S)
            (light if name in ("three balanced", "two sparse") else loaded).append(ratio)
    for what, ratios, count in (
        ("where nobody may wait longer, mean (worst)", same, 6),
        ("where all may wait W, loaded traces", loaded, 4),
    ):
        yield Row(
            f"swaps / fewest {what}",
            {"ours": f"{mean(ratios):.2f} ({max(ratios):.2f})"},
            f"{on}, {count} families",
            "<= 1.5 (3)",
            mean(ratios) <= 1.5 and max(ratios) <= 3,
        )
    yield Row(
        "swaps / fewest where all may wait W, light traces",
        {"ours": f"{mean(light):.2f} ({max(light):.2f})"},
        on + ", 2 families; an idle model is given up at once instead of making others wait",
    )


def _retry() -> Iterator[Row]:
    seeds = max(1, _SEEDS - 2)
    for budget in (60.0, 90.0, 120.0):
        found = [r for load in LOADS for r in expired(load, budget, seeds)]
        on = f"simulated, {len(LOADS)} loads, swap 10 s, server's own limit 300 s"
        yield _retry_row(f"refused after {budget:.0f} s", found, on)
    on = "simulated, bursts of twice the queue on 3 models, swap 10 s"
    yield _retry_row("refused by a full queue", full_queue(4 * seeds), on)


def _retry_row(what: str, found: list[Retry], on: str) -> Row:
    share = mean(r.admitted for r in found)
    return Row(
        f"{what}: first retry after Retry-After admitted",
        {"ours": f"{share:.1%} of {len(found)}"},
        on,
        ">= 90 %",
        share >= 0.9,
    )


def main() -> int:
    """Entry point; see the module's text."""
    found = []
    for row in rows():
        print(f"... {row.what}", file=sys.stderr, flush=True)
        found.append(row)
    print(render(found))
    return int(any(row.kept is False for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
