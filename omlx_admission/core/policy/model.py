"""The words of the policy: targets, waiters, what the pool looks like, what to do.

Sizes are bytes, times are seconds of one monotonic clock chosen by the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Target:
    """What a request wants resident: a model, in one load-time settings variant.

    Keyed by model id, never by a pool entry: a rescan replaces entries.
    ``variant`` is opaque; ``None`` is the model's own settings.
    """

    model: str
    variant: Hashable = None


class Outcome(enum.Enum):
    """How a waiter ended. Every waiter ends exactly once."""

    WAITING = "waiting"
    GRANTED = "granted"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"
    SHUT_DOWN = "shut down"


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in the queue. ``context`` belongs to the caller.

    ``keep`` are models that it uses itself: they cannot leave for it. One that is
    ``unpaced`` takes no place of the engine: it is granted as soon as the model serves.
    ``parked``: an answer that was taken out of its engine. It has no deadline, counts for
    no limit of the queue, and is granted as soon as its model is back.
    """

    sequence: int
    target: Target
    size: int
    enqueued: float
    deadline: float
    context: object = None
    outcome: Outcome = Outcome.WAITING
    keep: frozenset[str] = frozenset()
    unpaced: bool = False
    parked: bool = False


def places_for(slots: int) -> int:
    """Leases that an engine of ``slots`` concurrent requests is given while others wait.

    A few more than run at once, so that a slot which falls free has its next request
    at hand while the one after it is on its way. No more: what an engine has accepted
    without having begun it has to be sat out by the request that needs its memory, so a drain
    lasts about two answers, with one slot as with many.
    """
    return slots + min(max(1, slots // 4), 8)


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model that holds memory, as the pool sees it at this instant.

    Attributes:
        places: how many leases it may hold while requests for it wait; None is without
            limit.
        most: how many its engine takes before it refuses any.
        group: the exclusive group of the engine that runs.
        resting: seconds for which its load has had nothing on the load thread.
        read: bytes in use more than when its load began to read, as far as that is known.
        unread: leases that are held for answers which their clients do not read.
        sessions: leases of open realtime sessions, which may last for ever.
        answering: of a model that drains, for how many seconds the oldest answer has run;
            None where what it runs cannot be parked.
    """

    model: str
    size: int
    variant: Hashable = None
    busy: bool = False
    leases: int = 0
    pinned: bool = False
    loading: bool = False
    unloading: bool = False
    last_used: float = 0.0
    places: int | None = None
    most: int | None = None
    group: str | None = None
    resting: float = 0.0
    read: int = 0
    unread: int = 0
    sessions: int = 0
    answering: float | None = None

    @property
    def free(self) -> int | None:
        """How many requests it may still be given; None is without limit."""
        return None if self.places is None else max(0, self.places - self.leases)

    @property
    def target(self) -> Target:
        """What this model serves as it is loaded now."""
        return Target(self.model, self.variant)

    @property
    def evictable(self) -> bool:
        """Whether it may be asked to leave, at once or after a drain that has an end."""
        return not (self.pinned or self.loading or self.unloading or self.sessions)


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one instant.

    Attributes:
        models: models that hold memory: resident, loading or unloading.
        ready: targets that could be served at once (resident, right variant,
            neither loading nor unloading).
        unknown: targets whose model is no longer registered.
        ceiling: most bytes that models may hold at this instant; 0 is no limit. It moves
            with what the rest of the machine uses.
        fixed_ceiling: the part of it that no wait changes; 0 where that is not known.
        used: bytes in use as admission counts them, residue included.
        committed: bytes in use without reclaimable residue of unloaded models.
        parked: bytes that parked answers hold, which no unload gives back.
        never_refuse: the memory guard is off: evict as well as possible, then load.
        max_models: most models loaded, loading or unloading; 0 is no limit.
        helpers: models that do not count against it, loaded or wanted.
        exclusive: target to group, for those of which only one of a group may be loaded
            (helpers that change the process as a whole).
    """

    models: Mapping[str, ModelView]
    ready: frozenset[Target] = frozenset()
    unknown: frozenset[Target] = frozenset()
    ceiling: int = 0
    fixed_ceiling: int = 0
    used: int = 0
    committed: int = 0
    parked: int = 0
    never_refuse: bool = False
    max_models: int = 0
    helpers: frozenset[str] = frozenset()
    exclusive: Mapping[Target, str] = field(default_factory=dict)


EMPTY_VIEW = PoolView(models=MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Grant:
    """These waiters may use their model now; take their leases in this step."""

    target: Target
    waiters: tuple[Waiter, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """These busy models take no new requests until they are idle, then leave."""

    models: tuple[str, ...]
    target: Target


@dataclass(frozen=True, slots=True)
class Park:
    """Take what these models run out of their engines, each in ``most`` bytes (None: any
    number). What cannot be taken out drains on."""

    models: tuple[str, ...]
    target: Target
    most: int | None


@dataclass(frozen=True, slots=True)
class Undrain:
    """The drain of these models is withdrawn; they serve on."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Evict ``victims`` (all idle) and load ``target``; report with ``load_ended``."""

    target: Target
    victims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """The load of ``target`` waits for nothing: cancel it; report ``load_refused``."""

    target: Target


class RefusalReason(enum.Enum):
    """Why a waiter is refused by the policy itself."""

    NEVER_FITS = "never fits"
    NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class Refuse:
    """These waiters end now for ``reason``."""

    target: Target
    waiters: tuple[Waiter, ...]
    reason: RefusalReason


Action = Grant | Drain | Park | Undrain | Load | CancelLoad | Refuse


@dataclass(slots=True)
class Swap:
    """One transition: it drains busy victims first, or it loads."""

    target: Target
    size: int
    victims: tuple[str, ...]
    started: float
    reason: str
    loading: bool = False
    load_started: float = 0.0
    cancelled: bool = False
    #: Since when no drain would make room any more, because the ceiling fell.
    blocked_since: float | None = None
