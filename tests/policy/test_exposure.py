"""The accumulator: whose seconds are counted where, and what one lockup is."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_admission.gpu.exposure import (
    EVENT_WINDOW_S,
    LONG_TOKENS,
    MAX_ENGINES,
    OTHER,
    Cell,
    Exposure,
    Others,
    Record,
    merged,
)
from omlx_admission.gpu.faults import GpuFault

OFF0, OFF1, OFF2 = (Cell(n, 0, False) for n in range(3))


def test_seconds_by_engines_busy() -> None:
    e = Exposure(100.0)
    e.busy("a", 110.0)
    e.busy("b", 130.0)
    e.busy("c", 131.0)
    e.idle("a", 135.0)
    e.idle("b", 140.0)
    e.idle("c", 143.0)
    record = e.take(150.0)
    assert record.seconds == {OFF0: 10.0 + 7.0, OFF1: 20.0 + 3.0, OFF2: 10.0}
    assert record.engines == {
        ("a", 1, False): 20.0,
        ("a", 2, False): 5.0,
        ("b", 2, False): 10.0,
        ("c", 2, False): 9.0,
        ("c", 1, False): 3.0,
    }


def test_long_requests_and_serialising_split_the_seconds() -> None:
    e = Exposure(0.0)
    e.busy("a", 0.0, longest=LONG_TOKENS - 1)
    e.busy("a", 1.0, longest=LONG_TOKENS)
    e.busy("b", 3.0, longest=99 * LONG_TOKENS)
    e.serialised(True, 6.0)
    e.busy("a", 10.0, longest=5)
    e.idle("b", 15.0)
    record = e.take(21.0)
    assert record.seconds == {
        Cell(1, 0, False): 1.0,
        Cell(1, 1, False): 2.0,
        Cell(2, 2, False): 3.0,
        Cell(2, 2, True): 4.0,
        Cell(2, 1, True): 5.0,
        Cell(1, 0, True): 6.0,
    }
    assert record.hours(busy=2, serialised=True) == 9.0 / 3600
    assert record.hours(busy=2, serialised=True, long=1) == 5.0 / 3600


def test_repeated_and_unknown_news_change_nothing() -> None:
    e = Exposure(0.0)
    e.idle("never seen", 1.0)
    e.busy("a", 1.0)
    e.busy("a", 2.0)
    e.serialised(False, 2.5)
    e.idle("a", 3.0)
    e.idle("a", 4.0)
    assert e.take(5.0).seconds == {OFF0: 3.0, OFF1: 2.0}


def test_a_clock_that_steps_back_counts_nothing_twice() -> None:
    e = Exposure(10.0)
    e.busy("a", 12.0)
    e.idle("a", 11.0)
    assert e.take(13.0).seconds == {OFF0: 3.0}


def test_take_starts_from_zero_and_keeps_the_state() -> None:
    e = Exposure(0.0)
    e.busy("a", 0.0)
    assert e.take(2.0).seconds == {OFF1: 2.0}
    assert e.take(2.0) == Record()
    assert e.cell == OFF1
    assert e.take(5.0).seconds == {OFF1: 3.0}


def test_a_hang_with_its_victim_is_one_lockup_of_two_engines() -> None:
    e = Exposure(0.0)
    e.busy("glm", 0.0, longest=LONG_TOKENS)
    e.busy("qwen", 0.0)
    assert e.fault("glm", GpuFault.INNOCENT_VICTIM, 5.0)
    e.idle("glm", 5.1)  # its requests failed before the culprit spoke
    assert e.fault("qwen", GpuFault.HANG, 5.2)
    assert not e.fault("qwen", GpuFault.HANG, 5.3)  # again, from the clean-up
    e.idle("qwen", 5.4)
    assert e.fault("glm", GpuFault.HANG, 5.5)  # a class not yet reported by it
    record = e.take(6.0)
    two = Cell(2, 1, False)
    assert record.lockups == {two: 1}
    assert record.faults == {
        (GpuFault.INNOCENT_VICTIM, "glm", two): 1,
        (GpuFault.HANG, "qwen", two): 1,
        (GpuFault.HANG, "glm", two): 1,
    }
    assert record.count(busy=2, serialised=False) == 1
    assert record.count(busy=2, serialised=False, long=1) == 1
    assert record.count(busy=2, serialised=False, long=2) == 0
    assert record.count(busy=2, serialised=True) == 0
    assert record.count(busy=1, serialised=False) == 0


def test_reports_a_window_apart_are_two_lockups() -> None:
    e = Exposure(0.0)
    e.busy("a", 0.0)
    assert e.fault("a", GpuFault.HANG, 1.0)
    assert not e.fault("a", GpuFault.HANG, 1.0 + EVENT_WINDOW_S / 2)
    assert e.fault("a", GpuFault.HANG, 1.0 + EVENT_WINDOW_S)  # after the first
    assert not e.fault("a", GpuFault.HANG, 1.0 + 1.9 * EVENT_WINDOW_S)
    assert e.take(60.0).lockups == {OFF1: 2}


@pytest.mark.parametrize(("every", "hangs"), [(8.0, 75), (12.0, 50), (1.0, 600)])
def test_g2_a_storm_of_hangs_is_counted_as_it_happens(every: float, hangs: int) -> None:
    """A client that retries at once: each hang is of work that began after the last one."""
    e = Exposure(0.0)
    e.busy("a", 0.0)
    began = 0.0
    for n in range(1, hangs + 1):
        at = n * every
        assert e.fault("a", GpuFault.HANG, at, began=began)
        assert not e.fault("a", GpuFault.HANG, at + 0.1, began=began)  # the clean-up's
        assert not e.fault("a", GpuFault.HANG, at + 0.2)
        began = at + 0.3
    assert e.take(601.0).lockups == {OFF1: hangs}


def test_g2_what_hung_with_another_is_no_hang_of_its_own() -> None:
    e = Exposure(0.0)
    e.busy("a", 0.0)
    e.busy("b", 0.0)
    assert e.fault("a", GpuFault.HANG, 5.0, began=1.0)
    assert e.fault("b", GpuFault.HANG, 9.0, began=4.0)  # reported, and of the same lockup
    # Work that is refused at once, again and again, is one report.
    assert e.fault("b", GpuFault.SUBMISSIONS_IGNORED, 9.5, began=9.4)
    assert not e.fault("b", GpuFault.SUBMISSIONS_IGNORED, 9.7, began=9.6)
    # A tried again before B had spoken.
    assert e.fault("a", GpuFault.HANG, 13.0, began=5.5)
    assert e.take(16.0).lockups == {OFF2: 2}


def test_g7_what_is_common_to_two_processes_is_counted_once() -> None:
    """B works for an hour beside A: A, the first, counts it as two, B not at all."""
    work = Others(busy_s=3600.0, busy=True, long=1)
    first = Exposure(0.0, serialised=True, others=lambda _: work)
    first.busy("a", 0.0)
    record = first.take(3600.0)
    assert record.seconds == {Cell(2, 1, False): 3600.0}
    assert record.engines == {("a", 2, False): 3600.0}
    assert record.across == 3600.0
    second = Exposure(0.0, others=lambda _: work._replace(counted=True))
    second.busy("b", 0.0)
    record = second.take(3600.0)
    assert record.seconds == {} and record.across == 0.0
    assert record.engines == {("b", 2, False): 3600.0}
    # Where it works alone it counts its own, and idle time is counted once too.
    second = Exposure(0.0, others=lambda _: work._replace(counted=True, busy_s=600.0))
    second.busy("b", 0.0)
    assert second.take(3600.0).seconds == {OFF1: 3000.0}
    second.idle("b", 3600.0)
    assert second.take(7200.0).seconds == {}


def test_g7_a_lockup_is_one_of_two_engines_in_whatever_processes() -> None:
    others = Others(busy=True)
    e = Exposure(0.0, serialised=True, others=lambda _: others)
    e.busy("a", 0.0)
    e.fault("a", GpuFault.HANG, 5.0, began=1.0)
    assert e.take(6.0).lockups == {OFF2: 1}
    others = Others(busy=True, lockup=20.0)
    e.fault("a", GpuFault.HANG, 21.0, began=19.0)  # the other one has counted it
    assert e.take(22.0).lockups == {}
    e.fault("a", GpuFault.HANG, 29.0, began=23.0)
    assert e.take(30.0).lockups == {OFF2: 1}


def test_an_old_report_does_not_make_its_engine_busy() -> None:
    e = Exposure(0.0)
    e.fault("a", GpuFault.HANG, 1.0)
    e.fault("b", GpuFault.HANG, 1.0 + EVENT_WINDOW_S)
    assert e.take(99.0).lockups == {OFF1: 2}


@pytest.mark.parametrize(
    "fault", [GpuFault.INNOCENT_VICTIM, GpuFault.SUBMISSIONS_IGNORED, GpuFault.OUT_OF_MEMORY]
)
def test_consequences_and_lack_of_memory_are_no_lockup(fault: GpuFault) -> None:
    e = Exposure(0.0)
    e.busy("a", 0.0)
    assert e.fault("a", fault, 1.0)
    record = e.take(2.0)
    assert record.lockups == {}
    assert record.faults == {(fault, "a", OFF1): 1}


def test_engine_names_are_bounded() -> None:
    e = Exposure(0.0)
    now = 0.0
    for n in range(3 * MAX_ENGINES):
        name = f"engine {n} " + "x" * 500
        e.busy(name, now)
        e.fault(name, GpuFault.HANG, now + 0.5)
        now += 1.0
        e.idle(name, now)
    record = e.take(now)
    assert len(record.names()) == MAX_ENGINES + 1
    assert OTHER in record.names()
    assert max(map(len, record.names())) <= 100
    assert math.isclose(sum(record.engines.values()), now)
    assert sum(record.faults.values()) == 3 * MAX_ENGINES
    more = Record(engines={("late", 1, False): 5.0})
    record.add(more)
    assert "late" not in record.names()
    assert math.isclose(sum(record.engines.values()), now + 5.0)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 400).map(lambda quarters: quarters / 4),  # exact in binary
        st.sampled_from(["busy", "idle", "serialised", "fault", "take"]),
        st.sampled_from("abc"),
        st.booleans(),
    ),
    max_size=40,
)


@given(EVENTS)
def test_every_second_is_counted_once_and_where_it_belongs(
    events: list[tuple[float, str, str, bool]],
) -> None:
    e = Exposure(0.0)
    now, on = 0.0, False
    busy: dict[str, bool] = {}
    seconds: dict[Cell, float] = {}
    by_engine: dict[str, float] = {}
    taken = []
    for passed, kind, engine, flag in events:
        now += passed
        cell = Cell(min(len(busy), 2), min(sum(busy.values()), 2), on)
        seconds[cell] = seconds.get(cell, 0.0) + passed
        for name in busy:
            by_engine[name] = by_engine.get(name, 0.0) + passed
        if kind == "busy":
            e.busy(engine, now, longest=LONG_TOKENS if flag else 0)
            busy[engine] = flag
        elif kind == "idle":
            e.idle(engine, now)
            busy.pop(engine, None)
        elif kind == "serialised":
            e.serialised(flag, now)
            on = flag
        elif kind == "fault":
            e.fault(engine, GpuFault.HANG, now)
        else:
            taken.append(e.take(now))
    taken.append(e.take(now))
    total = merged(taken)
    assert total.seconds == pytest.approx({c: s for c, s in seconds.items() if s})
    for name, spent in by_engine.items():
        assert math.isclose(
            sum(s for (n, _, _), s in total.engines.items() if n == name),
            spent,
            abs_tol=1e-6,
        )


RECORDS = st.builds(
    Record,
    seconds=st.dictionaries(st.sampled_from([OFF0, OFF1, OFF2]), st.integers(0, 999)),
    lockups=st.dictionaries(st.sampled_from([OFF1, OFF2]), st.integers(0, 9)),
    engines=st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2]), st.booleans()),
        st.integers(0, 999),
    ),
    ended=st.dictionaries(st.sampled_from([OFF1, OFF2]), st.integers(0, 9)),
    across=st.integers(0, 999),
    faults=st.dictionaries(
        st.tuples(st.sampled_from(GpuFault), st.sampled_from("ab"), st.just(OFF2)),
        st.integers(0, 9),
    ),
)


@given(st.lists(RECORDS, max_size=6), st.integers(0, 6))
def test_the_order_and_grouping_of_a_merge_do_not_matter(
    records: list[Record], cut: int
) -> None:
    whole = merged(records)
    assert merged([merged(records[cut:]), merged(records[:cut])]) == whole


def test_the_bound_on_names_starts_afresh_with_each_record() -> None:
    e = Exposure(0.0)
    for n in range(MAX_ENGINES + 5):
        e.busy(str(n), float(n))
        e.idle(str(n), n + 1.0)
    e.take(100.0)
    e.busy("new", 100.0)
    record = e.take(101.0)
    assert record.names() == {"new"}
    # `OTHER` takes no engine's place.
    crowd = Record(engines={(str(n), 1, False): 1.0 for n in range(MAX_ENGINES - 1)})
    crowd.add(Record(engines={(OTHER, 1, False): 1.0}))
    crowd.add(record)
    assert "new" in crowd.names()
