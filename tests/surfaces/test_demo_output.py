"""The demo's table, picture and progress, and the spans under the picture."""

import io
from pathlib import Path

import pytest

from omlx_admission.surfaces.demo import progress, table, timeline
from omlx_admission.surfaces.demo.models import A, B
from omlx_admission.surfaces.demo.scenarios import SCENARIOS
from omlx_admission.surfaces.demo.watch import LOADING, RESIDENT, Span, spans
from tests.surfaces.demo_runs import START, answer, samples, whole_run

PNG = b"\x89PNG\r\n\x1a\n"


def _broken_stock() -> list[str]:
    stock = whole_run("stock")
    refused = stock.scenario("busy").one("B while A streams")
    refused.status, refused.ended = 507, START + 0.52
    stock.scenario("busy").misses = ["B while A streams: 507 instead of an answer"]
    return list(table.lines(stock, whole_run("patched"), SCENARIOS))


def test_the_table_has_every_request_side_by_side_in_100_columns() -> None:
    lines = _broken_stock()
    assert max(map(len, lines)) <= 100
    assert all(line.isascii() for line in lines)
    assert lines[0].split() == ["request", "stock", "patched"]
    (row,) = [line for line in lines if line.startswith("  B while A streams")]
    assert row.split()[4:] == ["507", "0.02", "s", "200", "5.10", "s"]
    for scenario in SCENARIOS:
        assert any(line.endswith(f"{scenario.name}: {scenario.title}") for line in lines)
        for one in whole_run("stock").scenario(scenario.name).answers:
            assert any(line.strip().startswith(one.label) for line in lines), one.label
    assert "  stock:   B while A streams: 507 instead of an answer" in lines
    assert lines.count("  patched: as wanted") == len(SCENARIOS)


def test_the_table_marks_what_the_patched_server_missed() -> None:
    patched = whole_run("patched")
    patched.scenario("cold").misses = ["word " * 40 + "end"]
    lines = list(table.lines(whole_run("stock"), patched, SCENARIOS))
    assert any(line.startswith("  patched: MISSED: word") for line in lines)
    assert max(map(len, lines)) <= 100


def test_cells() -> None:
    one = answer(A, "x", 0.0, 1.234)
    assert table.cells([]) == ("-", "-")
    assert table.cells([one]) == ("200", "1.23 s")
    refused = answer(A, "x", 0.0, 1.0, 503, retry_after="8")
    assert table.cells([refused]) == ("503", "1.00 s, retry in 8 s")
    many = [answer(A, "x", 0.0, 0.1), answer(A, "x", 0.0, 0.1), answer(A, "x", 0.0, 3.0, 507)]
    assert table.cells(many) == ("200 x2, 507 x1", "0.10 s, worst 3.00 s")


def test_spans_follow_each_model_through_its_states() -> None:
    seen = samples((0.3, [A], []), (0.6, [], [B]), (0.8, [B], []))
    assert spans(seen, [A.name, B.name]) == [
        Span(A.name, RESIDENT, START, pytest.approx(START + 0.3)),
        Span(B.name, LOADING, pytest.approx(START + 0.3), pytest.approx(START + 0.6)),
        Span(B.name, RESIDENT, pytest.approx(START + 0.6), pytest.approx(START + 0.7)),
    ]
    assert spans([], [A.name]) == []
    assert spans(samples((0.1, [A], [])), [A.name]) == []


def test_requests_that_overlap_and_labels_lie_in_lanes_of_their_own() -> None:
    long = answer(A, "long", 0.0, 3.0)
    short = [answer(A, "short", n, n + 0.5) for n in range(3)]
    both = [answer(A, "two", 1.0, 2.0), answer(A, "two", 1.5, 2.5)]
    bars = timeline.lanes([*short, long, *both])
    lanes: dict[str, set[int]] = {}
    for bar in bars:
        lanes.setdefault(bar.answer.label, set()).add(bar.lane)
    assert len(bars) == 6
    assert lanes["short"].isdisjoint(lanes["long"])
    assert len(lanes["short"]) == 1
    assert len(lanes["two"]) == 2
    assert sorted(set.union(*lanes.values())) == [0, 1, 2, 3]


def test_the_picture_is_a_png_in_which_every_caption_has_room(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "picture.png"
    stock = whole_run("stock")
    stock.scenario("cold").answers[1].status = 507
    timeline.draw(path, stock, whole_run("patched"), SCENARIOS, "title")
    assert path.read_bytes().startswith(PNG)
    pixels = imread(path)[..., :3]
    height, width = pixels.shape[:2]
    assert width > 1000
    assert height > 1000
    # A caption that does not fit would run into the margin.
    assert float(pixels[:, -8:].min()) == 1.0
    assert float(pixels[:, 40:-40].min()) < 0.1


def test_a_picture_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "none" / "p.png"
    with pytest.raises(OSError, match="No such file"):
        timeline.draw(path, whole_run("stock"), whole_run("patched"), SCENARIOS, "t")


def test_progress_without_a_terminal_is_plain_lines() -> None:
    stream = io.StringIO()
    with progress.make(2, stream) as bar:
        bar.step("stock: starting")
        bar.event("B: 200")
        bar.step("patched: starting")
    lines = stream.getvalue().splitlines()
    assert [line.partition(" s  ")[2] for line in lines] == [
        "(1/2) stock: starting",
        "    B: 200",
        "(2/2) patched: starting",
    ]
    assert "\x1b" not in stream.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_that_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    with progress.make(2, stream) as bar:
        assert isinstance(bar, progress.BarProgress)
        bar.step("stock: [starting]")
        bar.event("[b]B[/b]: 200")
    text = stream.getvalue()
    assert "1/2" in text
    assert "[b]B[/b]: 200" in text
    assert text.endswith("\x1b[2K")


def test_progress_on_a_terminal_without_rich_is_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert type(progress.make(2, _Terminal())) is progress.Progress
