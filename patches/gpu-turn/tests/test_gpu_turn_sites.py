# SPDX-License-Identifier: Apache-2.0
"""Where engines take the GPU turn: whole engines with a scheduler of the test's own."""

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import mlx.core as mx
import numpy as np
import pytest

from omlx import engine_core, gpu_turn, scheduler, server
from omlx.decode_activity import get_decode_activity
from omlx.engine.stt import STTEngine
from omlx.engine.tts import TTSEngine
from omlx.engine.vlm import VLMBatchedEngine
from omlx.engine_core import EngineConfig, EngineCore, get_mlx_executor
from omlx.gpu_turn import holding
from omlx.gpu_turn import turn as turns
from omlx.models.embedding import MLXEmbeddingModel
from omlx.models.reranker import MLXRerankerModel
from omlx.request import RequestOutput, SamplingParams
from omlx.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from omlx.settings import SchedulerSettings

PATIENCE_S = 20.0  # no outcome depends on it


class FakeScheduler:
    """Each step runs what the test put into ``script`` and gives one token to each."""

    def __init__(self, *, stream, config=None, **_):
        self.config = config
        self._stream = stream
        self._decode_activity_key = f"fake:{id(self):x}"
        self.running = {}
        self.script = []
        self.steps = []
        self.has_work = True
        self.paged_ssd_cache_manager = self._specprefill_draft_model = None

    def add_request(self, request):
        request.output_token_ids = []
        self.running[request.request_id] = request

    def has_requests(self):
        return bool(self.running)

    def step(self):
        start = time.monotonic()
        if self.script:
            self.script.pop(0)()
        output = SchedulerOutput()
        output.has_work = self.has_work
        for request in list(self.running.values()):
            request.output_token_ids.append(7)
            done = len(request.output_token_ids) >= request.sampling_params.max_tokens
            output.outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    new_token_ids=[7],
                    new_text="x",
                    output_text="x" * len(request.output_token_ids),
                    finished=done,
                    finish_reason="length" if done else None,
                )
            )
            if done:
                del self.running[request.request_id]
        self.steps.append((start, time.monotonic()))
        return output

    def fail_all_requests(self):
        failed = list(self.running)
        self.running.clear()
        return failed

    def shutdown(self):
        pass

    def deep_reset(self):
        self.running.clear()


class _Seen(Exception):
    """The work has begun; the test has seen enough."""


class Gate:
    """A place in the work where a thread stops until the test lets it go on."""

    def __init__(self):
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.go.wait(PATIENCE_S)


def synchronize_fails_once():
    """``mx.synchronize`` with a GPU error in the first call."""
    real = mx.synchronize
    broken = iter([True])

    def synchronize(*args):
        if next(broken, False):
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang")
        return real(*args)

    return synchronize


async def until(condition):
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to this")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.delenv("OMLX_SERIALIZE_ENGINE_GPU", raising=False)
    monkeypatch.setattr(turns, "LOOK_S", 0.01)
    monkeypatch.setattr(turns, "current", None)
    get_decode_activity().clear()
    yield
    get_decode_activity().clear()


@pytest.fixture
def turn(monkeypatch):
    made = turns.GpuTurn(quantum_s=0.0)
    monkeypatch.setattr(turns, "current", made)
    return made


@pytest.fixture
async def engine(monkeypatch):
    """Makes started engines: ``await engine("a")``."""
    monkeypatch.setattr(engine_core, "Scheduler", FakeScheduler)
    made = []

    async def make(name):
        core = EngineCore(
            SimpleNamespace(),
            SimpleNamespace(),
            EngineConfig(model_name=f"/models/{name}"),
        )
        made.append(core)
        await core.start()
        return core

    yield make
    for core in made:
        await core.stop()
        core.close()


async def say(core, tokens=4):
    parameters = SamplingParams(max_tokens=tokens)
    return await core.generate(prompt=[1, 2, 3], sampling_params=parameters)


# --- switching it on ----------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "setting", "wanted"),
    [
        (None, False, False),
        (None, True, True),
        ("1", False, True),
        ("0", True, False),
        ("perhaps", True, True),
        ("", True, True),
    ],
)
def test_the_variable_goes_before_the_setting(monkeypatch, variable, setting, wanted):
    if variable is not None:
        monkeypatch.setenv("OMLX_SERIALIZE_ENGINE_GPU", variable)
    settings = SimpleNamespace(scheduler=SchedulerSettings(serialize_engine_gpu=setting))
    assert gpu_turn.configure(settings) is wanted
    assert (turns.current is not None) is wanted
    assert (gpu_turn.status() is not None) is wanted


