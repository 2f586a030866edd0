"""When engines take turns: always, never, from the first lockup on, or by the hour."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from omlx_admission.gpu.watch import watch
from omlx_admission.gpu_turn import sites
from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks.gpu import process as gpu_process
from omlx_admission.hooks.gpu.process import Process, process
from omlx_admission.settings import load

from .gpu_rig import installed

HANG = RuntimeError(
    "[METAL] Command buffer execution failed: Caused GPU Hang Error "
    "(00000003:kIOGPUCommandBufferCallbackErrorHang)"
)
PATIENCE_S = 20.0


class Recorder:
    """What the ledger is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def serialised(self, on: bool) -> None:
        self.told.append(on)

    def fault(self, engine: str, *_: Any, **__: Any) -> bool:
        self.told.append(engine)
        return True

    def busy(self, *_: Any, **__: Any) -> None: ...

    def idle(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(watch, "recorder", made)
    yield made
    for name in list(watch.busy_now):
        watch.idle(name)
    watch.faults.clear()


@pytest.mark.parametrize("word", ["auto", "alternate", " AUTO "])
def test_the_variable_takes_the_modes(word: str) -> None:
    settings, problems = load({"OMLX_SERIALIZE_ENGINE_GPU": word})
    assert (settings.serialize_engine_gpu, problems) == (word.strip().lower(), [])


def test_an_unknown_mode_is_one_line_that_names_the_modes() -> None:
    settings, problems = load({"OMLX_SERIALIZE_ENGINE_GPU": "sometimes"})
    assert settings.serialize_engine_gpu is False
    assert len(problems) == 1
    for word in ("OMLX_SERIALIZE_ENGINE_GPU", "sometimes", "auto", "alternate"):
        assert word in problems[0]


def test_auto_begins_with_the_first_lockup_of_two_busy_engines(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with installed("omlx.engine_core", serialize_engine_gpu="auto", exposure=True):
        assert gpu_turn.current is None
        watch.busy("a", 0)
        watch.saw(HANG, "a")
        assert gpu_turn.current is None, "one engine alone"
        watch.busy("b", 0)
        caplog.clear()
        watch.saw(HANG, "b")
        assert gpu_turn.current is not None
        # The one that began it is counted as what it was.
        assert recorder.told == ["a", "b", True]
        said = [r.getMessage() for r in caplog.records if "take turns" in r.getMessage()]
        assert len(said) == 1
        first = gpu_turn.current
        watch.saw(HANG, "a")
        assert gpu_turn.current is first
    assert (gpu_turn.current, watch.on_lockup) == (None, None)


def test_auto_that_sees_no_hangs_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with installed("omlx.engine_core", serialize_engine_gpu="auto"):
        assert "OMLX_ADMISSION_EXPOSURE" in caplog.text


def test_alternating_turns_go_on_and_off(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    flipped = threading.Semaphore(0)
    go = threading.Semaphore(0)
    seen: list[bool] = []
    switch = Process.switch

    def slow(self: Process, on: bool) -> None:
        assert go.acquire(timeout=PATIENCE_S)
        switch(self, on)
        seen.append(gpu_turn.current is not None)
        flipped.release()

    monkeypatch.setattr(Process, "switch", slow)
    monkeypatch.setattr(gpu_process, "PERIOD_S", 0.0)
    with installed("omlx.engine_core", serialize_engine_gpu="alternate"):
        first = gpu_turn.current
        assert first is not None
        for _ in range(4):
            go.release()
            assert flipped.acquire(timeout=PATIENCE_S)
        assert seen == recorder.told == [False, True, False, True]
        assert gpu_turn.current is first
        thread = next(t for t in threading.enumerate() if t.name == "gpu-turns")
        ended = process._alternating
        assert ended is not None
        ended.set()
        go.release()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert gpu_turn.current is None


def test_an_engine_that_waits_leaves_though_turns_have_ended_meanwhile() -> None:
    class Scheduler:
        _stream = None

        def __init__(self) -> None:
            self.running: dict[str, Any] = {}

        def has_requests(self) -> bool:
            return False

    class Core:
        scheduler = Scheduler()

    core = Core()
    with installed("omlx.engine_core", serialize_engine_gpu=True):
        turn = gpu_turn.current
        assert turn is not None
        hold = turn.acquire("other", "test")
        ended: list[type[BaseException]] = []

        def work() -> None:
            try:
                sites.burst(list, core, (), {})
            except BaseException as error:
                ended.append(type(error))

        thread = threading.Thread(target=work)
        thread.start()
        pause = threading.Event()
        for _ in range(int(PATIENCE_S * 1000)):
            if turn.contended:
                break
            pause.wait(0.001)
        process.switch(False)
        sites.leave(core)
        thread.join(PATIENCE_S)
        hold.release()
    assert [error.__name__ for error in ended] == ["CancelledError"]
