"""Exposure, faults, replays and the way out of the penalty box."""

from __future__ import annotations

import asyncio
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.gpu import exposure_file
from omlx_admission.gpu.exposure_file import Versions
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
from omlx_admission.gpu.faults import GpuFault
from omlx_admission.gpu.watch import ADVICE, GpuFaultError, Watch, watch
from omlx_admission.gpu_turn import sites
from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import watch as gpu_watch
from omlx_admission.hooks.server import surface_sections

from .conftest import run, until
from .gpu_rig import Bench, Gate, a_request, fail, installed

IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU "
    "errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
HANG = (
    "[METAL] Command buffer execution failed: Caused GPU Hang Error "
    "(00000003:kIOGPUCommandBufferCallbackErrorHang)"
)
VICTIM = (
    "[METAL] Command buffer execution failed: Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
)


@pytest.fixture(autouse=True)
def _fresh_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one watch of the process, as if nothing had happened yet."""
    for name, value in vars(Watch()).items():
        if name not in ("_lock", "clock"):
            monkeypatch.setattr(watch, name, value)
    yield
    if watch.recorder is not None:
        watch.recorder.close()


@pytest.fixture
def recorder(tmp_path: Path) -> ExposureRecorder:
    made = ExposureRecorder(tmp_path / "ledger.jsonl", Versions("1", "2", "3", "4"))
    watch.recorder = made
    return made


def exposure_only(**more: Any) -> Any:
    return pytest.mark.parametrize("bench", [{"exposure": True, **more}], indirect=True)


@exposure_only()
async def test_an_engine_is_busy_from_its_first_request_to_its_last(
    bench: Bench, recorder: ExposureRecorder
) -> None:
    a, b = bench.core("a"), bench.core("b")
    seen: list[set[str]] = []
    a.scheduler.script.append(lambda: seen.append(set(watch.busy_now)))
    await a.start()
    await b.start()
    await bench.generate(a)
    assert seen == [{"a"}]
    assert watch.busy_now == {}
    await asyncio.gather(bench.generate(a), bench.generate(b))
    assert watch.busy_now == {}
    await bench.aclose()
    total = recorder.totals()
    assert total.names() == {"a", "b"}
    assert total.hours(busy=1, serialised=False) > 0


@exposure_only()
async def test_a_request_of_32k_tokens_counts_as_long(
    bench: Bench, recorder: ExposureRecorder
) -> None:
    a = bench.core("a")
    await a.start()

    def grow() -> None:
        for request in a.scheduler.running.values():
            request.num_prompt_tokens = 32768

    a.scheduler.script.append(grow)
    await bench.generate(a, 3)
    await bench.aclose()
    assert recorder.totals().hours(busy=1, serialised=False, long=1) > 0


@exposure_only()
async def test_the_sweep_finds_an_engine_whose_request_was_aborted(bench: Bench) -> None:
    a = bench.core("a")
    a.scheduler.add_request(a_request())
    a._step_burst()
    assert set(watch.busy_now) == {"a"}
    a.scheduler.abort_request("r")
    a._last_reap = 0.0
    a._reap_orphaned_collectors(1e9)
    assert watch.busy_now == {}
    a.scheduler.add_request(a_request())
    a._step_burst()
    assert set(watch.busy_now) == {"a"}
    await bench.aclose()
    assert watch.busy_now == {}, "a closed engine is busy no longer"


@exposure_only()
async def test_a_fault_that_omlx_swallowed_is_counted_from_the_requests_error(
    bench: Bench, recorder: ExposureRecorder
) -> None:
    def reports(text: str) -> Any:
        from omlx.request import RequestOutput
        from omlx.scheduler import SchedulerOutput

        output = SchedulerOutput()
        output.outputs.append(
            RequestOutput(request_id="r", finished=True, finish_reason="error", error=text)
        )
        return output

    a = bench.core("a")
    a.scheduler.step = lambda: reports(VICTIM)
    a._step_burst()
    a.scheduler.step = lambda: reports(f"prompt too long: {IGNORED}")
    a._step_burst()
    await bench.aclose()
    assert list(watch.faults) == [("a", GpuFault.INNOCENT_VICTIM)]
    assert {fault for fault, _e, _c in recorder.totals().faults} == {GpuFault.INNOCENT_VICTIM}


@exposure_only()
async def test_g2_a_client_that_retries_at_once_makes_a_storm_that_is_counted(
    bench: Bench,
    recorder: ExposureRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hang each 8 s for ten minutes."""
    now = [1000.0]
    monkeypatch.setattr(watch, "clock", lambda: now[0])
    monkeypatch.setattr(recorder, "_clock", lambda: now[0])
    recorder._exposure._last = now[0]
    a = bench.core("a")
    a.scheduler.add_request(a_request())

    def hang() -> None:
        now[0] += 7.9
        raise RuntimeError(HANG)

    for _ in range(75):
        a.scheduler.script.extend((hang, fail(HANG)))  # the clean-up meets it too
        now[0] += 0.1
        with pytest.raises(GpuFaultError):
            a._step_burst()
        with pytest.raises(RuntimeError, match="Caused GPU Hang"):
            a.scheduler.fail_all_requests()
    await bench.aclose()
    assert recorder.totals().count(busy=1, serialised=False) == 75
    assert sum("GPU fault Hang" in r.getMessage() for r in caplog.records) == 75