def test_without_settings_no_turn_is_made():
    assert gpu_turn.configure(None) is False


def test_the_setting_survives_a_save():
    read = SchedulerSettings.from_dict({"serialize_engine_gpu": True})
    assert SchedulerSettings.from_dict(read.to_dict()).serialize_engine_gpu is True
    assert SchedulerSettings.from_dict({}).serialize_engine_gpu is False


def test_a_server_that_starts_makes_it(monkeypatch):
    def configure(settings):
        raise _Seen(settings)

    monkeypatch.setattr(gpu_turn, "configure", configure)
    settings = SimpleNamespace()
    with pytest.raises(_Seen) as seen:
        server.init_server("models", global_settings=settings)
    assert seen.value.args == (settings,)


async def test_the_status_shows_it(turn):
    hold = turn.acquire("a", "decode burst")
    shown = (await server.server_status(True))["gpu_turn"]
    assert (shown["holder"], shown["site"]) == ("a", "decode burst")
    hold.release()
    shown = (await server.server_status(True))["gpu_turn"]
    assert shown["totals"]["a"]["turns"] == 1
    assert [span["name"] for span in shown["recent"]] == ["a"]


async def test_off_nothing_is_taken(engine, monkeypatch):
    def never(*_, **__):
        raise AssertionError("nobody may ask for the turn")

    monkeypatch.setattr(turns.GpuTurn, "acquire", never)
    assert (await say(await engine("a"))).output_text == "xxxx"


# --- engines with a scheduler ---------------------------------------------------


async def test_two_engines_never_overlap_and_say_the_same(engine, turn):
    a, b = await engine("a"), await engine("b")
    answers = await asyncio.gather(*(say(core, 50) for core in (a, b, a, b)))
    assert {answer.output_text for answer in answers} == {"x" * 50}
    spans = sorted(turn.snapshot().recent, key=lambda span: span.start)
    assert {span.name for span in spans} == {"a", "b"}
    assert all(one.end <= two.start for one, two in itertools.pairwise(spans))
    # Every step lies within a turn of its own engine.
    for core, name in ((a, "a"), (b, "b")):
        own = [span for span in spans if span.name == name]
        for start, end in core.scheduler.steps:
            assert any(span.start <= start and end <= span.end for span in own)


async def test_streams_are_drained_on_the_engines_thread_before_the_hand_over(
    engine, turn, monkeypatch
):
    core = await engine("a")
    drained = []

    def synchronize(stream=None):
        drained.append((stream, threading.current_thread().name, turn.held()))

    monkeypatch.setattr(mx, "synchronize", synchronize)
    await say(core, 1)
    thread = f"mlx-engine-{core.engine_id[:8]}_0"
    assert drained == [(core._mlx_stream, thread, True), (None, thread, True)]


async def test_a_burst_that_issued_nothing_is_not_drained(engine, turn, monkeypatch):
    core = await engine("a")
    core.scheduler.has_work = False
    drained = []
    monkeypatch.setattr(mx, "synchronize", lambda *a: drained.append(a))
    await say(core, 1)
    assert drained == []


async def test_a_drain_error_fails_who_still_runs_and_delivers_who_has_finished(
    engine, turn, monkeypatch
):
    core = await engine("a")
    core.config.decode_burst_max_steps = 1
    gate = Gate()
    core.scheduler.script = [gate]
    stays = asyncio.create_task(say(core, 1000))
    await until(gate.reached.is_set)
    ends = asyncio.create_task(say(core, 1))
    await until(lambda: core._mlx_executor._work_queue.qsize() > 0)
    fails_once = synchronize_fails_once()

    def step():
        if len(core.scheduler.running) == 2:
            monkeypatch.setattr(mx, "synchronize", fails_once)
        return FakeScheduler.step(core.scheduler)

    core.scheduler.step = step
    gate.go.set()
    assert (await ends).output_text == "x"
    with pytest.raises(RuntimeError, match="Caused GPU Hang"):
        await stays
    assert turn.snapshot().holder is None
    assert (await say(core, 2)).output_text == "xx"


async def test_a_drain_error_that_nobody_is_left_to_hear_is_logged(
    engine, turn, monkeypatch, caplog
):
    core = await engine("a")
    monkeypatch.setattr(mx, "synchronize", synchronize_fails_once())
    assert (await say(core, 1)).output_text == "x"
    assert [r.message for r in caplog.records if "Caused GPU Hang" in r.message] == [
        "Draining 'a' failed: [METAL] Command buffer execution failed: Caused GPU Hang"
    ]
    assert (await say(core, 2)).output_text == "xx"


