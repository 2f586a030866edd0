"""The fewest swaps that anybody could do, knowing the future: dynamic programming.

The problem of Feder, Motwani, Panigrahy and Zhu ("Combining request scheduling with
web caching", SODA 2002) with a memory for one model: requests arrive over time, each
must find its model loaded at some instant within ``delay`` of its arrival, and as few
models as possible are loaded. Here loads and services take no time, so the optimum
is at most what any real schedule with waits up to ``delay`` needs: a lower bound.

Why few states suffice. Take any schedule and move each swap later, up to the first
deadline among the requests pending for other models; visits that lie before it
shrink to that instant. Nothing is missed and no swap is added. So an optimal
schedule swaps only when a deadline falls due, and then visits some models one
after another, the due one among them, and stays with the last. What is pending
afterwards follows from when each model was left last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import permutations

Arrival = tuple[float, str]

#: Seconds that every request may wait, or each its own, in the order of arrival.
Delay = float | Sequence[float]

_ROUNDING_S = 1e-6


def fewest_swaps(arrivals: Sequence[Arrival], delay: Delay) -> int:
    """Fewest loads, the first one included, that serve everybody within ``delay`` seconds.

    Where each request has a delay of its own, no request of a model may be due before
    an earlier one of that model.

    Exponential in the number of models (each further one multiplies the states), so
    meant for two to four of them and some hundred arrivals.
    """
    times: dict[str, list[float]] = {}
    deadlines: dict[str, list[float]] = {}
    for time, due_by, model in _with_deadlines(arrivals, delay):
        times.setdefault(model, []).append(time)
        deadlines.setdefault(model, []).append(due_by)
        if len(deadlines[model]) > 1:
            before = deadlines[model][-2]
            if due_by < before - _ROUNDING_S:
                raise ValueError(f"a request for {model} is due before an earlier one")
            deadlines[model][-1] = max(due_by, before)
    models = sorted(times)
    if not models:
        return 0
    never = float("-inf")
    # A state: the current model and, for every other one, when it was left last.
    # All states of one round are kept with their fewest swaps, dominated ones dropped.
    states: dict[tuple[int, tuple[float, ...]], int] = {(-1, tuple(never for _ in models)): 0}
    best: int | None = None
    while states:
        following: dict[tuple[int, tuple[float, ...]], int] = {}
        for (current, left), swaps in states.items():
            if best is not None and swaps >= best:
                continue
            due = _next_due(times, deadlines, models, current, left)
            if due is None:
                best = swaps if best is None else min(best, swaps)
                continue
            instant, forced = due
            for visited in _visits(len(models), current, forced):
                now = list(left)
                if current >= 0:
                    now[current] = instant
                for visit in visited:
                    now[visit] = instant
                key = (visited[-1], tuple(now))
                cost = swaps + len(visited)
                if cost < following.get(key, 1 << 30):
                    following[key] = cost
        states = _undominated(following)
    assert best is not None
    return best


def _with_deadlines(
    arrivals: Sequence[Arrival], delay: Delay
) -> list[tuple[float, float, str]]:
    if isinstance(delay, int | float):
        return sorted((t, t + delay, m) for t, m in arrivals)
    return sorted((t, t + d, m) for (t, m), d in zip(arrivals, delay, strict=True))


def _next_due(
    times: dict[str, list[float]],
    deadlines: dict[str, list[float]],
    models: Sequence[str],
    current: int,
    left: tuple[float, ...],
) -> tuple[float, int] | None:
    """The first deadline among requests of other models since each was left last."""
    due: tuple[float, int] | None = None
    for index, model in enumerate(models):
        if index == current:
            continue
        pending = times[model]
        position = bisect_right(pending, left[index])
        if position < len(pending):
            candidate = (deadlines[model][position], index)
            if due is None or candidate < due:
                due = candidate
    return due


def _visits(count: int, current: int, forced: int) -> Iterable[tuple[int, ...]]:
    """Orders of visits at one instant: any set of others with the forced one in it.

    Only the last one matters beyond the set, so the rest is not permuted.
    """
    others = [m for m in range(count) if m not in (current, forced)]
    for size in range(len(others) + 1):
        for extra in _subsets(others, size):
            chosen = (*extra, forced)
            for last in chosen:
                yield (*(m for m in chosen if m != last), last)


def _subsets(items: Sequence[int], size: int) -> Iterable[tuple[int, ...]]:
    if size == 0:
        yield ()
        return
    for index, item in enumerate(items):
        for rest in _subsets(items[index + 1 :], size - 1):
            yield (item, *rest)


def _undominated(
    states: dict[tuple[int, tuple[float, ...]], int],
) -> dict[tuple[int, tuple[float, ...]], int]:
    """Without states that are in no way better than another one with the same model.

    Having left every model no earlier, for no more swaps, is at least as good.
    """
    by_model: dict[int, list[tuple[tuple[float, ...], int]]] = {}
    for (current, left), swaps in states.items():
        by_model.setdefault(current, []).append((left, swaps))
    kept: dict[tuple[int, tuple[float, ...]], int] = {}
    for current, entries in by_model.items():
        entries.sort(key=lambda e: (e[1], *(-t for t in e[0])))
        front: list[tuple[tuple[float, ...], int]] = []
        for left, swaps in entries:
            if any(
                other_swaps <= swaps and all(a >= b for a, b in zip(other, left, strict=True))
                for other, other_swaps in front
            ):
                continue
            front.append((left, swaps))
            kept[(current, left)] = swaps
    return kept


def fewest_swaps_by_force(arrivals: Sequence[Arrival], delay: Delay) -> int:
    """The same by trying everything; for tiny inputs, as a check of the other.

    Swaps may happen at any arrival or deadline, in any order and number.
    """
    requests = _with_deadlines(arrivals, delay)
    models = sorted({m for _, _, m in requests})
    if not models:
        return 0
    instants = sorted({t for t, _, _ in requests} | {d for _, d, _ in requests})

    def serve(pending: frozenset[int], current: str | None) -> frozenset[int]:
        return frozenset(i for i in pending if requests[i][2] != current)

    # Breadth first over (current model, pending requests) from instant to instant.
    states: dict[tuple[str | None, frozenset[int]], int] = {(None, frozenset()): 0}
    for instant in instants:
        new = frozenset(i for i, (t, _, _) in enumerate(requests) if t == instant)
        following: dict[tuple[str | None, frozenset[int]], int] = {}
        for (current, pending), swaps in states.items():
            waiting = serve(pending | new, current)
            for count in range(len(models) + 1):
                for order in permutations(models, count):
                    now_at: str | None = current
                    left = waiting
                    for model in order:
                        now_at = model
                        left = serve(left, model)
                    if any(requests[i][1] <= instant for i in left):
                        continue
                    key = (now_at, left)
                    cost = swaps + count
                    if cost < following.get(key, 1 << 30):
                        following[key] = cost
        states = following
    return min(swaps for (_, pending), swaps in states.items() if not pending)