@pytest.mark.parametrize(
    "bench", [{"exposure": True, "serialize_engine_gpu": True}], indirect=True
)
async def test_g2_with_turns_work_begins_with_its_turn(
    bench: Bench, recorder: ExposureRecorder
) -> None:
    """B asked before A hung the GPU, and hangs it by itself in the turn that follows."""
    a, b = bench.core("a"), bench.core("b")
    gate = Gate()
    a.scheduler.script.append(lambda: (gate(), fail(HANG)()))
    b.scheduler.script.append(fail(HANG))
    await a.start()
    await b.start()
    for_a = bench.ask(a, 3)
    await gate.until_reached()
    for_b = bench.ask(b, 3)
    turn = gpu_turn.current
    assert turn is not None
    await until(lambda: bool(turn.snapshot().waiting))
    gate.open()
    for asked in (for_a, for_b):
        with pytest.raises(RuntimeError, match="hung the GPU"):
            await asked
    await bench.aclose()
    assert sum(recorder.totals().lockups.values()) == 2


@exposure_only()
async def test_g4_pictures_are_work_of_their_engine(
    bench: Bench, recorder: ExposureRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine decodes for an hour, pictures are encoded beside it, then a hang."""
    now = [1000.0]
    monkeypatch.setattr(watch, "clock", lambda: now[0])
    monkeypatch.setattr(recorder, "_clock", lambda: now[0])
    recorder._exposure._last = now[0]
    a, b = bench.core("a"), bench.core("b")
    a.scheduler.add_request(a_request())
    a._step_burst()
    engine = types.SimpleNamespace(_engine=types.SimpleNamespace(engine=b))

    def encode() -> None:
        now[0] += 3600.0
        raise RuntimeError(HANG)

    with pytest.raises(GpuFaultError):
        gpu_watch.vision(encode, engine, (), {})
    assert set(watch.busy_now) == {"a"}
    # Nor is an engine idle after its pictures whose requests run on.
    b.scheduler.add_request(a_request())
    b._step_burst()
    gpu_watch.vision(lambda: None, engine, (), {})
    assert set(watch.busy_now) == {"a", "b"}
    await bench.aclose()
    total = recorder.totals()
    assert total.hours(busy=2, serialised=False) == pytest.approx(1.0)
    assert total.count(busy=2, serialised=False) == 1
    assert total.hours(busy=1, serialised=False) == 0.0


class Broken:
    """A ledger that fails whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"dictionary changed size during iteration: {name}")


