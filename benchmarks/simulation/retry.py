"""Is ``Retry-After`` true? Who is refused comes back once, exactly when it was told to.

Clients of the traces have a wait budget; whoever is refused, because the budget
ended or the queue was full, waits the ``Retry-After`` it was given, rounded,
jittered and capped as the server does it, and asks once more with the same budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.simulation.sim_types import Request
from benchmarks.simulation.simulator import Job, Simulator
from benchmarks.simulation.traces import SIZE, make, service
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import Outcome


@dataclass(frozen=True, slots=True)
class Retry:
    """One refusal: the seconds that were told, and whether the retry was admitted."""

    model: str
    told: int
    admitted: bool


@dataclass(slots=True, eq=False)
class _Attempt(Job):
    told: int | None = None


def _header(seconds: float, r: random.Random) -> int:
    """As ``omlx_admission.core.refusal.retry_after``, from the simulation's seed."""
    return max(1, min(60, math.ceil(max(1.0, seconds) * r.uniform(1.0, 1.2))))


class Experiment:
    """One run.

    Args:
        client_budget_s: how long a request may wait.
        server_budget_s: the server's own limit, from which the policy takes its dials.
    """

    def __init__(
        self,
        seed: int,
        *,
        models: str,
        client_budget_s: float,
        server_budget_s: float = 300.0,
        max_queue: int = 512,
    ) -> None:
        self.results: list[Retry] = []
        self.random = random.Random(seed)
        self.budget = client_budget_s
        self.policy = AdmissionPolicy(Dials(budget=server_budget_s))
        self.sim: Simulator = make(self.policy, models, seed=seed)
        self.sim.world.max_queue = max_queue
        self.sim.world.refusing = self._refusing

    def arrivals(self, rates: Mapping[str, float], horizon_s: float) -> list[Retry]:
        """Poisson arrivals; then let everything end."""
        for model, rate in rates.items():
            time = self.random.expovariate(rate)
            while time < horizon_s:
                self.at(time, model, service(self.random, 8.0))
                time += self.random.expovariate(rate)
        self.sim.run()
        return self.results

    def at(self, time: float, model: str, seconds: float) -> None:
        """One request at ``time``."""
        self.sim.at(time, lambda: self._ask(model, _Attempt(seconds, then=self._refused)))

    def _ask(self, model: str, attempt: _Attempt) -> None:
        self.sim.submit(model, attempt, budget=self.budget)

    def _refusing(self, request: Request) -> float | None:
        attempt = request.context
        if not isinstance(attempt, _Attempt):
            return None
        targets = (*self.policy.targets, request.target)
        waited = request.waiter is not None
        seconds = self.policy.retry_in(
            request.target,
            SIZE,
            self.sim.world.view(targets),
            self.sim.now,
            request.budget if waited else 0.0,
        )
        attempt.told = _header(seconds, self.random)
        return attempt.told

    def _refused(self, request: Request) -> None:
        attempt = request.context
        if not isinstance(attempt, _Attempt) or attempt.told is None:
            return
        model, told, seconds = request.target.model, attempt.told, attempt.service

        def ended(again: Request) -> None:
            admitted = again.outcome is Outcome.GRANTED
            self.results.append(Retry(model, told, admitted))

        self.sim.at(
            self.sim.now + told, lambda: self._ask(model, _Attempt(seconds, then=ended))
        )


#: Traces of the experiment: arrivals per second and model.
LOADS: dict[str, dict[str, float]] = {
    "hot and cold": {"H": 0.4, "C": 0.02, "D": 0.02},
    "three, overloaded": {"A": 0.2, "B": 0.2, "C": 0.2},
}


def expired(load: str, budget_s: float, seeds: int, horizon_s: float = 4000.0) -> list[Retry]:
    """Refusals by the end of a client's budget, over some seeds."""
    found: list[Retry] = []
    for seed in range(seeds):
        rates = LOADS[load]
        run = Experiment(seed, models="".join(rates), client_budget_s=budget_s)
        found += run.arrivals(rates, horizon_s)
    return found


def full_queue(seeds: int, max_queue: int = 30, burst: int = 60) -> list[Retry]:
    """Refusals by a full queue: bursts of twice its size, one every ten minutes.

    Far larger bursts cannot be told the truth: ``Retry-After`` ends at 60 s, and no more
    places become free in that time.
    """
    found: list[Retry] = []
    for seed in range(seeds):
        run = Experiment(seed, models="ABC", client_budget_s=300.0, max_queue=max_queue)
        for index in range(5):
            for _ in range(burst):
                model = run.random.choice("ABC")
                run.at(index * 600.0 + run.random.random(), model, service(run.random, 5.0))
        run.sim.run()
        found += run.results
    return found
