"""The observer's bounded memories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlx_admission.observation.history import (
    OTHER,
    STEP_S,
    WINDOW_S,
    Distribution,
    Level,
    Names,
    Shares,
)


def test_names_beyond_the_limit_are_one() -> None:
    names = Names(3)
    assert [names(f"m{i}") for i in range(5)] == ["m0", "m1", "m2", OTHER, OTHER]
    assert names("m1") == "m1"


def test_a_distribution_counts_by_upper_bound() -> None:
    waits = Distribution((1.0, 10.0))
    for value in (0.5, 1.0, 1.5, 10.0, 99.0, -3.0):
        waits.add(value)
    assert waits.cumulative() == [("1.0", 3), ("10.0", 5), ("+Inf", 6)]
    assert waits.count == 6
    assert waits.total == 112.0
    assert waits.longest == 99.0


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_a_distribution_loses_nothing(values: list[float]) -> None:
    waits = Distribution((0.1, 1.0, 100.0))
    for value in values:
        waits.add(value)
    counts = [n for _bound, n in waits.cumulative()]
    assert counts == sorted(counts)
    assert counts[-1] == waits.count == len(values)


def test_a_level_keeps_the_highest_of_each_step() -> None:
    level = Level()
    level.set(1, 100.0)
    level.set(5, 100.5)
    level.set(2, 101.0)
    level.set(0, 110.0)
    assert level.value == 0
    assert level.since(0.0) == [(100.0, 5), (102.0, 2), (112.0, 0)]


def test_a_level_begins_the_window_with_what_held_before_it() -> None:
    level = Level()
    level.set(3, 100.0)
    level.set(4, 200.0)
    assert level.since(150.0) == [(150.0, 3), (200.0, 4)]


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50)), max_size=300))
def test_a_level_never_shows_less_than_there_was(changes: list[tuple[int, float]]) -> None:
    level = Level()
    now = 1000.0
    seen: list[tuple[float, int]] = []
    for value, pause in changes:
        now += pause
        level.set(value, now)
        seen.append((now, value))
    rows = level.since(0.0)
    assert [at for at, _ in rows] == sorted(at for at, _ in rows)
    kept = [change for change in seen if change[0] > now - WINDOW_S + STEP_S]
    for at, value in kept:
        shown = [v for row, v in rows if row <= at]
        assert shown[-1] >= value


def test_a_level_and_shares_stay_small() -> None:
    level, shares = Level(), Shares()
    for i in range(20_000):
        level.set(i % 7, i * 1.0)
        shares.add(i * 1.0, i * 1.0 + 0.5)
    assert len(level.since(0.0)) <= 2 * (WINDOW_S / STEP_S + 1)
    assert len(shares.since(0.0)) <= WINDOW_S / STEP_S + 1


def test_a_share_is_split_where_a_step_ends() -> None:
    shares = Shares()
    shares.add(9.5, 13.0)
    assert shares.since(0.0) == [(8.0, 0.25), (10.0, 1.0), (12.0, 0.5)]
    assert shares.since(12.0) == [(12.0, 0.5)]


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_share_of_any_length_ends(start: float, length: float) -> None:
    shares = Shares()
    shares.add(start, start + length)
    assert all(0 <= share <= 1 for _at, share in shares.since(0.0))
