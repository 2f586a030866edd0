"""The figures of oMLX issue 4224, and the statistics at their edges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_admission.gpu.statistics import (
    chance_in_share,
    chance_so_few,
    hours_needed,
    hours_needed_known_rate,
    poisson_rate,
)

# oMLX issue 4224: two engines busy 6.9 h with 9 hangs, exactly one busy 35.9 h with none.
HANGS, BOTH, ANY = 9, 6.9, 42.8


def test_chance_that_all_nine_fall_in_the_two_engine_share() -> None:
    chance = chance_in_share(HANGS, HANGS, BOTH / ANY)
    assert chance == pytest.approx(7.5e-8, rel=0.03)
    # 7.5e-8 itself lies between the ends that the rounding of the hours leaves open.
    low = chance_in_share(HANGS, HANGS, 6.85 / 42.85)
    high = chance_in_share(HANGS, HANGS, 6.95 / 42.75)
    assert low < 7.45e-8 < 7.55e-8 < high


def test_hours_for_significance() -> None:
    assert f"{hours_needed(HANGS, BOTH, 0.05):.1f}" == "2.7"
    assert f"{hours_needed(HANGS, BOTH, 0.01):.1f}" == "4.6"


def test_hours_for_the_five_fold_bound() -> None:
    optimistic = hours_needed_known_rate(HANGS, BOTH, 0.05, factor=5.0)
    both_sides = hours_needed_known_rate(HANGS, BOTH, 0.025, factor=5.0)
    conditional = hours_needed(HANGS, BOTH, 0.05, factor=5.0)
    assert f"{optimistic:.1f}" == "11.5"
    assert f"{both_sides:.0f}" == "14"
    assert f"{conditional:.0f}" == "14"
    assert optimistic < conditional < both_sides


def test_poisson_intervals_against_published_tables() -> None:
    # Exact 95 % limits of a Poisson mean (Garwood 1936; e.g. Ulm 1990, table): 0 -> 3.689,
    # 1 -> 0.0253..5.572, 5 -> 1.623..11.668, 10 -> 4.795..18.390.
    for events, low, high in (
        (0, 0.0, 3.689),
        (1, 0.0253, 5.572),
        (5, 1.623, 11.668),
        (10, 4.795, 18.390),
    ):
        rate = poisson_rate(events, 2.0)
        assert rate.per_hour == events / 2.0
        assert rate.low * 2.0 == pytest.approx(low, abs=6e-4)
        assert rate.high * 2.0 == pytest.approx(high, abs=6e-4)
    assert poisson_rate(0, 1.0, 0.90).high == pytest.approx(-math.log(0.05))


@given(st.integers(0, 200), st.floats(0.001, 1e5), st.floats(0.5, 0.999))
def test_the_interval_holds_the_rate(events: int, hours: float, confidence: float) -> None:
    rate = poisson_rate(events, hours, confidence)
    assert 0.0 <= rate.low <= rate.per_hour < rate.high < math.inf


def test_chance_in_share_counts_the_tail() -> None:
    assert chance_in_share(0, 5, 0.3) == pytest.approx(1.0)
    assert chance_in_share(4, 5, 0.5) == pytest.approx(6 / 32)
    assert chance_in_share(0, 0, 0.5) == 1.0


def test_chance_so_few_by_hand() -> None:
    assert chance_so_few(1, 1.0, 0, 1.0) == pytest.approx(0.5)
    assert chance_so_few(1, 1.0, 1, 1.0) == pytest.approx(0.75)
    assert chance_so_few(2, 1.0, 0, 2.0, factor=2.0) == pytest.approx(0.25)
    assert chance_so_few(9, 6.9, 0, 0.0) == 1.0


@given(
    st.integers(1, 50),
    st.floats(0.1, 1000.0),
    st.sampled_from([0.05, 0.01]),
    st.sampled_from([1.0, 5.0]),
    st.integers(0, 5),
)
def test_the_hours_needed_reach_alpha_and_no_more(
    faults: int, hours: float, alpha: float, factor: float, later: int
) -> None:
    needed = hours_needed(faults, hours, alpha, factor=factor, later=later)
    assert chance_so_few(faults, hours, later, needed, factor) == pytest.approx(alpha, rel=1e-6)
    assert chance_so_few(faults, hours, later, needed * 0.99, factor) > alpha
    if later == 0:
        assert hours_needed_known_rate(faults, hours, alpha, factor=factor) < needed


@pytest.mark.parametrize(
    "call",
    [
        lambda: poisson_rate(1, 0.0),
        lambda: poisson_rate(-1, 1.0),
        lambda: chance_in_share(3, 2, 0.5),
        lambda: chance_in_share(1, 2, 1.5),
        lambda: chance_so_few(1, 0.0, 0, 1.0),
        lambda: hours_needed(0, 6.9, 0.05),
        lambda: hours_needed(9, 6.9, 0.0),
        lambda: hours_needed_known_rate(0, 6.9, 0.05),
    ],
)
def test_what_cannot_be_computed_says_so(call: object) -> None:
    with pytest.raises(ValueError, match="needs"):
        call()  # type: ignore[operator]
