"""The policy in virtual time: faults at random, bounds, and few swaps."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import pytest

from benchmarks.simulation import chaos
from benchmarks.simulation.optimum import fewest_swaps
from benchmarks.simulation.retry import expired, full_queue
from benchmarks.simulation.sim_types import Broken
from benchmarks.simulation.traces import (
    agents,
    bound_s,
    burst,
    open_arrivals,
    overlap,
    serial_s,
)
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials

pytestmark = pytest.mark.slow

ours = AdmissionPolicy


def exhaustive() -> AdmissionPolicy:
    """The rule of Ollama, llama-swap and the llama.cpp router: the loaded model serves
    until it is idle."""
    return AdmissionPolicy(Dials(max_age=1e12, linger=0.0, budget=1e12))


class TestChaos:
    @pytest.mark.parametrize("block", range(5))
    def test_no_violation_whatever_happens(self, block: int) -> None:
        for seed in range(block * 60, block * 60 + 60):
            chaos.run(seed)

    def test_a_seed_replays_exactly(self) -> None:
        first, second = chaos.Chaos(7), chaos.Chaos(7)
        first.play(200)
        second.play(200)
        assert first.world.log
        assert first.world.log == second.world.log
        assert [r.outcome for r in first.world.requests] == [
            r.outcome for r in second.world.requests
        ]

    def test_the_seeds_meet_every_kind_of_event(self) -> None:
        """A random test proves nothing about what it never does."""
        seen: set[str] = set()
        totals = {"drains": 0, "withdrawn": 0, "refused_loads": 0, "failed_loads": 0}
        for seed in range(60):
            run = chaos.Chaos(seed)
            run.play(100)
            seen.update(str(r.outcome) for r in run.world.requests)
            for name in totals:
                totals[name] += getattr(run.world.counts, name)
        assert len(seen) == 6, seen
        assert min(totals.values()) > 10, totals

    @pytest.mark.parametrize(
        ("broken", "key"),
        [
            ("_unmark_spared", "K8"),
            ("_grant_ready", "K5"),
            ("_start_swap", "K7"),
        ],
    )
    def test_it_finds_a_policy_that_forgets_a_step(
        self, broken: str, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The view as it was, where one is returned.
        monkeypatch.setattr(AdmissionPolicy, broken, lambda *args, **_kwargs: args[1])

        def play() -> None:
            for seed in range(300):
                chaos.run(seed)

        with pytest.raises(Broken, match=key):
            play()


class TestBound:
    @pytest.mark.parametrize("seed", range(6))
    def test_b04_an_overlapped_resident_does_not_starve_the_other(self, seed: int) -> None:
        """A virtual hour without a gap on A; every wait of B stays within the bound."""
        run = overlap(ours(), seed)
        assert len(run.waits) > 5
        assert run.worst <= bound_s(run, age_s=140.0, models=2, queued=0, slots=8)

    @pytest.mark.parametrize("seed", range(3))
    def test_nor_two_others(self, seed: int) -> None:
        run = overlap(ours(), seed, models="ABC")
        assert run.worst <= bound_s(run, age_s=140.0, models=3, queued=8, slots=8)

    def test_it_is_the_gate_that_does_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(AdmissionPolicy, "_closed_models", lambda *_args: frozenset())
        assert overlap(ours(), 0).worst > 3000

    def test_the_rule_of_the_peers_starves_it(self) -> None:
        assert overlap(exhaustive(), 0).worst > 3000


class TestSwaps:
    def test_a_burst_costs_one_swap_a_model(self) -> None:
        run = burst(ours())
        assert run.swaps == 3
        assert len(run.waits) == 60

    def test_agents_that_take_turns(self) -> None:
        """Limits for the means over seeds: 10 swaps, 1.143 times serial, 170 s."""
        runs = [agents(ours(), seed) for seed in range(10)]
        assert mean(r.swaps for r in runs) <= 10
        assert mean(r.makespan / serial_s(r) for r in runs) <= 475 / 415.5
        assert max(r.worst for r in runs) <= 170

    def test_equal_agents(self) -> None:
        run = agents(ours(), spread=0.0)
        assert run.swaps <= 10
        assert run.makespan <= 475
        assert run.worst <= 170

    def test_hot_and_cold(self) -> None:
        rates = {"H": 0.4, "C": 0.02, "D": 0.02}
        mine = [open_arrivals(ours(), rates, seed, horizon_s=8000) for seed in range(3)]
        theirs = [open_arrivals(exhaustive(), rates, seed, horizon_s=8000) for seed in range(3)]
        assert max(r.worst for r in mine) <= max(r.worst for r in theirs) / 2
        assert sum(r.swaps for r in mine) <= 1.2 * sum(r.swaps for r in theirs)

    @pytest.mark.parametrize(
        "rates",
        [
            {"H": 0.4, "C": 0.02, "D": 0.02},
            {"A": 0.05, "B": 0.05, "C": 0.05},
            {"A": 0.01, "B": 0.01},
            {"A": 0.3, "B": 0.3},
        ],
        ids=["hot and cold", "three balanced", "two sparse", "two loaded"],
    )
    def test_against_the_optimum_that_delays_nobody_further(
        self, rates: dict[str, float]
    ) -> None:
        ratios = []
        for seed in range(3):
            run = open_arrivals(ours(), rates, seed, horizon_s=2400, finish=True)
            ratios.append(run.swaps / fewest_swaps(run.arrivals, run.waits))
        assert mean(ratios) <= 1.5
        assert max(ratios) <= 3

    def test_against_the_optimum_with_a_common_delay_under_load(self) -> None:
        ratios = []
        for rates in ({"A": 0.3, "B": 0.3}, {"H": 0.8, "C": 0.01}):
            for seed in range(3):
                run = open_arrivals(ours(), rates, seed, horizon_s=2400, finish=True)
                ratios.append(run.swaps / fewest_swaps(run.arrivals, 140.0))
        assert mean(ratios) <= 1.5
        assert max(ratios) <= 3


class TestRetryAfter:
    @pytest.mark.parametrize(
        "refusals",
        [
            lambda: expired("hot and cold", 60.0, 1),
            lambda: expired("three, overloaded", 90.0, 1),
            lambda: full_queue(2),
        ],
        ids=["hot and cold", "overloaded", "queue full"],
    )
    def test_who_waits_it_is_admitted_nine_times_in_ten(
        self, refusals: Callable[[], list]
    ) -> None:
        found = refusals()
        assert len(found) >= 200
        assert mean(r.admitted for r in found) >= 0.9
        assert all(1 <= r.told <= 60 for r in found)
