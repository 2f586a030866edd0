"""The GPU turn in virtual time: what each contender gets of the GPU, and how long it waits.

The order is that of `omlx_admission.gpu_turn.queue`, the lengths are those of
`omlx_admission.gpu_turn.length` or the fixed ones that it replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from omlx_admission.gpu_turn import length
from omlx_admission.gpu_turn.queue import TurnQueue

#: What a hand-over costs: the drain, two threads, and the event loop between two bursts.
HAND_OVER_S = 0.001
#: oMLX's budget of a burst with one request.
BUDGET_S = 0.1


@dataclass(eq=False)
class Contender:
    """Always busy.

    Attributes:
        step_s: one step: a decode, a chunk of a prompt, a token of speech, an embedding.
        burst: it decodes in bursts of steps; else a turn is one step.
        pauses: it goes on until others wait, as long work that pauses between its steps.
        away_s: between two turns it is not there, for its caller to come back.
    """

    name: str
    step_s: float
    burst: bool = False
    pauses: bool = False
    away_s: float = 0.0
    asked: float = 0.0
    worked_s: float = 0.0
    steps: int = 0
    longest_gap_s: float = 0.0
    foreign: list[float] = field(default_factory=list)
    longest_foreign_s: float = 0.0

    def turn_s(self, paced: bool) -> float:
        """How long its turn is, in whole steps."""
        wanted = self.step_s
        if self.burst:
            wanted = BUDGET_S
            if paced and self.foreign:
                wanted = length.burst_s(BUDGET_S, max(self.foreign), min(self.foreign))
        elif self.pauses and paced:
            wanted = length.QUANTUM_S
        steps = max(1, -int(-wanted // self.step_s))
        return steps * self.step_s


@dataclass(frozen=True)
class Outcome:
    """What one contender had: its share, steps a second, and its longest gap in terms of
    the longest foreign turn."""

    share: float
    rate: float
    gap_s: float
    longest_foreign_s: float


def play(
    contenders: Sequence[Contender], *, paced: bool, seconds: float = 300.0
) -> tuple[dict[str, Outcome], float]:
    """All of them busy for a time; with ``paced``, turns are as long as `length` says.

    Returns each one's outcome, and the part of the time in which work was done.
    """
    everyone = [dataclasses.replace(one, foreign=[]) for one in contenders]
    queue: TurnQueue[Contender] = TurnQueue()
    coming: list[tuple[float, Contender]] = []
    now, holder = 0.0, None
    for one in everyone:
        if queue.request(one):
            holder = one
    while now < seconds:
        if holder is None:
            now, holder = min(coming, key=lambda entry: entry[0])
            coming.remove((now, holder))
            holder.asked = now
            queue.request(holder)
        gap = now - holder.asked
        holder.longest_gap_s = max(holder.longest_gap_s, gap)
        held = holder.turn_s(paced)
        holder.foreign.clear()
        holder.worked_s += held
        holder.steps += round(held / holder.step_s)
        now += held
        for one in everyone:
            if one is not holder:
                one.foreign.append(held)
                one.longest_foreign_s = max(one.longest_foreign_s, held)
        for at, one in sorted(coming, key=lambda entry: entry[0]):
            if at <= now:
                coming.remove((at, one))
                one.asked = at
                queue.request(one)
        done, holder = holder, queue.release(holder)
        if holder is not None:
            now += HAND_OVER_S
        coming.append((now + done.away_s, done))
        if not done.away_s:
            coming.pop()
            done.asked = now
            if queue.request(done):
                holder = done
    total = sum(one.worked_s for one in everyone)
    return {
        one.name: Outcome(
            one.worked_s / total, one.steps / now, one.longest_gap_s, one.longest_foreign_s
        )
        for one in everyone
    }, total / now


CASES: dict[str, tuple[Contender, ...]] = {
    "two decodes": (Contender("a", 0.02, burst=True), Contender("b", 0.025, burst=True)),
    "a decode beside chunks of 0.5 s": (
        Contender("decode", 0.02, burst=True),
        Contender("prompt", 0.5, pauses=True),
    ),
    "a decode beside chunks of 4 s": (
        Contender("decode", 0.02, burst=True),
        Contender("prompt", 4.0, pauses=True),
    ),
    "three decodes beside an embedder": (
        Contender("a", 0.01, burst=True),
        Contender("b", 0.01, burst=True),
        Contender("c", 0.01, burst=True),
        Contender("embedder", 0.01),
    ),
    "tokens of speech beside a decode": (
        Contender("decode", 0.01, burst=True),
        Contender("speech", 0.005),
    ),
    "DFlash beside two decodes": (
        Contender("DFlash", 0.004, pauses=True),
        Contender("a", 0.01, burst=True),
        Contender("b", 0.01, burst=True),
    ),
}


def main() -> None:
    """Print all cases, with fixed lengths and with those of `length`."""
    for title, contenders in CASES.items():
        print(title)
        for label, paced in (("fixed", False), ("paced", True)):
            outcomes, work = play(contenders, paced=paced)
            shown = ", ".join(
                f"{name} {100 * one.share:.1f} % (gap {one.gap_s:.2f} s)"
                for name, one in outcomes.items()
            )
            print(f"  {label}: {shown}; work {100 * work:.1f} %")


if __name__ == "__main__":
    main()
