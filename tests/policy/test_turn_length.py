"""How long turns are, and what that makes of the time: in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.turns import CASES, HAND_OVER_S, play
from omlx_admission.gpu_turn import length

SECONDS = st.floats(0.0, 100.0)


@given(own=st.floats(0.001, 5.0), longest=SECONDS, shortest=SECONDS)
def test_bounds(own: float, longest: float, shortest: float) -> None:
    longest, shortest = max(longest, shortest), min(longest, shortest)
    answer = length.burst_s(own, longest, shortest)
    assert min(own, length.LEAST_S) <= answer <= max(own, length.MOST_S)
    # Longer than its own only where another was longer still, and than that never.
    assert answer <= max(own, longest)


@pytest.mark.parametrize(
    ("own", "longest", "shortest", "wanted"),
    [
        (0.1, 0.1, 0.1, 0.1),  # equals: as it is without
        (0.1, 0.5, 0.5, 0.25),
        (0.1, 40.0, 40.0, 1.5),
        (0.1, 0.03, 0.01, 0.02),
        (0.1, 0.005, 0.005, 0.01),
        (2.0, 3.0, 3.0, 2.0),  # a longer one that its owner has set
    ],
)
def test_examples(own: float, longest: float, shortest: float, wanted: float) -> None:
    assert length.burst_s(own, longest, shortest) == pytest.approx(wanted)


def test_what_overruns_its_budget_does_not_make_turns_longer_and_longer() -> None:
    held = 0.1
    for _ in range(100):
        held = length.burst_s(0.1, held, held) + 0.04
    assert held == pytest.approx(0.14)


@pytest.mark.parametrize("case", CASES)
def test_shares_gaps_and_work(case: str) -> None:
    contenders = CASES[case]
    fixed, worked = play(contenders, paced=False)
    paced, works = play(contenders, paced=True)
    fair = 1.0 / len(contenders)
    for name, outcome in paced.items():
        assert fair / 2 <= outcome.share <= fair * 2, name
        most = 3.0 * outcome.longest_foreign_s + len(contenders) * HAND_OVER_S
        assert outcome.gap_s <= most, name
        # Who had too little has more.
        if fixed[name].share < fair / 2:
            assert outcome.share > 1.4 * fixed[name].share
    # Shorter turns cost hand-overs; only beside turns of a few milliseconds is it felt.
    assert works > worked - (0.11 if case == "tokens of speech beside a decode" else 0.05)


def test_the_fixed_lengths_do_not_do_it() -> None:
    """What these cases are for."""
    least = {
        case: min(o.share for o in play(c, paced=False)[0].values())
        for case, c in CASES.items()
    }
    assert least["a decode beside chunks of 4 s"] < 0.03
    assert least["three decodes beside an embedder"] < 0.04
    assert least["tokens of speech beside a decode"] < 0.05
    assert least["DFlash beside two decodes"] < 0.05
