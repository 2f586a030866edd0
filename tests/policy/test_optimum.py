"""The oracle itself: against trying everything, and on inputs solved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.optimum import fewest_swaps, fewest_swaps_by_force

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12).map(float) | st.floats(0, 12), st.sampled_from("ABC")),
    max_size=7,
)


@settings(max_examples=150)
@given(ARRIVALS, st.sampled_from([0.0, 1.0, 2.5, 4.0, 7.0, 50.0]))
def test_dynamic_programming_agrees_with_brute_force(
    arrivals: list[tuple[float, str]], delay: float
) -> None:
    assert fewest_swaps(arrivals, delay) == fewest_swaps_by_force(arrivals, delay)


@settings(max_examples=100)
@given(ARRIVALS, st.data())
def test_also_where_each_request_has_its_own_delay(
    arrivals: list[tuple[float, str]], data: st.DataObject
) -> None:
    arrivals.sort()
    delays: list[float] = []
    due = {"A": 0.0, "B": 0.0, "C": 0.0}
    for time, model in arrivals:
        due[model] = max(due[model], time + data.draw(st.integers(0, 6)))
        delays.append(due[model] - time)
    assert fewest_swaps(arrivals, delays) == fewest_swaps_by_force(arrivals, delays)


@pytest.mark.parametrize(
    ("arrivals", "delay", "swaps"),
    [
        ([], 5.0, 0),
        ([(0.0, "A")], 5.0, 1),
        # ABAB, one second apart: with no patience each is a swap, with enough of it two.
        ([(0.0, "A"), (1.0, "B"), (2.0, "A"), (3.0, "B")], 0.0, 4),
        ([(0.0, "A"), (1.0, "B"), (2.0, "A"), (3.0, "B")], 3.0, 2),
        # A is wanted all the time, B every tenth second: one visit covers two Bs.
        ([(float(t), "A") for t in range(30)] + [(float(t), "B") for t in (3, 13)], 10.0, 3),
    ],
)
def test_solved_by_hand(arrivals: list[tuple[float, str]], delay: float, swaps: int) -> None:
    assert fewest_swaps(arrivals, delay) == swaps


def test_a_model_is_served_first_in_first_out() -> None:
    with pytest.raises(ValueError, match="before an earlier one"):
        fewest_swaps([(0.0, "A"), (1.0, "A")], [10.0, 1.0])
