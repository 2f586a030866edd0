"""Swap and drain times of each model, from what was observed; and the two dials."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Seconds per byte of a load before anything was observed: 2 GB/s, the rate of
#: the 19.19 GB load in 9.7 s reported in oMLX issue 1970.
PRIOR_SECONDS_PER_BYTE = 1 / 2e9

#: Weight of a new observation. Loads vary with the page cache, so neither the
#: first (cold) nor the last one alone should decide.
_WEIGHT = 0.3

#: Seconds assumed for an unload before one was seen: oMLX's own settle loop
#: rounds take 0.5 s.
_PRIOR_UNLOAD_S = 0.5

#: W in swaps: of a target that comes back at once, and of one that is rarely asked for.
_SWAPS = 14.0
_RARE_SWAPS = 4.0

#: Seconds assumed until a busy model is idle before one was seen draining.
_PRIOR_DRAIN_S = 5.0

#: Seconds assumed between two answers of a model whose places are all taken.
_PRIOR_GAP_S = 1.0


@dataclass(slots=True)
class Estimates:
    """Moving averages in seconds, per model; safe to ask about a model never seen."""

    seconds_per_byte: float = PRIOR_SECONDS_PER_BYTE
    _swaps: dict[str, float] = field(default_factory=dict)
    _drains: dict[str, float] = field(default_factory=dict)
    _stays: dict[str, float] = field(default_factory=dict)
    _gaps: dict[str, float] = field(default_factory=dict)

    def saw_swap(self, model: str, seconds: float) -> None:
        """``model`` was resident ``seconds`` after it was asked for, evictions included."""
        _blend(self._swaps, model, seconds)

    def saw_drain(self, model: str, seconds: float) -> None:
        """A busy ``model`` took ``seconds`` from the closing of its gate to idle."""
        _blend(self._drains, model, seconds)

    def saw_stay(self, model: str, seconds: float) -> None:
        """``model`` gave its place to another one ``seconds`` after it was loaded."""
        _blend(self._stays, model, seconds)

    def saw_gap(self, model: str, seconds: float) -> None:
        """A request of a full ``model`` ended ``seconds`` after the one before it."""
        _blend(self._gaps, model, seconds)

    def gap(self, model: str) -> float:
        """Seconds from one free place of a full ``model`` to the next."""
        return self._gaps.get(model, _PRIOR_GAP_S)

    def stay(self, model: str) -> float | None:
        """Seconds from the load of ``model`` until it leaves for another one, if seen."""
        return self._stays.get(model)

    def swap(self, model: str, size: int) -> float:
        """Seconds from idle victims to ``model`` of ``size`` bytes resident."""
        return self._swaps.get(model, _PRIOR_UNLOAD_S + size * self.seconds_per_byte)

    def drain(self, model: str) -> float:
        """Seconds until a busy ``model`` is idle once it takes no new requests."""
        return self._drains.get(model, _PRIOR_DRAIN_S)

    def service(self, model: str, size: int) -> float:
        """Seconds for which ``model`` will be in use once it is loaded, at a guess: as
        long as it took to fall idle, or else as long as its swap takes."""
        return self._drains.get(model, self.swap(model, size))


def _blend(store: dict[str, float], key: str, seconds: float) -> None:
    old = store.get(key)
    store[key] = seconds if old is None else old + _WEIGHT * (seconds - old)


@dataclass(frozen=True, slots=True)
class Dials:
    """The two dials of the policy; ``None`` is automatic.

    Attributes:
        max_age: W, the age in seconds at which a waiter closes the gate.
        linger: h, how many seconds an idle model that keeps coming back is kept.
        budget: the wait budget; both dials stay well below it.
        park: what a busy model runs may be parked.
    """

    max_age: float | None = None
    linger: float | None = None
    budget: float = 300.0
    park: bool = False

    def age_for(self, swap: float, rare: bool = False) -> float:
        """W for a target whose swap takes ``swap`` seconds: max(30, 14 swaps).

        With parking four swaps for a target that is ``rare``ly asked for: the drain is
        no part of its wait then, and what its swaps cost is little.

        With W of two swaps the policy still thrashes; with fourteen, three agents
        that take turns on three models need a third less swaps than with ten, and
        the worst wait stays below half of what service without a gate gives.
        Half the budget leaves room for the drain and the load.
        """
        if self.max_age is not None:
            return self.max_age
        age = _RARE_SWAPS * swap if rare and self.park else max(30.0, _SWAPS * swap)
        return min(age, self.budget / 2)

    def is_rare(self, swap: float, away: float) -> bool:
        """Whether a target that is wanted ``away`` seconds after it left is a rare one."""
        return away >= _SWAPS * swap

    def grace(self, swap: float) -> float:
        """Seconds that what is about to end is given before it is parked."""
        return swap / 5

    def least_turn(self, age: float, swap: float) -> float:
        """Seconds that a model serves before what it runs is parked for a target of W
        ``age``: two busy models would else park each other to and fro."""
        return max(age / 2, swap)

    def share(self, age: float, waiting: int) -> float:
        """What each of ``waiting`` targets gets of W, not less than a quarter of it."""
        return age / min(max(1, waiting), 4)

    def linger_for(self, swap: float) -> float:
        """h for a victim whose way back takes ``swap`` seconds: half of it, 1 to 15.

        Waiting up to one switch cost is the ski-rental rule: never more than
        twice what a clairvoyant would have paid.
        """
        if self.linger is not None:
            return self.linger
        return min(max(1.0, swap / 2), 15.0, self.budget / 4)

    @property
    def drain_limit(self) -> float:
        """Seconds after which a drain that does not end is given up for a while.

        Twice the budget: no request that waited when it began waits any more.
        """
        return 2 * self.budget

    @property
    def for_first_use(self) -> float:
        """Seconds for which a model that was loaded by hand is kept for its first use."""
        return min(10.0, self.budget / 4)

    def late_after(self, swap: float) -> float:
        """Seconds after which a load that should take ``swap`` is late."""
        return 2 * swap + min(5.0, self.budget / 10)
