"""Everything at once, from one seed: clients that leave, faults, rescans, other unloads.

:func:`run` plays one seed and returns how many events it took; it raises
:class:`~benchmarks.simulation.world.Broken` at the first violation of the contract.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.simulation.sim_types import Broken, Mark, Request
from benchmarks.simulation.simulator import Job, Simulator, Spec
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import Outcome, Target, places_for

#: Names and sizes (per cent of the ceiling) as in the public cases.
_ZOO = (("A", 60), ("B", 60), ("C", 60), ("D", 30), ("E", 10), ("W", 10), ("P", 30), ("X", 120))
_CEILING = 100


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely each fault is per opportunity, drawn once a seed."""

    refused: float
    failed: float
    hang: float
    stuck_unload: float
    residue: float
    leave: float
    disturb: float


class Chaos:
    """One seed's scenario."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        specs = [
            Spec(
                name,
                size,
                load_s=r.choice([0.05, 0.5, 3.0, 9.0]),
                unload_s=r.choice([0.0, 0.05, 0.5, 2.0]),
                slots=(slots := r.choice([1, 2, 8])),
                places=r.choice([None, places_for(slots)]),
                pinned=name == "P" and r.random() < 0.5,
                exclusive="hooks" if r.random() < 0.1 else None,
            )
            for name, size in r.sample(_ZOO, r.randint(2, 6))
        ]
        self.budget = r.choice([0.5, 4.0, 30.0, 300.0])
        dials = Dials(
            max_age=r.choice([None, None, 0.0, 1.0, 20.0, 1e9]),
            linger=r.choice([None, None, 0.0, 2.0]),
            budget=self.budget,
        )
        self.policy = AdmissionPolicy(dials)
        self.sim = Simulator(
            self.policy,
            specs,
            _CEILING,
            seed,
            max_models=r.choice([0, 0, 0, 1, 2, 3]),
            max_queue=r.choice([2, 8, 100]),
            never_refuse=r.random() < 0.1,
        )
        self.world = self.sim.world
        self.world.fixed_ceiling = _CEILING
        self.world.tracks_loading = r.random() < 0.5
        self.faults = Faults(
            refused=r.choice([0, 0, 0.1, 0.7]),
            failed=r.choice([0, 0, 0.1, 0.5]),
            hang=r.choice([0, 0, 0.05, 0.3]),
            stuck_unload=r.choice([0, 0, 0.05]),
            residue=r.choice([0, 0.2]),
            leave=r.choice([0, 0.2, 0.8]),
            disturb=r.choice([0, 0.1, 0.4]),
        )
        self.variants = {s.name: r.choice([1, 1, 2, 3]) for s in specs}
        self.sim.load_result = self._load_result
        self.world.refusing = self._refusing
        self.sim.unload_seconds = self._unload_seconds
        self._names = [s.name for s in specs]
        self._stop = False

    # -- faults of the pool -------------------------------------------------

    def _load_result(self, _model: str) -> str:
        x = self.random.random()
        for name in ("refused", "failed", "hang"):
            x -= getattr(self.faults, name)
            if x < 0:
                return "ok" if self._stop and name == "hang" else name
        return "ok"

    def _refusing(self, _request: Request) -> float | None:
        return self.random.choice([None, 1.0, 20.0])

    def _unload_seconds(self, model: str) -> float:
        if not self._stop and self.random.random() < self.faults.stuck_unload:
            return 1000.0
        if self.random.random() < self.faults.residue:
            self.sim.at(self.sim.now, self._residue)
        return self.sim.specs[model].unload_s

    def _residue(self) -> None:
        world, amount = self.world, self.random.choice([5, 30])
        hard = world.tracked() + world.hard_residue + amount <= _CEILING
        kind = "hard" if hard and self.random.random() < 0.5 else "soft"
        kwargs = {kind: amount}
        world.add_residue(**kwargs)
        self.sim.at(self.sim.now + self.random.expovariate(1), lambda: world.settle(**kwargs))

    # -- what others do to the pool -----------------------------------------

    def _disturb(self) -> None:
        r, world = self.random, self.world
        m = world.models[r.choice(self._names)]
        match r.randrange(7):
            case 0 if m.resident and not m.busy and not m.unloading:
                world.begin_unload(m.name)
                world.changed()
            case 1 if m.resident and m.busy and not m.unloading:
                m.mark = Mark.FOREIGN
            case 2:
                m.pinned = not m.pinned
                world.changed()
            case 3 if not m.holds_memory:
                m.registered = not m.registered
                world.changed()
            case 4 if m.resident and not m.unloading and m.mark is None:
                world.stray_begins(m.name)
                self.sim.at(
                    self.sim.now + r.choice([0.01, 1, 50]), lambda: world.stray_ends(m.name)
                )
            case 5:
                world.set_ceiling(r.choice([_CEILING, _CEILING, 70]))
            case 6 if world.policy.waiting:
                world.probe()

    # -- clients ------------------------------------------------------------

    def _arrive(self) -> None:
        if self._stop:
            return
        r = self.random
        for _ in range(r.choice([1, 1, 1, 2, 5])):
            name = r.choice(self._names)
            variant = r.randrange(self.variants[name]) or None
            service = r.choice([0.0, 0.3, 5.0]) if r.random() > 0.02 else 3000.0
            patience = r.expovariate(1 / 4) if r.random() < self.faults.leave else None
            if patience is not None and r.random() < 0.2:
                patience = 0.0
            again = r.random() < 0.3
            self.sim.submit(
                Target(name, variant),
                Job(service, patience, self._come_back if again else (lambda _request: None)),
                budget=r.choice([self.budget, self.budget, 0.0, 0.2]),
            )
        if r.random() < self.faults.disturb:
            self._disturb()
        if r.random() < 0.3:
            self.sim.at(self.sim.now + r.expovariate(2), self.world.probe)
        self._check_estimates()
        self.sim.at(self.sim.now + r.choice([0.0, r.expovariate(1), 5.0]), self._arrive)

    def _check_estimates(self) -> None:
        view = self.world.view(self.policy.targets)
        for target in self.policy.targets:
            size = self.sim.specs[target.model].size
            seconds = self.policy.estimate(target, size, view, self.sim.now)
            if not 0 <= seconds < 2e9:
                raise Broken(f"{target} is expected in {seconds} s")

    def _come_back(self, request: Request) -> None:
        if not self._stop and request.outcome is not Outcome.SHUT_DOWN:
            self.sim.at(self.sim.now + self.random.expovariate(1), self._arrive)

    # -- one seed -----------------------------------------------------------

    def play(self, events: int) -> int:
        """Play about ``events`` events, let all end, and look that nothing is left."""
        self.sim.at(0.0, self._arrive)
        self.sim.run(events=events)
        self._stop = True
        if self.random.random() < 0.1:
            self.world.shut_down()
        self.sim.run(events=events + 20_000)
        if self.sim.pending:
            raise Broken("livelock: events without end")
        if self.world.job is not None:
            # It hangs and nobody waits for it: its thread returns at last.
            self.world.cancel_load()
        self.world.check_idle()
        return self.sim.events


def run(seed: int, events: int = 100) -> int:
    """Play one seed; see the module's text."""
    return Chaos(seed).play(events)
