"""``omlx-admission repro``: a real run on the CPU, and every way a child can go wrong."""

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from omlx_admission.gpu_turn.turn import GpuTurn
from omlx_admission.surfaces import cli, repro, repro_work
from omlx_admission.surfaces.repro import status, watch
from omlx_admission.surfaces.repro_work import Overlap, Worker

HANG = (
    "[METAL] Command buffer execution failed: Caused GPU Hang Error "
    "(00000003:kIOGPUCommandBufferCallbackErrorHang)."
)
TINY = [
    *("--prefill-width", "128", "--prefill-layers", "1", "--chunk", "4", "--context", "8"),
    *("--decode-width", "128", "--decode-layers", "1", "--burst", "3"),
]


def test_a_bounded_run_without_and_with_turns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx.core")
    call = ["repro", "--device", "cpu", "--max-steps", "3", "--json", *TINY]
    assert cli.main(call) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["os"] and report["python"]
    off, on = report["runs"]
    assert (off["turn"], on["turn"]) == (False, True)
    for one in (off, on):
        assert one["outcome"] == "clean"
        assert one["faults"] == []
        assert one["mlx"]
        assert one["device"]["name"] == "Device(cpu, 0)"
        assert one["sizes"]["burst"] == 3 and one["sizes"]["prefill_width"] == 128
        assert [one["threads"][name]["steps"] for name in ("prefill", "decode")] == [3, 3]
    assert on["overlap_s"] == 0.0


def test_time_bounds_a_run_too_and_the_page_says_what_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mlx.core")
    call = ["repro", "--device", "cpu", "--seconds", "0.3", "--turn", "on", *TINY]
    assert cli.main(call) == 0
    out, progress = capsys.readouterr()
    assert progress == "running 0.3 s with turns on ...\n"
    assert "turns on: no fault" in out
    assert "exclude faults at a rate of" in out and "nothing about a GPU" in out
    assert "both at once for 0.0 s of 0." in out
    assert "MLX 0." in out and "Device(cpu, 0)" in out and "burst 3" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds must be"),
        (["--seconds", "nan"], "--seconds must be"),
        (["--hours", "0"], "--hours must be from over 0 to 168"),
        (["--hours", "169"], "--hours must be from over 0 to 168"),
        (["--stall-s", "-1"], "--stall-s must be"),
        (["--max-steps", "-1"], "--max-steps must be"),
        (["--chunk", "0"], "--chunk must be"),
        (["--prefill-width", "100"], "--prefill-width must be a multiple of 128"),
        (["--burst", "10000000"], "--burst must be"),
    ],
)
def test_bad_calls(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["repro", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert message in error


def test_without_mlx_it_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repro.importlib.util, "find_spec", lambda _: None)
    assert cli.main(["repro"]) == 2
    error = capsys.readouterr().err
    assert "MLX is not installed" in error and error.count("\n") == 1


def test_without_a_gpu_it_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repro, "_has_gpu", lambda: False)
    assert cli.main(["repro", "--device", "gpu", "--seconds", "1"]) == 2
    assert capsys.readouterr().err == (
        "omlx-admission repro: --device gpu: MLX has no GPU here; allowed: cpu\n"
    )


def test_memory_is_told() -> None:
    sizes = {
        "prefill_width": 256,
        "prefill_layers": 2,
        "decode_width": 128,
        "decode_layers": 3,
        "context": 10,
    }
    items = 2 * (12 * 256 * 256 + 2 * 256 * 10) + 3 * (12 * 128 * 128 + 2 * 128 * 10)
    assert repro_work.memory_gb(sizes, 2) == pytest.approx(items * 2 / 1e9)


# --- the watching process ---------------------------------------------------------------


def fake(
    program: str,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[..., None] = lambda *_: None,
    **config: Any,
) -> dict[str, Any]:
    """What `watch` makes of a child that runs ``program``."""
    prelude = """
import json, os, signal, sys, time
def say(**message): print(json.dumps(message), flush=True)
def thread(steps, waiting=False, ended=False):
    return {"steps": steps, "waiting": waiting, "ended": ended,
            "busy_s": 0, "wait_s": 0, "longest_s": 0}
"""
    base = {"turn": False, "stall_s": 30.0, "seconds": 1.0}
    return watch({**base, **config}, [sys.executable, "-c", prelude + program], clock, progress)


