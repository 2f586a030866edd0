"""Traces in virtual time: what arrives, and what came of it.

Services of text requests are lognormal, cut at 60 s; a swap takes 10 s, of
which 0.5 are the unload, and memory holds one model (or, where said, two).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.sim_types import Request
from benchmarks.simulation.simulator import Job, Simulator, Spec
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import places_for

#: Bytes of every model: 19 GB, which the prior expects to take 10 s.
SIZE = 19 * 10**9
_CEILING = SIZE + SIZE // 2

_SWAP_S, _UNLOAD_S = 10.0, 0.5

#: Steps of an agent, and the pause between two of them.
_STEPS, _THINK_S = 20, 1.5

#: Spread of the lognormal service times.
_SIGMA = 0.8
_LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run; times in seconds of virtual time."""

    swaps: int
    makespan: float
    waits: tuple[float, ...]
    arrivals: tuple[tuple[float, str], ...]
    services: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The longest wait."""
        return max(self.waits, default=0.0)


def make(policy: AdmissionPolicy, models: str, *, seed: int, slots: int = 8) -> Simulator:
    """A world with room for one of ``models`` (one letter each)."""
    places = places_for(slots)
    specs = [
        Spec(m, SIZE, load_s=_SWAP_S - _UNLOAD_S, slots=slots, places=places) for m in models
    ]
    return Simulator(policy, specs, _CEILING, seed, strict=False)


def result(sim: Simulator, services: list[float]) -> Result:
    """Collect a run; who still waits counts with the wait so far."""
    requests: list[Request] = sim.world.requests
    waits = tuple((r.ended if r.ended is not None else sim.now) - r.arrived for r in requests)
    return Result(
        sim.world.counts.swaps,
        sim.last_done,
        waits,
        tuple((r.arrived, r.target.model) for r in requests),
        tuple(services),
    )


def service(r: random.Random, mean: float, sigma: float = _SIGMA) -> float:
    """One lognormal service time."""
    return min(_LONGEST_S, r.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))


def burst(policy: AdmissionPolicy, seed: int = 0) -> Result:
    """ABCABC...: all at once, interleaved, 5 s each."""
    sim = make(policy, "ABC", seed=seed)
    for index in range(60):
        model = "ABC"[index % 3]
        sim.at(index * 1e-3, partial(sim.submit, model, Job(5.0)))
    sim.run()
    return result(sim, [5.0])


def agents(
    policy: AdmissionPolicy,
    seed: int = 0,
    *,
    spread: float = 0.6,
) -> Result:
    """Agents that take turns with their thoughts, one on each model.

    ``spread`` is the sigma of the lognormal service times; 0 makes all of them equal.
    """
    sim = make(policy, "ABC", seed=seed)
    r = random.Random(seed)
    services: list[float] = []

    def agent(model: str, left: int) -> None:
        if left == 0:
            return
        seconds = service(r, 5.0, spread) if spread else 5.0
        services.append(seconds)

        def done(_request: Request) -> None:
            sim.at(sim.now + _THINK_S, lambda: agent(model, left - 1))

        sim.submit(model, Job(seconds, then=done))

    for model in "ABC":
        sim.at(0.0, partial(agent, model, _STEPS))
    sim.run()
    sim.world.check_idle()
    return result(sim, services)


def serial_s(outcome: Result) -> float:
    """Seconds that the same agents take one after another: the reference of a makespan."""
    models = len({m for _, m in outcome.arrivals})
    return sum(outcome.services) + models * ((_STEPS - 1) * _THINK_S + _SWAP_S)


def open_arrivals(
    policy: AdmissionPolicy,
    rates: Mapping[str, float],
    seed: int = 0,
    *,
    horizon_s: float = 20_000.0,
    finish: bool = False,
) -> Result:
    """Poisson arrivals at ``rates`` per second and model, over ``horizon_s`` seconds.

    ``finish``: serve everybody who arrived, instead of stopping at the horizon.
    """
    sim = make(policy, "".join(rates), seed=seed)
    r = random.Random(seed)
    services: list[float] = []
    for model, rate in rates.items():
        time = r.expovariate(rate)
        while time < horizon_s:
            seconds = service(r, 8.0)
            services.append(seconds)
            sim.at(time, partial(sim.submit, model, Job(seconds)))
            time += r.expovariate(rate)
    sim.run() if finish else sim.run(until=horizon_s)
    return result(sim, services)


def overlap(
    policy: AdmissionPolicy,
    seed: int = 0,
    *,
    horizon_s: float = 3600.0,
    clients: int = 2,
    models: str = "AB",
    slots: int = 8,
) -> Result:
    """Clients that keep the first model in use without a gap, and others now and then.

    Each of ``clients`` on the first model sends again the moment it is answered; every
    other model gets a request every few minutes. Only the waits of the latter count.
    """
    sim = make(policy, models, seed=seed, slots=slots)
    r = random.Random(seed)
    services: list[float] = []
    others: list[Request] = []

    def loop(_request: Request | None = None) -> None:
        if sim.now < horizon_s:
            seconds = service(r, 8.0)
            services.append(seconds)
            sim.submit(models[0], Job(seconds, then=loop))

    def other(model: str) -> None:
        if sim.now >= horizon_s:
            return
        seconds = service(r, 8.0)
        services.append(seconds)
        others.append(sim.submit(model, Job(seconds)))
        sim.at(sim.now + r.expovariate(1 / 200), lambda: other(model))

    for _ in range(clients):
        sim.at(r.random(), loop)
    for model in models[1:]:
        sim.at(r.uniform(1, 60), partial(other, model))
    sim.run(until=horizon_s)
    collected = result(sim, services)
    waits = tuple((q.ended if q.ended is not None else sim.now) - q.arrived for q in others)
    return Result(
        collected.swaps,
        collected.makespan,
        waits,
        collected.arrivals,
        collected.services,
    )


def bound_s(outcome: Result, *, age_s: float, models: int, queued: int, slots: int) -> float:
    """W + R + (M-2)(S + ceil(q/C) R) + S: the longest wait that the policy allows."""
    longest = max(outcome.services)
    turns = (models - 2) * (_SWAP_S + math.ceil(queued / slots) * longest)
    return age_s + longest + turns + _SWAP_S
