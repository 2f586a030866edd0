"""What counts of lockups in hours of exposure prove: exact tests of Poisson rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Rate(NamedTuple):
    """A rate per hour with the ends of its confidence interval."""

    per_hour: float
    low: float
    high: float


def poisson_rate(events: int, hours: float, confidence: float = 0.95) -> Rate:
    """The rate of ``events`` in ``hours``, with the exact (Garwood 1936) interval.

    At its ends so many events or more, or so few or fewer, have a chance of
    ``(1 - confidence) / 2``. ValueError where ``hours`` is not positive.
    """
    if hours <= 0.0 or events < 0:
        raise ValueError("a rate needs positive hours and no negative count")
    tail = (1.0 - confidence) / 2.0
    low = _mean_where(events - 1, 1.0 - tail) if events else 0.0
    return Rate(events / hours, low / hours, _mean_where(events, tail) / hours)


def _mean_where(most: int, chance: float) -> float:
    """The mean of a Poisson count that is ``most`` or less with ``chance``."""

    def at_most(mean: float) -> float:
        log = math.log(mean)
        terms = (math.exp(n * log - mean - math.lgamma(n + 1)) for n in range(most + 1))
        return math.fsum(terms)

    return _falls_to(at_most, chance, most + 1.0)


def _falls_to(function: Callable[[float], float], value: float, high: float) -> float:
    """Where ``function``, which falls, reaches ``value``; ``high`` is a first guess."""
    low = 0.0
    while function(high) > value:
        low, high = high, high * 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if function(middle) > value:
            low = middle
        else:
            high = middle
    return high


def chance_in_share(inside: int, total: int, share: float) -> float:
    """The chance that ``inside`` or more of ``total`` independent events fall in a part
    that holds ``share`` (0 to 1) of the time, if time is all that matters.

    With all inside it is ``share ** total``. The report gives 7.5e-8 for nine of nine in
    6.9 h of 42.8 h (two engines busy, of the hours with any busy); those rounded hours
    give 7.4e-8, and hours that round to them from 6.8e-8 to 7.9e-8.
    """
    if not 0 <= inside <= total or not 0.0 <= share <= 1.0:
        raise ValueError("needs 0 <= inside <= total and a share from 0 to 1")
    return math.fsum(
        math.comb(total, k) * share**k * (1.0 - share) ** (total - k)
        for k in range(inside, total + 1)
    )


def chance_so_few(
    faults: int, hours: float, later: int, later_hours: float, factor: float = 1.0
) -> float:
    """The chance of ``later`` or fewer faults in ``later_hours`` after ``faults`` in
    ``hours``, if the later rate were the former one divided by ``factor``.

    The conditional test of two Poisson rates (Przyborowski and Wilenski 1940): given
    their sum, each fault falls in the later stretch with a chance of
    ``(later_hours / factor) / (hours + later_hours / factor)``, so the uncertainty of
    the former rate is accounted for. One-sided.
    """
    if faults < 0 or later < 0 or hours <= 0.0 or later_hours < 0.0 or factor <= 0.0:
        raise ValueError("needs counts of 0 or more, positive hours and factor")
    weighted = later_hours / factor
    share = weighted / (hours + weighted)
    total = faults + later
    return math.fsum(
        math.comb(total, k) * share**k * (1.0 - share) ** (total - k) for k in range(later + 1)
    )


def hours_needed(
    faults: int, hours: float, alpha: float, *, factor: float = 1.0, later: int = 0
) -> float:
    """Hours in all, with ``later`` faults and no more in them, at which `chance_so_few`
    falls to ``alpha``: the shown result is then a rate under ``1 / factor`` of the former.

    Without a fault this is ``factor * hours * (alpha ** (-1 / faults) - 1)``. For nine
    faults in 6.9 h it gives the report's figures: 2.7 h for p < 0.05, 4.6 h for
    p < 0.01, and for a reduction of at least five times 13.6 h, within the report's
    "11.5 to 14 h". Taking the former rate as known instead would give 2.3 h and 3.5 h,
    which are not the report's first two figures: see `hours_needed_known_rate`.

    ValueError where ``faults`` is 0: nothing can be shown to be rarer than never.
    """
    if faults <= 0 or hours <= 0.0 or not 0.0 < alpha < 1.0 or factor <= 0.0 or later < 0:
        raise ValueError("needs at least one fault, positive hours and alpha between 0 and 1")
    if later == 0:
        return factor * hours * math.expm1(-math.log(alpha) / faults)
    return _falls_to(
        lambda later_hours: chance_so_few(faults, hours, later, later_hours, factor),
        alpha,
        factor * hours,
    )


def hours_needed_known_rate(
    faults: int, hours: float, alpha: float, *, factor: float = 1.0
) -> float:
    """Fault-free hours after which, were the former rate exactly ``faults / hours``, none
    at ``1 / factor`` of it has a chance of ``alpha``: ``-ln(alpha) * factor * hours / faults``.

    It leaves out how uncertain the former rate is. For nine faults in 6.9 h and a factor of
    five it gives 11.5 h at 0.05 and 14.1 h at 0.025 (0.05 split over both sides): the ends
    of the report's "11.5 to 14 h", with the 13.6 h of `hours_needed` between them.
    The report does not say how it was computed; its upper end, rounded, may be either.
    """
    if faults <= 0 or hours <= 0.0 or not 0.0 < alpha < 1.0 or factor <= 0.0:
        raise ValueError("needs at least one fault, positive hours and alpha between 0 and 1")
    return -math.log(alpha) * factor * hours / faults