def test_an_abort_by_metal_is_classified_from_its_last_words() -> None:
    found = fake(f"""
say(threads={{"prefill": thread(7), "decode": thread(9)}}, overlap_s=1.0, worked_s=2.0)
sys.stderr.write("libc++abi: terminating due to uncaught exception of type "
                 "std::runtime_error: {HANG}\\n")
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGABRT)
""")
    assert found["outcome"] == "fault"
    assert found["faults"][0]["class"] == "Hang"
    assert found["ended"] == "SIGABRT"
    assert found["threads"]["prefill"]["steps"] == 7
    assert status([found]) == 3


@pytest.mark.parametrize(
    ("program", "outcome", "ended", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "SIGKILL", 1),
        ("raise ImportError('no libmlx')", "failed", "exit status 1", 1),
        ("say(outcome='clean', threads={})", "clean", "exit status 0", 0),
        ("print('noise'); print('[1]'); say(outcome='clean')", "clean", "exit status 0", 0),
    ],
)
def test_ends_of_a_child(program: str, outcome: str, ended: str, code: int) -> None:
    found = fake(program)
    assert (found["outcome"], found["ended"]) == (outcome, ended)
    assert status([found]) == code
    report = {"omlx_admission": "0", "python": "3", "os": "x", "runs": [found]}
    page = "\n".join(repro.render(report))
    assert ("FAULT" in page) is (code == 3)
    if "ImportError" in program:
        assert "no libmlx" in page


def ticks() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at: once for each message."""
    count = itertools.count()
    return lambda: float(next(count))


def test_a_thread_that_stands_still_ends_the_run() -> None:
    found = fake(
        """
steps = 0
while True:
    steps += 1
    say(threads={"prefill": thread(5), "decode": thread(steps)})
    time.sleep(0.001)
""",
        clock=ticks(),
    )
    assert found["outcome"] == "stalled"
    assert found["standing"] == ["prefill"]
    assert found["ended"] == "killed"
    assert status([found]) == 3


def test_a_run_of_hours_says_how_far_it_is() -> None:
    told: list[str] = []

    def progress(result: dict[str, Any], passed: float) -> None:
        told.append(f"{passed:.0f} {result['threads']['decode']['steps']}")

    program = """
for n in range(200):
    say(threads={"prefill": thread(n), "decode": thread(n)}, worked_s=7200.0)
say(outcome="clean", threads={}, worked_s=7200.0)
"""
    found = fake(program, clock=ticks(), stall_s=1e9, progress=progress)
    minutes = [int(line.split()[0]) for line in told]
    assert len(told) >= 3 and all(60 <= b - a <= 65 for a, b in itertools.pairwise(minutes))
    assert found["outcome"] == "clean"


@pytest.mark.parametrize(
    ("worked_s", "rate", "more"),
    [(60.0, "1.8e+02 an hour", True), (7200.0, "1.5 an hour", True), (36_000, "0.3", False)],
)
def test_a_run_without_a_fault_says_what_it_excludes(
    worked_s: float, rate: str, more: bool
) -> None:
    found = fake(f"say(outcome='clean', threads={{}}, worked_s={worked_s})")
    assert found["excluded_per_hour"] == pytest.approx(2.9957 * 3600 / worked_s, rel=1e-4)
    report = {"omlx_admission": "0", "python": "3", "os": "x", "runs": [found]}
    page = "\n".join(repro.render(report))
    assert f"exclude faults at a rate of {rate}" in page
    assert ("issue 4224 would take --hours 2.3" in page) is more


def test_a_run_with_a_fault_excludes_nothing() -> None:
    found = fake("say(outcome='fault', faults=[], threads={}, worked_s=60.0)")
    assert "excluded_per_hour" not in found


def test_who_waits_for_the_turn_of_a_hung_thread_is_not_blamed() -> None:
    found = fake(
        """
while True:
    say(threads={"prefill": thread(5), "decode": thread(4, waiting=True)})
    time.sleep(0.001)
""",
        clock=ticks(),
    )
    assert found["standing"] == ["prefill"]


def test_a_finished_thread_does_not_stand_still() -> None:
    found = fake(
        """