@exposure_only(exit_on_gpu_lockout=True)
@pytest.mark.parametrize("part", ["recorder", "busy_now", "faults", "_event", "turn"])
@pytest.mark.parametrize("text", [HANG, IGNORED])
async def test_g6_a_fault_of_the_bookkeeping_hides_none_of_the_gpu(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    text: str,
) -> None:
    import omlx.utils.fatal as fatal

    reasons: list[str] = []
    monkeypatch.setattr(fatal, "fatal_exit", lambda reason: reasons.append(reason))
    monkeypatch.setattr(watch, part, Broken())
    a = bench.core("a")
    a.scheduler.script.append(fail(text))
    with pytest.raises(GpuFaultError) as caught:
        a._step_burst()
    assert str(caught.value.__cause__) == text
    gpu_watch.vision(lambda: None, object(), (), {})
    job = gpu_jobs.Job(gpu_jobs.JOBS["tts", "_synthesize_sync"], "t", None)
    assert gpu_watch.job(job, lambda: "spoken") == "spoken"
    await bench.aclose()
    watch.recorder = None
    assert len(reasons) == (text == IGNORED)


@exposure_only()
async def test_omlx_own_errors_pass_as_they_are(bench: Bench) -> None:
    a, error = bench.core("a"), RuntimeError("of oMLX")
    a.scheduler.script.append(fail(error))
    with pytest.raises(RuntimeError) as caught:
        a._step_burst()
    assert caught.value is error
    assert watch.faults == {}


@exposure_only()
async def test_the_first_lockup_beside_another_engine_says_what_can_be_set(
    bench: Bench, recorder: ExposureRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = bench.core("a"), bench.core("b")
    a.scheduler.add_request(a_request())
    for text in (VICTIM, HANG):
        a.scheduler.script.append(fail(text))
        with pytest.raises(GpuFaultError):
            a._step_burst()
    assert "OMLX_SERIALIZE_ENGINE_GPU" not in caplog.text, "it was alone"
    watch.faults.clear()
    b.scheduler.add_request(a_request())
    b._step_burst()
    for _ in range(2):
        a.scheduler.script.append(fail(HANG))
        with pytest.raises(GpuFaultError):
            a._step_burst()
    await bench.aclose()
    said = [r.getMessage() for r in caplog.records if ADVICE in r.getMessage()]
    assert len(said) == 1, "once"
    found = surface_sections.exposure_section(recorder.totals())
    assert found["advice"] == ADVICE


HASH = "/hub/models--mlx-community--Qwen3-8B-4bit/snapshots/3f1c9a2be77d4b0d9d3c2a6d"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "features",
    [{"exposure": True}, {"exit_on_gpu_lockout": True}, {"serialize_engine_gpu": True}],
)
def test_g3_an_engine_is_called_by_its_models_id(features: dict[str, bool]) -> None:
    import omlx.engine_pool as module

    pool: Any = object.__new__(module.EnginePool)
    pool._entries = {"my-alias": types.SimpleNamespace(model_path=HASH)}
    core = types.SimpleNamespace(config=types.SimpleNamespace(model_name=HASH))
    assert sites.name_of(core) == "mlx-community--Qwen3-8B-4bit", "no hash, whoever asks"

    async def load() -> None:
        # The pool's own work fails on half a pool; the name comes before it.
        with pytest.raises(AttributeError):
            await pool._load_engine("my-alias")

    with installed("omlx.engine_pool", **features):
        run(load)
        assert sites.name_of(core) == "my-alias"
    assert sites.name_of(core) == "mlx-community--Qwen3-8B-4bit"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/models/a", "a"), ("/models/a/", "a"), ("a", "a"), ("/", "/"), ("org/b", "b")],
)
def test_g3_a_path_is_called_by_its_last_part(path: str, name: str) -> None:
    assert sites.short(path) == name


