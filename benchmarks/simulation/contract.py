"""The contract K1 to K8, looked at in a simulated pool after every event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulation.sim_types import Broken, Mark
from omlx_admission.core.policy.model import Swap, Target

if TYPE_CHECKING:
    from benchmarks.simulation.world import World

#: Seconds for which free memory may lie idle while somebody waits for it: the pause
#: after refused loads, and an unload whose room is kept for the one in front.
PATIENCE_S = 12.0

#: Seconds after the announced moment for which a drain may wait for one that was refused.
LATE_S = 3.0


@dataclass(slots=True)
class Contract:
    """Raises :class:`Broken` with the key that was violated.

    Attributes:
        overhang: bytes above a ceiling that was lowered below what was loaded already.
    """

    world: World
    overhang: int = 0
    _could_work_since: float | None = None

    def check(self) -> None:
        """Raise :class:`Broken` where the state violates the contract."""
        policy = self.world.policy
        tracked = self.world.tracked()
        self.overhang = min(self.overhang, tracked)
        if (
            self.world.ceiling
            and not self.world.never_refuse
            and tracked > max(self.world.ceiling, self.overhang)
        ):
            raise Broken(f"K3: {tracked} bytes of {self.world.ceiling}")
        held = [m for m in self.world.models.values() if m.holds_memory]
        if self.world.max_models and len(held) > self.world.max_models:
            raise Broken(f"K3: {len(held)} models, {self.world.max_models} allowed")
        ours = {m.name for m in held if m.mark is Mark.OURS}
        if not ours <= policy.marked:
            raise Broken(f"K8: nobody remembers the marks on {ours - policy.marked}")
        loads = [
            s for s in (policy.swap, policy.concurrent_load) if s is not None and s.loading
        ]
        if len(loads) > 1 or (self.world.job is None) != (not loads):
            raise Broken(f"{len(loads)} loads in the policy, the pool has {self.world.job}")
        if policy.swap is not None and not policy.swap.loading:
            if policy.head(policy.swap.target) is None and not self._expected(policy.swap):
                raise Broken("K6: a swap for nobody")
        elif ours and not (loads and ours <= set(loads[0].victims)):
            raise Broken(f"K8: {ours} drain for nothing")
        self._check_work()
        if policy.gated:
            self._check_gates()
        if not policy.waiting and not loads and not policy.swap:
            left = ours if self.world.closing else policy.marked & {m.name for m in held}
            if policy.gated or left:
                raise Broken("K8: idle, yet a gate or mark is left")

    def _check_work(self) -> None:
        """Nobody waits for what could be had at once (K5), or without taking from others.

        The second with some patience: a refused load is tried again after up to a
        second, and room that settles is kept for the one it was made for.
        """
        policy = self.world.policy
        for target in policy.targets:
            if (
                self.world.is_ready(target)
                and target.model not in policy.gated
                and not self.world.models[target.model].full
            ):
                raise Broken(f"K5: {target} serves and is open, yet somebody waits for it")
        busy = (
            self.world.job is not None
            or policy.swap is not None
            or policy.concurrent_load is not None
        )
        if busy or not any(self._is_free_for(t) for t in policy.targets):
            self._could_work_since = None
        elif self._could_work_since is None:
            self._could_work_since = self.world.now
        elif self.world.now > self._could_work_since + PATIENCE_S:
            raise Broken(f"K7: idle since {self._could_work_since}, {policy.targets} wait")

    def _is_free_for(self, target: Target) -> bool:
        m = self.world.models.get(target.model)
        if m is None or m.holds_memory or m.exclusive or not m.registered:
            return False
        held = sum(x.holds_memory for x in self.world.models.values())
        if self.world.max_models and held >= self.world.max_models:
            return False
        used = self.world.tracked() + self.world.hard_residue + self.world.soft_residue
        return used + m.size <= self.world.ceiling

    def _check_gates(self) -> None:
        policy = self.world.policy
        swap = policy.swap
        if swap is not None and policy.head(swap.target) is None and self._expected(swap):
            return
        if policy.swap is None and policy.concurrent_load is None and not policy.waiting:
            raise Broken("K5: gated for nobody")
        for name in policy.gated:
            wanted = [
                t for t in policy.targets if t.model != name or not self.world.is_ready(t)
            ]
            if not wanted and not (swap is not None and swap.loading):
                raise Broken(f"K5: {name} is gated though nobody else waits")

    def _expected(self, swap: Swap) -> bool:
        """Whether one that was refused has been told to be back about now."""
        told = (
            r.ended + r.back_in
            for r in self.world.requests
            if r.target == swap.target and r.ended is not None and r.back_in is not None
        )
        return self.world.now <= max(told, default=-1.0) + LATE_S

    def check_idle(self) -> None:
        """K8 and K7 at the end: nobody waits, nothing is left."""
        self.check()
        policy = self.world.policy
        for request in self.world.requests:
            if request.outcome is None:
                raise Broken(f"K7: request {request.number} never got an outcome")
        if (
            policy.waiting
            or policy.swap
            or policy.concurrent_load
            or policy.gated
            or self.world.job
        ):
            raise Broken("K8: not idle at the end")
        for m in self.world.models.values():
            if m.leases or m.mark is Mark.OURS or m.loading:
                raise Broken(f"K8: {m} at the end")