async def test_an_error_of_the_work_passes_the_turn_on(engine, turn):
    a, b = await engine("a"), await engine("b")

    def fail():
        raise RuntimeError("out of luck")

    a.scheduler.script = [fail]
    with pytest.raises(RuntimeError, match="out of luck"):
        await say(a)
    assert (await say(b)).output_text == "xxxx"
    assert turn.snapshot().holder is None


async def test_a_waiting_engine_stops_and_closes_while_another_holds_the_turn(engine, turn):
    a, b = await engine("a"), await engine("b")
    gate = Gate()
    a.scheduler.script = [gate]
    holds = asyncio.create_task(say(a, 1))
    await until(gate.reached.is_set)
    waits = asyncio.create_task(say(b, 1))
    await until(lambda: [w[0] for w in turn.snapshot().waiting] == ["b"])
    await b.stop()
    b.close()  # it blocks the event loop on b's thread
    assert turn.snapshot().holder == "a"
    assert turn.snapshot().waiting == ()
    gate.go.set()
    assert (await holds).output_text == "x"
    waits.cancel()


async def test_an_engine_that_is_started_again_waits_again(engine, turn):
    core = await engine("a")
    await core.stop()
    await core.start()
    assert (await say(core, 2)).output_text == "xx"
    assert turn.snapshot().totals["a"].turns > 0


async def test_a_waiter_goes_on_saying_that_it_decodes(engine, turn):
    a, b = await engine("a"), await engine("b")
    gate = Gate()
    a.scheduler.script = [gate]
    holds = asyncio.create_task(say(a, 1))
    await until(gate.reached.is_set)
    waits = asyncio.create_task(say(b, 1))
    await until(lambda: get_decode_activity().others_decoding("somebody"))
    get_decode_activity().clear()
    await until(lambda: get_decode_activity().others_decoding("somebody"))
    gate.go.set()
    await holds
    await waits


async def test_others_have_their_turn_between_two_chunks_of_a_prompt(engine, turn):
    a, b = await engine("a"), await engine("b")
    gate = Gate()
    order = []

    @gpu_turn.progress
    def progress(_scheduler, _updates):
        order.append("told")

    def prompt():
        for chunk in ("one", "two"):
            order.append(chunk)
            if chunk == "one":
                gate()
            progress(a.scheduler, [])

    a.scheduler.script = [prompt]
    b.scheduler.script = [lambda: order.append("other")]
    holds = asyncio.create_task(say(a, 1))
    await until(gate.reached.is_set)
    waits = asyncio.create_task(say(b, 1))
    await until(lambda: turn.snapshot().waiting)
    gate.go.set()
    await asyncio.gather(holds, waits)
    assert order == ["one", "told", "other", "two", "told"]
    assert hasattr(Scheduler._on_prompt_progress, "__wrapped__")


def _real_scheduler():
    tokenizer = MagicMock()
    tokenizer.eos_token_id = 2
    config = SchedulerConfig(paged_cache_block_size=0, model_name="/models/a")
    return Scheduler(model=MagicMock(layers=[]), tokenizer=tokenizer, config=config)


def test_clean_up_after_an_error_is_a_turn(turn, monkeypatch):
    seen = []
    monkeypatch.setattr(
        scheduler, "_sync_and_clear_cache", lambda _: seen.append(turn.snapshot().site)
    )
    _real_scheduler().fail_all_requests()
    assert seen == ["failure clean-up"]
    assert turn.snapshot().holder is None


def test_clean_up_happens_without_the_turn_rather_than_wait_for_long(turn, monkeypatch):
    monkeypatch.setattr(holding, "OPTIONAL_WAIT_S", 0.02)
    gate = Gate()
    other = threading.Thread(target=_hold, args=(turn, gate))
    other.start()
    assert gate.reached.wait(PATIENCE_S)
    assert _real_scheduler().fail_all_requests() == []
    assert turn.snapshot().holder == "other"
    gate.go.set()
    other.join(PATIENCE_S)