@pytest.mark.parametrize(
    "bench", [{"serialize_engine_gpu": True, "exit_on_gpu_stuck": True}], indirect=True
)
async def test_g9_a_stuck_turn_ends_the_process_where_that_is_wanted(
    bench: Bench, recorder: ExposureRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import omlx.utils.fatal as fatal

    reasons: list[str] = []
    monkeypatch.setattr(fatal, "fatal_exit", lambda reason: reasons.append(reason))
    turn = gpu_turn.current
    assert turn is not None
    turn.limit_s = 0.05
    a, b = bench.core("a"), bench.core("b")
    gate = Gate()
    a.scheduler.script.append(gate)
    await a.start()
    await b.start()
    for_a = bench.ask(a, 3)
    await gate.until_reached()
    with pytest.raises(RuntimeError, match="waited"):
        await bench.generate(b)
    gate.open()
    await for_a
    await bench.aclose()
    assert reasons[0].startswith("the GPU turn is stuck ('b' waited")
    assert exposure_file.read(recorder._file.path).lines, "what was counted is on disk"


@pytest.mark.parametrize(
    ("stuck_s", "limit_s"), [(60.0, 600.0), (0.0, 600.0), (10.0, 300.0), (100.0, 1000.0)]
)
def test_g9_never_reporting_makes_no_waiter_less_patient(
    stuck_s: float, limit_s: float
) -> None:
    with installed("omlx.engine_core", serialize_engine_gpu=True, gpu_stuck_s=stuck_s):
        assert gpu_turn.current is not None
        assert gpu_turn.current.limit_s == limit_s


class TestLockout:
    """A process that the driver ignores ends itself, and only such a one."""

    @pytest.fixture
    def exits(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        import omlx.utils.fatal as fatal

        reasons: list[str] = []
        monkeypatch.setattr(fatal, "fatal_exit", lambda reason: reasons.append(reason))
        return reasons

    @pytest.mark.parametrize(
        ("bench", "ledger", "ends"),
        [
            ({"exit_on_gpu_lockout": True, "exposure": True}, True, True),
            ({"exit_on_gpu_lockout": True}, False, True),
            ({"exit_on_gpu_lockout": False, "exposure": True}, True, False),
        ],
        indirect=["bench"],
        ids=["on", "without the ledger", "off"],
    )
    async def test_an_error_of_the_work_ends_it(
        self, bench: Bench, exits: list[str], tmp_path: Path, ledger: bool, ends: bool
    ) -> None:
        if ledger:
            watch.recorder = ExposureRecorder(tmp_path / "file", Versions("1", "2", "3", "4"))
        a = bench.core("a")
        a.scheduler.script.append(fail(IGNORED))
        with pytest.raises(GpuFaultError):
            a._step_burst()
        assert ["SubmissionsIgnored" in reason for reason in exits] == [True] * ends
        assert list(watch.faults) == [("a", GpuFault.SUBMISSIONS_IGNORED)]
        if ledger:
            lines = exposure_file.read(tmp_path / "file").lines
            assert any(line.record.faults for line in lines), "written before the end"

    @exposure_only(exit_on_gpu_lockout=True)
    def test_an_error_that_a_cache_clear_swallows_ends_it(
        self, bench: Bench, exits: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mlx.core as mx

        wrapper: Any = mx.synchronize

        def synchronize(*stream: Any) -> None:
            if stream:
                raise RuntimeError(IGNORED)

        monkeypatch.setattr(wrapper, "__wrapped__", synchronize)
        # It raises nothing here: stock swallows the error of the stream it was given.
        bench.module._sync_and_clear_cache(mx.default_stream(mx.default_device()))
        assert len(exits) == 1

    @exposure_only(exit_on_gpu_lockout=True)
    @pytest.mark.parametrize("really", [True, False])
    async def test_a_text_only_makes_it_ask_the_gpu(
        self, bench: Bench, exits: list[str], monkeypatch: pytest.MonkeyPatch, really: bool
    ) -> None:
        """oMLX swallowed the error of a prefill and kept its text, or a client wrote it."""
        import mlx.core as mx
        from omlx.request import RequestOutput
        from omlx.scheduler import SchedulerOutput

        output = SchedulerOutput()
        ended = RequestOutput(request_id="r", finished=True, error=IGNORED)
        output.outputs.append(ended)

        def refused(*_: Any) -> None:
            raise RuntimeError(IGNORED)

        a = bench.core("a")
        a.scheduler.step = lambda: output
        if really:
            monkeypatch.setattr(mx, "eval", refused)
        a._step_burst()
        monkeypatch.undo()
        await bench.aclose()
        assert len(exits) == int(really)
        assert ended.error.startswith(IGNORED)
        assert "until the server restarts" in ended.error

    @exposure_only(exit_on_gpu_lockout=True)
    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError(f"no chat template fits: {IGNORED}"),
            ValueError(IGNORED),
            RuntimeError(VICTIM),
        ],
    )
    async def test_nothing_else_ends_it(
        self, bench: Bench, exits: list[str], error: Exception
    ) -> None:
        a = bench.core("a")
        a.scheduler.script.append(fail(error))
        with pytest.raises(type(error)):
            a._step_burst()
        watch.saw_text(IGNORED, "a")
        assert exits == []


class TestReplays:
    """`_reconcile_mtp_to_standard` computes committed history again."""

    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = types.ModuleType(gpu_watch.MTP)
        monkeypatch.setitem(sys.modules, gpu_watch.MTP, module)
        return module

    def test_each_one_is_logged_at_info_and_counted(
        self, module: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = iter([True, False])
        module._reconcile_mtp_to_standard = lambda _batch, _state: next(answers)
        batch = types.SimpleNamespace(tokens=[list(range(111_000))])
        with (
            caplog.at_level(logging.INFO, "omlx.admission"),
            installed("omlx.engine_core", module.__name__, exposure=True),
        ):
            assert module._reconcile_mtp_to_standard(batch, None) is True
            assert module._reconcile_mtp_to_standard(batch, None) is False
        lines = [r.getMessage() for r in caplog.records if "reconcile" in r.getMessage()]
        assert "replayed 111000 tokens" in lines[0]
        assert lines[1].endswith("and failed")
        assert (watch.replays.count, watch.replays.tokens) == (2, 222_000)
        assert watch.replays.failed == 1

    def test_its_own_error_passes(self, module: Any) -> None:
        def broken(_batch: Any, _state: Any) -> bool:
            raise KeyError("of oMLX")

        module._reconcile_mtp_to_standard = broken
        with (
            installed("omlx.engine_core", module.__name__, exposure=True),
            pytest.raises(KeyError),
        ):
            module._reconcile_mtp_to_standard(types.SimpleNamespace(tokens=[[1]]), None)
        assert watch.replays.count == 1


class TestLedger:
    """The ledger begins with the server and ends with it."""

    def test_it_begins_under_the_base_path_and_ends_in_good_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = types.SimpleNamespace(base_path=tmp_path)
        server = types.SimpleNamespace(
            _server_state=types.SimpleNamespace(global_settings=settings)
        )
        monkeypatch.setitem(sys.modules, gpu_watch.SERVER, server)
        assert gpu_watch.init_server(lambda: "made", None, (), {}) == "made"
        first = watch.recorder
        assert first is not None
        gpu_watch.begin()
        assert watch.recorder is first

        async def pool_shutdown() -> str:
            return "down"

        async def test() -> None:
            assert await gpu_watch.shutdown(pool_shutdown, None, (), {}) == "down"

        run(test)
        lines = exposure_file.read(tmp_path / exposure_file.FILE_NAME).lines
        assert sum(line.starts for line in lines) == 1
        assert sum(line.stops for line in lines) == 1
        from omlx._version import __version__

        assert {line.versions.omlx for line in lines} == {__version__}
        assert all(line.versions.mlx and line.versions.os for line in lines)

    def test_a_server_without_a_base_path_keeps_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for state in (None, types.SimpleNamespace(global_settings=None)):
            monkeypatch.setitem(
                sys.modules, gpu_watch.SERVER, types.SimpleNamespace(_server_state=state)
            )
            gpu_watch.begin()
        assert watch.recorder is None
