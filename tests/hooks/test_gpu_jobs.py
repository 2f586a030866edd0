"""The turn on oMLX's global executor: what is recognised, held, paused and left alone."""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import standin
from omlx_admission.gpu.watch import watch
from omlx_admission.gpu_turn import holding as gpu_hold
from omlx_admission.gpu_turn import sites
from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import shared as gpu_shared
from omlx_admission.hooks.gpu import sites as gpu_sites
from omlx_admission.hooks.install import decide
from omlx_admission.hooks.patching.gate import Source, find
from omlx_admission.settings import Settings
from omlx_admission.surfaces import doctor

from .gpu_rig import installed

PATIENCE_S = 20.0


def as_if_of(module: str, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` under the name by which oMLX hands such a job to its executor."""
    call.__module__ = module
    call.__name__ = name
    return call


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    import omlx.engine_core as module

    values = getattr(request, "param", {"serialize_engine_gpu": True})
    with installed("omlx.engine_core", **values):
        yield module.get_mlx_executor()


@pytest.fixture
def turn(executor: Any) -> gpu_turn.GpuTurn:
    assert gpu_turn.current is not None
    gpu_turn.current.quantum_s = 0.0  # order, not time
    return gpu_turn.current


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turn, "LOOK_S", 0.01)


JOBS = [(module, name) for module, name in gpu_jobs.JOBS if module is not None]


@pytest.mark.parametrize(("module", "name"), JOBS)
def test_a_job_of_the_table_is_held_and_drained(
    executor: Any,
    turn: gpu_turn.GpuTurn,
    module: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained: list[bool] = []
    monkeypatch.setattr(gpu_hold, "drain", lambda *_, **__: drained.append(turn.held()))
    job = as_if_of(f"omlx.engine.{module}", name, lambda: turn.held())
    kind = gpu_jobs.JOBS[module, name]
    whole = kind.whole
    assert executor.submit(job).result(PATIENCE_S) is whole
    assert drained == ([True] if whole else [])
    assert not turn.snapshot().holder


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("omlx.engine.batched", "_load_model_sync"),
        ("omlx.engine.tts", "_load_sync"),
        ("omlx.engine.embedding", "_run"),
        ("omlx.engine_pool", "_load_drafter_sync"),
        ("somebody.else", "_transcribe_sync"),
    ],
)
def test_loads_and_strangers_pass_untouched(
    executor: Any, turn: gpu_turn.GpuTurn, module: str, name: str
) -> None:
    job = as_if_of(module, name, lambda *a, **k: (turn.held(), a, k))
    assert executor.submit(job, 1, b=2).result(PATIENCE_S) == (False, (1,), {"b": 2})


def test_p6_a_job_that_cannot_be_looked_at_runs_all_the_same(executor: Any) -> None:
    class Job:
        """Looked at, it raises, as a mock does on some Pythons."""

        __module__ = "omlx.engine.stt"

        @property
        def __wrapped__(self) -> Any:
            raise TypeError("'str' object does not support item assignment")

        def __call__(self) -> str:
            return "done"

    assert executor.submit(Job()).result(PATIENCE_S) == "done"


def test_bound_methods_and_partials_are_recognised() -> None:
    class Engine:
        _model_name = "/models/speaker/"

        def poll_sync(self) -> None: ...

    Engine.poll_sync.__module__ = "omlx.engine.stt"
    job = gpu_jobs.recognise(functools.partial(Engine().poll_sync))
    assert job is not None
    assert (job.name, job.treatment.site) == ("speaker", sites.SPEECH_TO_TEXT)
    assert gpu_jobs.recognise(print) is None
    assert gpu_jobs.recognise(functools.partial(print)) is None


def test_a_job_that_omlx_decorates_itself_keeps_its_model() -> None:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def work(*args: Any) -> Any:
            return function(*args)

        return work

    class Engine:
        _model_name = "/models/speaker/"

        @decorated
        def poll_sync(self) -> None: ...

        def local(self) -> Callable[[], Any]:
            @decorated
            def _next_chunk() -> str:
                return self._model_name

            return _next_chunk

    Engine.poll_sync.__wrapped__.__module__ = "omlx.engine.stt"  # type: ignore[attr-defined]
    local = Engine().local()
    local.__wrapped__.__module__ = "omlx.engine.stt"  # type: ignore[attr-defined]
    for job in (gpu_jobs.recognise(Engine().poll_sync), gpu_jobs.recognise(local)):
        assert job is not None
        assert job.name == "speaker"


def test_a_cache_clear_never_waits(executor: Any, turn: gpu_turn.GpuTurn) -> None:
    import mlx.core as mx

    seen: list[bool] = []

    class Mx:
        pass

    stub: Any = Mx()
    stub.synchronize, stub.clear_cache = mx.synchronize, lambda: seen.append(turn.held())
    job = lambda: (stub.synchronize(), stub.clear_cache())  # noqa: E731
    job.__module__ = "omlx.engine_pool"
    named = as_if_of("omlx.scheduler", "_sync_and_clear_cache", stub.clear_cache)
    hold = turn.acquire("busy", "test")
    for clear in (job, named):
        executor.submit(clear).result(PATIENCE_S)
    state = turn.snapshot()
    hold.release()
    assert seen == [False, False]
    assert (state.waiting, set(state.totals)) == ((), set())


class TestPolls:
    """The looks of a realtime transcription take the turn where there is work."""

    @staticmethod
    def whisper(turn: gpu_turn.GpuTurn) -> Any:
        class Backend:
            _model_name = "ears"
            audio = 0

            def poll_sync(self) -> list[bool]:
                held = [turn.held()]
                return [*held, self._decode()] if self.audio else held

            def _decode(self) -> bool:
                return turn.held()

        return Backend()

    @staticmethod
    def voxtral(turn: gpu_turn.GpuTurn) -> Any:
        class Session:
            audio = 0

            def _encode_mel(self) -> bool:
                return turn.held()

            _do_prefill = _adapter_at = _encode_mel

        class Backend:
            _model_name = "ears"
            _session = Session()

            @property
            def audio(self) -> int:
                return self._session.audio

            @audio.setter
            def audio(self, n: int) -> None:
                self._session.audio = n

            def poll_sync(self) -> list[bool]:
                held = [turn.held()]
                return [*held, self._session._encode_mel()] if self.audio else held

        return Backend()

    @staticmethod
    def unknown(turn: gpu_turn.GpuTurn) -> Any:
        class Backend:
            _model_name = "ears"
            audio = 0

            def poll_sync(self) -> list[bool]:
                return [turn.held()] * (self.audio + 1)

        return Backend()

    @pytest.mark.parametrize(
        ("kind", "idle", "work"),
        [
            ("whisper", [False], [False, True]),
            ("voxtral", [False], [False, True]),
            # What is not known is held as a whole.
            ("unknown", [True], [True, True]),
        ],
    )
    def test_only_audio_is_a_turn(
        self,
        executor: Any,
        turn: gpu_turn.GpuTurn,
        kind: str,
        idle: list[bool],
        work: list[bool],
    ) -> None:
        backend = getattr(self, kind)(turn)
        type(backend).poll_sync.__module__ = "omlx.engine.stt"
        assert executor.submit(backend.poll_sync).result(PATIENCE_S) == idle
        assert bool(turn.snapshot().totals) is (kind == "unknown")
        backend.audio = 1
        assert executor.submit(backend.poll_sync).result(PATIENCE_S) == work
        assert turn.snapshot().holder is None
        assert turn.snapshot().totals["ears"].turns == 1 + (kind == "unknown")
        assert "_decode" not in vars(backend)

    def test_an_idle_poll_passes_a_turn_that_is_held(
        self, executor: Any, turn: gpu_turn.GpuTurn
    ) -> None:
        backend = self.whisper(turn)
        type(backend).poll_sync.__module__ = "omlx.engine.stt"
        hold = turn.acquire("busy", "test")
        assert executor.submit(backend.poll_sync).result(PATIENCE_S) == [False]
        hold.release()


def test_a_job_whose_reader_would_wait_for_ever_runs_without_the_turn_at_last(
    executor: Any, turn: gpu_turn.GpuTurn
) -> None:
    turn.limit_s = 0.02
    hold = turn.acquire("busy", "test")
    for module, name in (("vlm", "_worker"), ("dflash", "_run_generate_streaming")):
        job = as_if_of(f"omlx.engine.{module}", name, lambda: turn.held())
        assert executor.submit(job).result(PATIENCE_S) is False
    for module, name in (("vlm", "_process_diffusion_chat_messages"), ("dflash", "_run")):
        job = as_if_of(f"omlx.engine.{module}", name, lambda: "ran")
        with pytest.raises(gpu_turn.TurnTimeout):
            executor.submit(job).result(PATIENCE_S)
    hold.release()


class Speaker:
    """A speech model: its audio comes in pieces."""

    model_name = "speaker"

    def __init__(self, turn: gpu_turn.GpuTurn, log: list[str]) -> None:
        self.turn = turn
        self.log = log
        self.in_the_middle = threading.Event()

    def generate(self, pieces: int) -> Iterator[int]:
        for piece in range(pieces):
            yield self.step("piece", piece)

    def decode(self, window: int) -> int:
        return self.step("window", window)

    def step(self, kind: str, number: int) -> int:
        assert self.turn.held()
        self.log.append(f"{kind} {number}")
        if number == 0:
            self.in_the_middle.set()
            until(lambda: self.turn.contended)
        return number


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("what the test waits for never happened")


def another(turn: gpu_turn.GpuTurn, speaker: Speaker, log: list[str]) -> threading.Thread:
    """A decoding engine that wants the GPU in the middle of the job."""

    def work() -> None:
        assert speaker.in_the_middle.wait(PATIENCE_S)
        hold = turn.acquire("decoder", "test")
        log.append("decoder's turn")
        hold.release()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("name", "step", "piece"),
    [
        ("tts._synthesize_sync", "generate", "piece"),
        ("stt._transcribe_sync", "decode", "window"),
    ],
)
def test_others_get_their_turn_between_two_steps_of_a_job(
    executor: Any, turn: gpu_turn.GpuTurn, name: str, step: str, piece: str
) -> None:
    """Chunks of speech, and windows of a transcription."""
    log: list[str] = []
    model = Speaker(turn, log)

    def work() -> list[int]:
        if step == "generate":
            return list(model.generate(3))
        return [model.decode(window) for window in range(3)]

    module, _, function = name.partition(".")
    job = as_if_of(f"omlx.engine.{module}", function, work)
    thread = another(turn, model, log)
    assert executor.submit(job).result(PATIENCE_S) == [0, 1, 2]
    thread.join(PATIENCE_S)
    assert log == [f"{piece} 0", "decoder's turn", f"{piece} 1", f"{piece} 2"]
    assert step not in vars(model)


def test_a_job_that_fails_gives_its_model_and_the_turn_back(
    executor: Any, turn: gpu_turn.GpuTurn
) -> None:
    model = Speaker(turn, [])

    def synthesize() -> None:
        assert "generate" in vars(model)
        raise ValueError("of the model")

    job = as_if_of("omlx.engine.tts", "_synthesize_sync", synthesize)
    with pytest.raises(ValueError, match="of the model"):
        executor.submit(job).result(PATIENCE_S)
    assert "generate" not in vars(model)
    assert turn.snapshot().holder is None


@pytest.mark.parametrize("where", ["in the work", "in the drain"])
def test_an_error_is_the_jobs_own_and_the_turn_passes_on(
    executor: Any, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    drained: list[bool] = []
    seen: list[tuple[str, bool]] = []

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(where)

    def fine(*_: Any, **__: Any) -> str:
        return "done"

    def drain(*_: Any, **__: Any) -> None:
        drained.append(turn.held())
        if where == "in the drain":
            broken()

    def saw(error: BaseException, _name: str) -> None:
        seen.append((str(error), turn.held()))

    monkeypatch.setattr(gpu_hold, "drain", drain)
    monkeypatch.setattr(watch, "saw", saw)
    job = as_if_of(
        "omlx.engine.sts", "_process_sync", broken if where == "in the work" else fine
    )
    with pytest.raises(RuntimeError, match=where):
        executor.submit(job).result(PATIENCE_S)
    # What failed may have left work behind; who was next would be blamed for it.
    assert drained == [True]
    assert (where, True) in seen
    hold = turn.acquire("next", "test", limit_s=PATIENCE_S)
    hold.release()


class TestSteps:
    """Iterators and forwards at which long work pauses."""

    def test_events_keep_their_generator(self) -> None:
        closed: list[str] = []

        def events() -> Iterator[int]:
            try:
                yield 1
                yield 2
            finally:
                closed.append("closed")

        items, *rest = gpu_shared.dflash_events(lambda: (events(), "flow", {3}), None, (), {})
        assert rest == ["flow", {3}]
        assert next(iter(items)) == 1
        items.close()
        assert closed == ["closed"]
        assert list(gpu_shared.diffusion_steps(lambda: iter([1, 2]), None, (), {})) == [1, 2]

    def test_one_document_one_forward(
        self, executor: Any, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[None] = []
        monkeypatch.setattr(gpu_hold, "yield_turn", lambda: pauses.append(None))

        class Model:
            layers = 3

            def __call__(self, ids: int) -> int:
                return ids + self.layers

        class Reranker:
            model: Any = Model()

        reranker = Reranker()
        own = reranker.model

        def documents() -> list[int]:
            assert callable(reranker.model)
            assert reranker.model.layers == 3
            return [reranker.model(n) for n in range(3)]

        assert gpu_shared.causal_documents(documents, reranker, (), {}) == [3, 4, 5]
        assert len(pauses) == 3
        assert reranker.model is own
        with pytest.raises(ZeroDivisionError):
            gpu_shared.causal_documents(lambda: 1 // 0, reranker, (), {})
        assert reranker.model is own


def test_embedder_and_reranker_hold_the_turn_for_their_forward(
    executor: Any, turn: gpu_turn.GpuTurn
) -> None:
    import omlx.models.embedding as embedding
    import omlx.models.reranker as reranker

    class Model:
        model_name = "/models/vectors"

    def forward(*args: Any) -> tuple[bool, tuple[Any, ...]]:
        return turn.held(), args

    def both() -> list[Any]:
        return [
            gpu_shared.embed(forward, Model(), ("x",), {}),
            gpu_shared.rerank(forward, Model(), ("y",), {}),
        ]

    assert executor.submit(both).result(PATIENCE_S) == [(True, ("x",)), (True, ("y",))]
    assert turn.snapshot().totals["vectors"].turns == 2
    with installed("omlx.models.embedding", "omlx.models.reranker", serialize_engine_gpu=True):
        for model in (embedding.MLXEmbeddingModel.embed, reranker.MLXRerankerModel.rerank):
            assert hasattr(model, "_self_wrapper")
    assert not hasattr(embedding.MLXEmbeddingModel.embed, "_self_wrapper")


@pytest.mark.parametrize("executor", [{"exposure": True}], indirect=True)
def test_without_the_turn_jobs_are_still_watched(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_turn.current is None
    busy: list[dict[str, float]] = []

    class Engine:
        _model_name = "speaker"

        def poll_sync(self) -> None:
            busy.append(dict(watch.busy_now))

    Engine.poll_sync.__module__ = "omlx.engine.stt"
    executor.submit(Engine().poll_sync).result(PATIENCE_S)
    assert list(busy[0]) == ["speaker"]
    assert "speaker" not in watch.busy_now


def test_an_executor_made_anew_is_watched_too(executor: Any, turn: gpu_turn.GpuTurn) -> None:
    import omlx.engine_core as module

    module._global_mlx_executor = None
    try:
        fresh = module.get_mlx_executor()
        assert fresh is not executor
        job = as_if_of("omlx.engine.stt", "_next_chunk", lambda: turn.held())
        assert fresh.submit(job).result(PATIENCE_S) is True
    finally:
        module._global_mlx_executor.shutdown()
        module._global_mlx_executor = executor


# --- the census -----------------------------------------------------------------------------

#: Jobs of the global executor that are no GPU work of requests: loads and closing.
LOADS = {
    "_calibrate_components_sync",
    "_enable_ane_prefill",
    "_load_draft",
    "_load_drafter_sync",
    "_load_model_sync",
    "_load_models",
    "_load_sync",
    "_load_vlm_sync",
    "apply_qwen35_moe_gate_up_fusion",
    "close",
    "free_t5_biases",
    "load",
    "materialize_lazy_state",
}


def _sources(config: pytest.Config) -> list[Path]:
    return [standin.PATH, *(Path(source) for source in config.getoption("--omlx-src"))]


def _jobs_of(root: Path) -> dict[tuple[str, str], int]:
    """Every function that the source hands to the global executor."""
    found: dict[tuple[str, str], int] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "run_in_executor"
                and ast.unparse(node.args[0]) == "get_mlx_executor()"
            ):
                job = node.args[1]
                if isinstance(job, ast.Lambda):
                    body = ast.unparse(job)
                    name = "clear" if "clear_cache" in body else body
                else:
                    name = ast.unparse(job).rpartition(".")[2]
                found[path.stem, name] = node.lineno
    return found


def test_every_job_of_the_global_executor_is_known(pytestconfig: pytest.Config) -> None:
    # The stand-in's speech engines borrow an embedder: its census says nothing.
    sources = _sources(pytestconfig)[1:]
    if not sources:
        pytest.skip("needs a real oMLX: --omlx-src DIR")
    for source in sources:
        root = find(source).root
        unknown = {
            f"{module}.py:{line} {name}"
            for (module, name), line in _jobs_of(root).items()
            if (module, name) not in gpu_jobs.JOBS
            and (None, name) not in gpu_jobs.JOBS
            and name not in LOADS
            # Audio files are decoded there, on the CPU.
            and name not in ("clear", "lambda: _load_audio_samples(audio_path)")
        }
        assert unknown == set(), f"{source}: neither covered nor a load"


def test_the_list_of_sites_names_every_treatment() -> None:
    names = {site.name for site in gpu_sites.SITES if site.covered}
    assert {t.site.name for t in gpu_jobs.JOBS.values() if not t.idle} <= names
    assert all(site.note for site in gpu_sites.SITES)


def test_doctor_shows_the_sites_of_the_omlx_it_looks_at() -> None:
    report = decide(standin.PATH, Settings(serialize_engine_gpu=True))
    lines = doctor.as_lines(report, None)
    start = next(n for n, line in enumerate(lines) if line.startswith("GPU turn"))
    assert "ready" in lines[start]
    shown = {tuple(line.split("  ")[1:2]) for line in lines[start + 1 :]}
    assert ("decode burst",) in shown
    assert ("keep-warm",) not in shown
    data = doctor.as_json(report, None)["gpu_sites"]
    assert {site["name"] for site in data if not site["covered"]} >= {"model load", "teardown"}
    assert all(site["note"] for site in data)


def test_the_list_of_sites_of_one_omlx_leaves_out_what_it_lacks(
    pytestconfig: pytest.Config,
) -> None:
    found = {s.name for s in gpu_sites.present(Source(find(_sources(pytestconfig)[-1])))}
    assert "decode burst" in found
    assert "keep-warm" not in found
    assert "keep-warm" in {s.name for s in gpu_sites.SITES}
    for source in pytestconfig.getoption("--omlx-src"):
        real = {s.name for s in gpu_sites.present(Source(find(Path(source))))}
        assert real >= {s.name for s in gpu_sites.SITES if s.covered} - {"keep-warm"}