async def test_vision_is_encoded_in_a_turn_and_gives_up_when_the_engine_closes(
    engine, turn, monkeypatch
):
    core = await engine("a")
    seen = []

    class Model:
        def get_input_embeddings(self):
            seen.append(turn.snapshot().site)

    class Vlm(VLMBatchedEngine):
        def __init__(self):
            self._engine = SimpleNamespace(engine=core)
            self._vlm_model = Model()

        def _prepare_vision_inputs(self, messages, *_, **__):
            seen.append(turn.snapshot().site)
            if messages[0]["content"] == "a picture":
                self._vlm_model.get_input_embeddings()
            return [1], None, None, None, 0, None

        def __del__(self):
            pass

    run = asyncio.get_running_loop().run_in_executor
    text = [{"role": "user", "content": "hello"}]
    messages = [{"role": "user", "content": "a picture"}]
    work = Vlm()
    await run(core._mlx_executor, work._process_chat_messages, text, None, {})
    assert seen == [None]
    await run(core._mlx_executor, work._process_chat_messages, messages, None, {})
    assert seen == [None, None, "vision encoding"]
    gate = Gate()
    held = run(None, lambda: _hold(turn, gate))
    await until(gate.reached.is_set)
    waits = run(core._mlx_executor, work._process_chat_messages, messages, None, {})
    await until(lambda: turn.snapshot().waiting)
    await core.stop()
    with pytest.raises(RuntimeError, match="being unloaded"):
        await waits
    gate.go.set()
    await held


def _hold(turn, gate):
    hold = turn.acquire("other", "test")
    gate()
    hold.release()


# --- the shared MLX thread --------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "call", "site"),
    [
        (MLXEmbeddingModel, lambda m: m.embed(["x"]), "embedding"),
        (MLXRerankerModel, lambda m: m.rerank("x", ["y"]), "reranker"),
    ],
)
async def test_a_forward_is_one_turn(turn, model, call, site):
    class Begun(model):
        def __init__(self):
            self.model_name = "/models/e"

        @property
        def _loaded(self):
            raise _Seen(turn.snapshot().holder, turn.snapshot().site)

    run = asyncio.get_running_loop().run_in_executor
    with pytest.raises(_Seen) as seen:
        await run(get_mlx_executor(), call, Begun())
    assert seen.value.args == ("e", site)
    assert turn.snapshot().holder is None


def _others_turn(turn, order, ready):
    """In a thread: wait for the turn, note it, hand it back."""

    def other():
        hold = turn.acquire("other", "test", alive=ready.set)
        order.append("other")
        hold.release()

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(PATIENCE_S)
    return thread


async def test_others_have_their_turn_between_two_chunks_of_speech(turn):
    order = []
    threads = []

    class Model:
        sample_rate = 16000

        def generate(self, text, verbose):
            for chunk in ("one", "two"):
                order.append(chunk)
                assert turn.snapshot().site == "text to speech"
                if chunk == "one":
                    threads.append(_others_turn(turn, order, threading.Event()))
                yield SimpleNamespace(audio=np.zeros(4, np.float32))

    speech = TTSEngine("/models/tts")
    speech._model = Model()
    await speech.synthesize("hello")
    threads[0].join(PATIENCE_S)
    assert order == ["one", "other", "two"]
    assert turn.snapshot().holder is None


async def test_others_have_their_turn_between_two_windows_of_a_transcription(turn):
    order = []
    threads = []

    class Model:
        def decode(self, window):
            order.append(window)
            if window == "one":
                threads.append(_others_turn(turn, order, threading.Event()))

        def generate(self, path):
            for window in ("one", "two"):
                self.decode(window)
            return SimpleNamespace(text="words")

    listener = STTEngine("/models/stt")
    model = listener._model = Model()
    assert (await listener.transcribe("speech.wav"))["text"] == "words"
    threads[0].join(PATIENCE_S)
    assert order == ["one", "other", "two"]
    assert "decode" not in vars(model)
    assert turn.snapshot().holder is None


def test_steps_hold_from_the_first_to_the_end_or_the_close(turn):
    items = gpu_turn.steps(iter("ab"), gpu_turn.DIFFUSION, "/models/d")
    assert turn.snapshot().holder is None
    assert next(items) == "a"
    assert (turn.snapshot().holder, turn.snapshot().site) == ("d", "diffusion")
    items.close()
    assert turn.snapshot().holder is None
    assert list(gpu_turn.steps(iter("ab"), gpu_turn.DIFFUSION)) == ["a", "b"]
    assert turn.snapshot().holder is None


async def test_nobody_waits_on_an_event_loop(turn):
    gate = Gate()
    held = asyncio.get_running_loop().run_in_executor(None, _hold, turn, gate)
    await until(gate.reached.is_set)
    assert gpu_turn.one_turn(gpu_turn.DFLASH)(lambda: "done")() == "done"
    gate.go.set()
    await held
