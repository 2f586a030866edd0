"""What a simulated pool is made of: its models, its requests, the load that runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from omlx_admission.core.policy.model import Outcome, Target, Waiter


class Broken(AssertionError):
    """The contract was violated; the text says which key."""


class Mark(enum.Enum):
    """Who asked a busy model to leave."""

    OURS = "ours"
    FOREIGN = "the enforcer or an administrator"


@dataclass(slots=True)
class Model:
    """One registered model. ``strays`` are users without a lease (speech, aborted work)."""

    name: str
    size: int
    pinned: bool = False
    registered: bool = True
    exclusive: str | None = None
    resident: bool = False
    loading: bool = False
    unloading: bool = False
    variant: object = None
    leases: int = 0
    strays: int = 0
    mark: Mark | None = None
    last_used: float = 0.0
    places: int | None = None
    resting: float = 0.0
    read: int = 0

    @property
    def busy(self) -> bool:
        return self.leases > 0 or self.strays > 0

    @property
    def full(self) -> bool:
        """Whether its engine is given no more while others wait."""
        return self.places is not None and self.leases >= self.places

    @property
    def holds_memory(self) -> bool:
        return self.resident or self.loading or self.unloading


@dataclass(slots=True, eq=False)
class Request:
    """One call of ``get_engine`` by a client, and what became of it."""

    number: int
    target: Target
    arrived: float
    budget: float
    outcome: Outcome | None = None
    ended: float | None = None
    waiter: Waiter | None = None
    holds_lease: bool = False
    context: object = None
    back_in: float | None = None

    @property
    def waited(self) -> float:
        """Seconds from arrival to the outcome."""
        assert self.ended is not None
        return self.ended - self.arrived


@dataclass(slots=True)
class LoadJob:
    """The task that carries out one ``Load``: evictions one by one, then the load."""

    target: Target
    size: int
    victims: list[str]
    started: float
    stage: str = "created"
    unload: str | None = None


@dataclass(slots=True)
class Counts:
    """What happened; a swap is a completed load."""

    steps: int = 0
    swaps: int = 0
    refused_loads: int = 0
    failed_loads: int = 0
    drains: int = 0
    withdrawn: int = 0
