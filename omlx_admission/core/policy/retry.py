"""When could a target be served, and when should a refused client come back?"""

from __future__ import annotations

from .forecast import Occupant, Turn, served_at
from .model import PoolView, Swap, Target
from .planner import Plan, PlanKind, after, plan
from .schedule import Schedule

#: Less than this part of a model may be anything: memory of what runs beside the load.
_TELLING = 0.1


def estimated_wait_s(
    schedule: Schedule, target: Target, size: int, view: PoolView, now: float
) -> float:
    """Seconds until ``target``, which is not ready, could be served.

    The transition in progress, then the turns of those that are wanted longer, then
    its own; refined by what was observed of loads, drains and stays. It need not be
    waited for.
    """
    free_at, occupant, later = now, None, view
    for load in (schedule.swap, schedule.concurrent_load):
        if load is None:
            continue
        if load.loading:
            free_at = max(free_at, now + rest_of(schedule, load, view, now))
        else:
            swap = schedule.estimates.swap(load.target.model, load.size)
            drain = max(
                (_rest_of_drain(schedule, v, load.started, now) for v in load.victims),
                default=0.0,
            )
            free_at = max(free_at, now + drain + swap)
        if load.target == target:
            return free_at - now
        later = after(later, load.target, load.size, load.victims)
        occupant = Occupant(load.target.model, free_at, busy=True)
    planned = plan(target, size, later, rank=schedule.rank(now))
    if planned.kind is PlanKind.FITS:
        occupant = None
    elif occupant is None or occupant.model not in planned.victims:
        occupant = _last_to_leave(schedule, planned, later, now)
    waiting = schedule.competing_targets(view) + (target not in schedule.queues)
    turns = []
    for other in (
        (*schedule.targets, target) if planned.kind is not PlanKind.FITS else (target,)
    ):
        if schedule.is_loading(other) or other in view.ready:
            continue
        if schedule.swap is not None and schedule.swap.target == other:
            continue
        turns.append(_turn(schedule, other, size, waiting, now))
        if other == target:
            break
    turn_s = schedule.dials.share(schedule.age_for(target, size), waiting)
    return served_at(turns, occupant, free_at, turn_s, schedule.estimates) - now


def rest_of(schedule: Schedule, load: Swap, view: PoolView, now: float) -> float:
    """Seconds until ``load`` has ended: as expected, then by what it has read."""
    took = now - load.load_started
    expected = schedule.estimates.swap(load.target.model, load.size) - took
    if expected > 0:
        return expected
    part = part_read(load, view)
    # What says nothing about itself is taken to be half done.
    return took * (1 - part) / part if part is not None else took / 2


def part_read(load: Swap, view: PoolView) -> float | None:
    """Which part of itself ``load`` has read; None where memory does not tell."""
    model = view.models.get(load.target.model)
    part = model.read / load.size if model is not None and load.size else 0.0
    return min(part, 1.0) if part >= _TELLING else None


def retry_after_s(served: float, patience: float) -> float:
    """After how many seconds a client that is refused now does best to come back.

    Before its model serves in ``served`` seconds, by as much as it can wait then
    (``patience``): who is in the queue when the model is loaded is served for
    certain, who comes later finds it while its turn lasts. With no patience, when
    it serves.
    """
    return served - min(served * 2 / 3, patience / 4)


def _turn(schedule: Schedule, target: Target, size: int, waiting: int, now: float) -> Turn:
    queue, demand = schedule.queues.get(target), schedule.queues.demand(target, now)
    if queue is not None:
        size = queue.head.size
        overdue_at = queue.aged_from + schedule.age_for(target, size)
        return Turn(target.model, size, schedule.due(target, waiting), overdue_at)
    age = schedule.age_for(target, size)
    share = schedule.dials.share(age, waiting)
    due = now + share
    if demand is not None:
        due = min(demand.since + share, demand.due_by)
    return Turn(target.model, size, due, now + age)


def _last_to_leave(
    schedule: Schedule, planned: Plan, view: PoolView, now: float
) -> Occupant | None:
    leaving = [view.models[v] for v in planned.victims]
    if not leaving:
        return None
    loaded_at = schedule.loaded_at
    last = max(leaving, key=lambda m: (m.busy, loaded_at.get(m.model, 0.0)))
    idle_from = now
    if last.model in schedule.busy_since:
        idle_from += _rest_of_drain(schedule, last.model, now, now)
    return Occupant(
        last.model,
        loaded_at.get(last.model, now),
        last.busy,
        schedule.no_drain_before.get(last.model, 0.0),
        idle_from,
    )


def _rest_of_drain(schedule: Schedule, victim: str, began: float, now: float) -> float:
    """Seconds until ``victim``, which drains since ``began``, is idle.

    What runs may have outlived drains that were withdrawn or given up before this one.
    """
    expected = schedule.estimates.drain(victim)
    took = now - min(began, schedule.busy_since.get(victim, began))
    return max(expected - took, took / 2 if took > expected else 0.0)
