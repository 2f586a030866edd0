"""When could a target be served? The turns until then, one after another.

The answer becomes ``Retry-After``, so it should rather be a little late than early:
a client that comes back while its model serves is admitted at once, one that comes
back long before waits its whole budget again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .estimates import Estimates


@dataclass(frozen=True, slots=True)
class Turn:
    """One model that waits for its swap, in the order of service.

    Attributes:
        model: its name.
        size: bytes.
        due: when it may close the gate of a model that has had its turn.
        overdue: when it may close any gate.
    """

    model: str
    size: int
    due: float
    overdue: float


@dataclass(frozen=True, slots=True)
class Occupant:
    """What holds the memory that the first turn needs.

    Attributes:
        busy: it is in use.
        no_drain_before: when it may be drained, after a drain that did not end.
        idle_from: what is in use stays so until then, as far as is known.
    """

    model: str
    loaded_at: float
    busy: bool
    no_drain_before: float = 0.0
    idle_from: float = 0.0


def served_at(
    turns: Sequence[Turn],
    occupant: Occupant | None,
    free_at: float,
    turn_s: float,
    estimates: Estimates,
) -> float:
    """When the last of ``turns`` is loaded.

    Args:
        occupant: the model to be replaced by the first turn; None if memory is free.
        free_at: when the transition in progress is over; now, if there is none.
        turn_s: seconds that a model serves at least once it is loaded.
    """
    time = free_at
    for turn in turns:
        if occupant is not None and occupant.busy:
            stay = estimates.stay(occupant.model)
            expected = occupant.loaded_at + (turn_s if stay is None else stay)
            gate = max(turn.due, min(occupant.loaded_at + turn_s, turn.overdue))
            gate = max(gate, occupant.no_drain_before)
            # Idle earlier than its gate closes, or drained after it.
            end = min(expected, gate + estimates.drain(occupant.model))
            time = max(time, end, occupant.idle_from)
        time += estimates.swap(turn.model, turn.size)
        occupant = Occupant(turn.model, time, busy=True)
    return time