for n in range(100):
    say(threads={"prefill": thread(5, ended=True), "decode": thread(n)})
say(outcome="clean")
""",
        clock=ticks(),
    )
    assert found["outcome"] == "clean"


def test_a_child_that_says_nothing_any_more_ends_the_run() -> None:
    found = fake("time.sleep(600)", stall_s=0.2)
    assert (found["outcome"], found["standing"], found["ended"]) == (
        "stalled",
        ["start"],
        "killed",
    )


def test_a_child_that_hangs_after_its_last_word_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repro, "GRACE_S", 0.2)
    found = fake("say(outcome='fault', faults=[]); time.sleep(600)")
    assert (found["outcome"], found["ended"]) == ("fault", "killed")


@pytest.mark.parametrize(
    ("error", "outcome", "kind"),
    [(HANG, "fault", "Hang"), ("[metal::malloc] too large", "failed", None)],
)
@pytest.mark.parametrize("turn", [False, True])
def test_an_error_in_a_thread_ends_the_run_and_the_other_thread(
    error: str, outcome: str, kind: str | None, turn: bool
) -> None:
    pytest.importorskip("mlx.core")
    program = f"""
from omlx_admission.surfaces import repro_work as repro
build = repro.prefill_like
def broken(mx, device, sizes):
    step, stream = build(mx, device, sizes)
    left = [2]
    def failing():
        step()
        left[0] -= 1
        if not left[0]:
            raise RuntimeError({error!r})
    return failing, stream
repro.prefill_like = broken
repro.child(json.loads(sys.argv[1]))
"""
    sizes = {
        key[2:].replace("-", "_"): int(n) for key, n in zip(TINY[::2], TINY[1::2], strict=True)
    }
    found = fake(program, turn=turn, device="cpu", max_steps=0, sizes=sizes, seconds=600.0)
    assert found["outcome"] == outcome, found
    (fault,) = found["faults"]
    assert fault["class"] == kind
    assert fault["thread"] == "prefill"
    assert fault["after_steps"] == 1
    assert found["threads"]["decode"]["ended"]
    report = {"omlx_admission": "0", "python": "3", "os": "x", "runs": [found]}
    assert error in "\n".join(repro.render(report))


# --- the working process ----------------------------------------------------------------


def test_overlap_counts_from_the_second_to_the_last_but_one() -> None:
    now = [0.0]
    overlap = Overlap(clock=lambda: now[0])

    def at(moment: float, what: Callable[[], None]) -> None:
        now[0] = moment
        what()

    at(0.0, overlap.begin)
    at(1.0, overlap.begin)
    now[0] = 3.0
    assert overlap.seconds() == 2.0
    at(4.0, overlap.begin)
    at(5.0, overlap.end)
    at(6.0, overlap.end)
    at(9.0, overlap.end)
    assert overlap.seconds() == 5.0
    at(10.0, overlap.begin)
    at(12.0, overlap.end)
    assert overlap.seconds() == 5.0


@pytest.mark.parametrize("where", ["build", "step", "synchronise"])
def test_a_worker_passes_the_turn_on_whatever_fails(where: str) -> None:
    turn, overlap = GpuTurn(), Overlap()

    def fail(which: str) -> None:
        if which == where:
            raise RuntimeError(HANG)

    def build() -> tuple[Callable[[], None], Any]:
        fail("build")
        return (lambda: fail("step")), "the stream"

    worker = Worker("w", build)
    worker.work(lambda _: fail("synchronise"), turn, overlap, lambda _: False)
    assert worker.ended and not worker.waiting
    assert worker.fault is not None and worker.fault["class"] == "Hang"
    assert turn.snapshot().holder is None
    assert overlap._active == 0


def test_a_worker_synchronises_its_own_stream_before_it_hands_over() -> None:
    turn, overlap = GpuTurn(), Overlap()
    log: list[Any] = []

    def synchronise(stream: Any) -> None:
        assert turn.held()
        log.append(stream)

    worker = Worker("w", lambda: ((lambda: log.append("step")), "s"))
    worker.work(synchronise, turn, overlap, lambda w: w.steps == 2)
    assert log == ["s", "step", "s", "step", "s"]
    assert worker.steps == 2 and worker.fault is None
