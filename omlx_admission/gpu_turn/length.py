"""How long a turn is. Pure: seconds in, seconds out.

The order is first come first served, which shares turns. What shares time is their length:
a decode that waits for chunks of four seconds and then has the GPU for a tenth of one gets
2 % of it. Only a burst can be longer or shorter; what else takes the turn is as long as it
is, and pauses after a quantum where it can.
"""

from __future__ import annotations

#: A burst is this part of the longest turn that it had to wait for. Less than one: a turn
#: ends with the step that is at work, so of two that answered each other in full each turn
#: would be longer than the last.
PART = 0.5
#: Bounds of a burst. oMLX's own is between them.
LEAST_S = 0.01
MOST_S = 1.5
#: Beside turns shorter than half of its own, a burst is at most this many times as long.
TIMES_SHORTEST = 2.0
#: Long work that pauses between steps hands over after this long at the earliest: each of
#: several short steps would otherwise cost a whole turn of every other contender.
QUANTUM_S = 0.05


def burst_s(own_s: float, longest_s: float, shortest_s: float) -> float:
    """Seconds for a burst whose engine would take ``own_s``, given the longest and the
    shortest turn that others have had since its last one."""
    answer = min(PART * longest_s, MOST_S)
    if answer > own_s:
        return answer
    return min(own_s, max(LEAST_S, TIMES_SHORTEST * shortest_s))
