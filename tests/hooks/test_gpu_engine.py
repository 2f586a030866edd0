"""The turn on engine threads: faults at the burst, its drain and the clean-up; closing.

On the stand-in, and with ``--omlx-src`` on a real oMLX: the loop, the requests and the
teardown are theirs, only the scheduler is ours.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from omlx_admission.gpu.exposure import Event
from omlx_admission.gpu.watch import watch
from omlx_admission.gpu_turn import holding as gpu_hold
from omlx_admission.gpu_turn import sites as gpu_sites
from omlx_admission.gpu_turn import turn as gpu_turn

from .conftest import until
from .gpu_rig import Bench, Gate, a_request, fail, installed

HANG = (
    "[METAL] Command buffer execution failed: Caused GPU Hang Error "
    "(00000003:kIOGPUCommandBufferCallbackErrorHang)"
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turn, "LOOK_S", 0.01)


@pytest.fixture
def turn() -> gpu_turn.GpuTurn:
    assert gpu_turn.current is not None
    gpu_turn.current.quantum_s = 0.0  # order, not time
    return gpu_turn.current


async def waits(turn: gpu_turn.GpuTurn, name: str) -> None:
    await until(lambda: name in [n for n, _s, _w in turn.snapshot().waiting])


async def contest(bench: Bench, turn: gpu_turn.GpuTurn, tokens: int = 3) -> tuple[Any, ...]:
    """A holds the turn, at a gate in its first step, and B waits for it."""
    a, b, gate = bench.core("a"), bench.core("b"), Gate()
    a.scheduler.script.append(gate)
    await a.start()
    await b.start()
    for_a = bench.ask(a, tokens)
    await gate.until_reached()
    for_b = bench.ask(b)
    await waits(turn, "b")
    return a, b, gate, for_a, for_b


async def test_two_engines_alternate_and_never_overlap(
    bench: Bench, turn: gpu_turn.GpuTurn
) -> None:
    inside: list[str] = []
    overlaps: list[list[str]] = []
    a, b = bench.core("a"), bench.core("b")
    for core in (a, b):
        stock = core.scheduler.step
        name = gpu_sites.name_of(core)

        def step(stock: Any = stock, name: str = name) -> Any:
            inside.append(name)
            if len(inside) > 1:
                overlaps.append(list(inside))
            try:
                return stock()
            finally:
                inside.remove(name)

        core.scheduler.step = step
        await core.start()
    results = await asyncio.gather(bench.generate(a, 40), bench.generate(b, 40))
    assert [r.completion_tokens for r in results] == [40, 40]
    await bench.aclose()
    assert overlaps == []
    totals = turn.snapshot().totals
    assert {n: t.turns for n, t in totals.items()} == {"a": 40, "b": 40}
    sites = {span.site for span in turn.snapshot().recent}
    assert sites == {"decode burst"}


async def test_the_streams_are_drained_on_the_engines_thread_before_the_hand_over(
    bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    events: list[tuple[str, str]] = []
    stock = mx.synchronize

    def synchronize(*args: Any) -> None:
        what = "engine stream" if args and args[0] is not None else "default stream"
        assert turn.held()
        events.append((threading.current_thread().name, what))
        stock(*args)

    monkeypatch.setattr(mx, "synchronize", synchronize)
    turn.observer = lambda span: events.append((span.name, "handed over"))
    a = bench.core("a")
    await a.start()
    await bench.generate(a, 1)
    await bench.aclose()
    thread = next(name for name, _ in events)
    assert thread.startswith("mlx-engine-")
    assert events[:3] == [
        (thread, "engine stream"),
        (thread, "default stream"),
        ("a", "handed over"),
    ]


def test_a_step_that_issued_nothing_is_not_drained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[None] = []
    monkeypatch.setattr(gpu_hold, "drain", lambda *_, **__: drains.append(None))
    a = bench.core("a")
    assert [o.has_work for o in a._step_burst()] == [False]
    assert drains == []
    a.scheduler.add_request(a_request())
    assert [o.has_work for o in a._step_burst()] == [True]
    assert drains == [None]
    asyncio.run(bench.aclose())


@pytest.mark.parametrize("when", ["before the first step", "in a later step of the burst"])
async def test_an_error_of_the_work_is_the_holders_and_the_turn_passes_on(
    bench: Bench, turn: gpu_turn.GpuTurn, when: str
) -> None:
    a, b = bench.core("a", budget_s=10.0), bench.core("b")
    gate = Gate()
    if when == "in a later step of the burst":
        a.scheduler.script.append(lambda: None)
    a.scheduler.script.append(gate)
    a.scheduler.script.append(fail())
    await a.start()
    await b.start()
    for_a = bench.ask(a, 100)
    await gate.until_reached()
    for_b = bench.ask(b)
    await waits(turn, "b")
    gate.open()
    with pytest.raises(RuntimeError, match="of the work"):
        await for_a
    assert (await for_b).completion_tokens == 3
    # The engine itself is fine: its next request is served.
    assert (await bench.generate(a)).completion_tokens == 3


async def test_an_error_of_the_drain_fails_who_still_runs_and_delivers_who_has_finished(
    bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = bench.core("a", budget_s=10.0), bench.core("b")
    stock = gpu_hold.drain
    failed: list[None] = []

    def drain(stream: Any = None, **keywords: Any) -> None:
        if stream is a.scheduler._stream and finishes.done() is False and not failed:
            failed.append(None)
            raise RuntimeError("of the drain")
        stock(stream, **keywords)

    monkeypatch.setattr(gpu_hold, "drain", drain)
    gate = Gate()
    a.scheduler.script.append(gate)
    # Ends the burst in which the short request finishes.
    a.config.decode_burst_max_steps = 2
    await b.start()
    finishes, goes_on = bench.ask(a, 2), bench.ask(a, 1000)
    await until(lambda: len(a.scheduler.running) == 2)
    await a.start()
    await gate.until_reached()
    for_b = bench.ask(b)
    await waits(turn, "b")
    gate.open()
    assert (await finishes).completion_tokens == 2
    with pytest.raises(RuntimeError, match="of the drain"):
        await goes_on
    assert (await for_b).completion_tokens == 3
    assert (await bench.generate(a)).completion_tokens == 3


async def test_an_error_of_the_drain_with_nobody_left_harms_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = bench.core("a")
    await a.start()
    stock = gpu_hold.drain
    failed: list[None] = []

    def drain(*args: Any, **keywords: Any) -> None:
        if not failed:
            failed.append(None)
            raise RuntimeError("of the drain")
        stock(*args, **keywords)

    monkeypatch.setattr(gpu_hold, "drain", drain)
    assert (await bench.generate(a, 1)).completion_tokens == 1
    assert failed
    assert (await bench.generate(a, 2)).completion_tokens == 2


async def test_an_error_in_the_clean_up_passes_the_turn_on_too(
    bench: Bench, turn: gpu_turn.GpuTurn
) -> None:
    b = bench.core("b")
    a = bench.core("a")
    a.scheduler.add_request(a_request())
    a.scheduler.script.append(fail("of the clean-up"))
    with pytest.raises(RuntimeError, match="of the clean-up"):
        await asyncio.get_running_loop().run_in_executor(
            a._mlx_executor, a.scheduler.fail_all_requests
        )
    assert turn.snapshot().recent[-1].site == "failure clean-up"
    await b.start()
    assert (await bench.generate(b)).completion_tokens == 3


async def test_the_clean_up_does_not_wait_for_ever(
    bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_hold, "OPTIONAL_WAIT_S", 0.02)
    a, b = bench.core("a"), bench.core("b")
    gate = Gate()
    b.scheduler.script.append(gate)
    await b.start()
    for_b = bench.ask(b)
    await gate.until_reached()
    a.scheduler.add_request(a_request())
    failed = await asyncio.get_running_loop().run_in_executor(
        a._mlx_executor, a.scheduler.fail_all_requests
    )
    assert failed == ["r"]
    assert turn.snapshot().timeouts == 1
    gate.open()
    await for_b


@pytest.mark.slow
async def test_a_wait_beyond_the_limit_fails_the_requests_and_says_who_held_the_turn(
    bench: Bench, turn: gpu_turn.GpuTurn
) -> None:
    a, b = bench.core("a"), bench.core("b")
    gate = Gate()
    a.scheduler.script.append(gate)
    await a.start()
    await b.start()
    for_a = bench.ask(a)
    await gate.until_reached()
    turn.limit_s = 0.02
    with pytest.raises(RuntimeError, match=r"turn on the GPU, which 'a' \(decode burst\)"):
        await bench.generate(b)
    turn.limit_s = 600.0
    gate.open()
    await for_a


class TestPrompt:
    """A prompt that is prefilled in one step is one turn a chunk."""

    @staticmethod
    def prompt(core: Any, log: list[str], after_first: Callable[[], None]) -> None:
        """The next step of ``core`` is a prompt of three chunks."""

        def step() -> None:
            for chunk in range(3):
                log.append(f"chunk {chunk}")
                if chunk == 0:
                    after_first()
                core.scheduler._on_prompt_progress([(0, chunk + 1, 3)])

        core.scheduler.script.append(step)

    async def test_others_get_their_turn_between_two_chunks(
        self, bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log: list[str] = []
        drains: list[str] = []

        a, b = bench.core("a"), bench.core("b")
        stock = gpu_hold.drain

        def drain(stream: Any = None, **keywords: Any) -> None:
            if stream is a.scheduler._stream:
                drains.append(log[-1])
            stock(stream, **keywords)

        monkeypatch.setattr(gpu_hold, "drain", drain)
        gate = Gate()
        self.prompt(a, log, gate)
        b.scheduler.script.append(lambda: log.append("b"))
        await a.start()
        await b.start()
        for_a = bench.ask(a, 1)
        await gate.until_reached()
        for_b = bench.ask(b, 1)
        await waits(turn, "b")
        gate.open()
        await asyncio.gather(for_a, for_b)
        assert a.scheduler.progress == [[(0, n, 3)] for n in (1, 2, 3)]

        assert log == ["chunk 0", "b", "chunk 1", "chunk 2"]
        # The GPU is idle when it is handed over in the middle, too.
        assert drains == ["chunk 0", "chunk 2"]

    @pytest.mark.parametrize("how", ["stop", "close"])
    async def test_an_engine_that_closes_in_the_middle_waits_no_longer(
        self,
        bench: Bench,
        turn: gpu_turn.GpuTurn,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        monkeypatch.setattr(gpu_turn, "LOOK_S", 2.0)
        log: list[str] = []

        a, b = bench.core("a"), bench.core("b")
        gate, holds = Gate(), Gate()
        self.prompt(a, log, gate)
        b.scheduler.script.append(holds)
        await a.start()
        await b.start()
        for_a = bench.ask(a, 1)
        await gate.until_reached()
        for_b = bench.ask(b, 1)
        await waits(turn, "b")
        gate.open()
        await holds.until_reached()
        await waits(turn, "a")
        if how == "stop":
            await a.stop()
        a.close()  # blocks the loop: it returns although b still holds
        assert log == ["chunk 0", "chunk 1", "chunk 2"]
        assert turn.snapshot().holder == "b"
        for_a.cancel()
        holds.open()
        await for_b

    async def test_an_error_of_the_drain_in_the_middle_is_the_prompts(
        self, bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed: list[tuple[str, str | None]] = []

        a, b = bench.core("a"), bench.core("b")
        stock = gpu_hold.drain

        def drain(stream: Any = None, **keywords: Any) -> None:
            if stream is a.scheduler._stream and not failed:
                failed.append(("in the middle", turn.snapshot().holder))
                raise RuntimeError("of the drain")
            stock(stream, **keywords)

        monkeypatch.setattr(gpu_hold, "drain", drain)
        gate = Gate()
        self.prompt(a, [], gate)
        await a.start()
        await b.start()
        for_a = bench.ask(a, 1)
        await gate.until_reached()
        for_b = bench.ask(b, 1)
        await waits(turn, "b")
        gate.open()
        with pytest.raises(RuntimeError, match="of the drain"):
            await for_a
        assert (await for_b).completion_tokens == 1

        assert failed == [("in the middle", "a")]

    def test_the_chunks_of_a_draft_model_are_such_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = pytest.importorskip("omlx.prefill_progress", reason="not in this oMLX")
        handed: list[str] = []
        tracker = module.PrefillProgressTracker()
        with installed("omlx.prefill_progress", serialize_engine_gpu=True):
            for phase in ("specprefill_scoring", "specprefill_sparse", "prefill"):
                monkeypatch.setattr(gpu_hold, "yield_turn", lambda p=phase: handed.append(p))
                tracker.update("r", 1, 3, "m", phase=phase)
            # What the chunks of a prompt in several steps tell is no place to wait at:
            # oMLX takes the time of such a chunk for what others are owed.
            tracker.update("r", 2, 3, "m")
        assert handed == ["specprefill_scoring", "specprefill_sparse"]


class TestLength:
    """A burst's budget follows the turns of others, through oMLX's own fields."""

    @staticmethod
    def budgets(core: Any) -> tuple[float, float, int]:
        config = core.config
        return (
            config.decode_burst_budget_s,
            config.decode_burst_budget_single_s,
            config.decode_burst_max_steps,
        )

    @pytest.mark.parametrize(
        ("others", "within"),
        [
            (None, (0.03, 0.1, 64)),
            ((0.1, 0.1), (0.05, 0.1, 106)),
            ((0.5, 0.5), (0.25, 0.25, 533)),
            ((4.0, 0.01), (1.5, 1.5, 3200)),
            ((0.01, 0.005), (0.01, 0.01, 64)),
        ],
    )
    async def test_it_is_there_for_the_burst_and_gone_after_it(
        self,
        bench: Bench,
        turn: gpu_turn.GpuTurn,
        monkeypatch: pytest.MonkeyPatch,
        others: tuple[float, float] | None,
        within: tuple[float, float, int],
    ) -> None:
        a = bench.core("a")
        a.config.decode_burst_budget_s, a.config.decode_burst_budget_single_s = 0.03, 0.1
        a.config.decode_burst_max_steps = 64
        monkeypatch.setattr(turn, "others_since", lambda name: others)
        seen: list[tuple[float, float, int]] = []
        a.scheduler.script.append(lambda: seen.append(self.budgets(a)))
        await a.start()
        await bench.generate(a, 1)
        assert seen == [within]
        assert self.budgets(a) == (0.03, 0.1, 64)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("decode_burst_max_steps", 1), ("decode_burst_budget_s", 0.0)],
    )
    async def test_bursts_that_are_switched_off_stay_so(
        self,
        bench: Bench,
        turn: gpu_turn.GpuTurn,
        monkeypatch: pytest.MonkeyPatch,
        field: str,
        value: float,
    ) -> None:
        a = bench.core("a", budget_s=0.1)
        setattr(a.config, field, value)
        before = self.budgets(a)
        monkeypatch.setattr(turn, "others_since", lambda name: (4.0, 4.0))
        seen: list[tuple[float, float, int]] = []
        a.scheduler.script.append(lambda: seen.append(self.budgets(a)))
        await a.start()
        await bench.generate(a, 1)
        assert seen == [before]

    async def test_a_setting_that_is_changed_meanwhile_stays(
        self, bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a = bench.core("a", budget_s=0.1)
        monkeypatch.setattr(turn, "others_since", lambda name: (4.0, 4.0))
        a.scheduler.script.append(
            lambda: setattr(a.config, "decode_burst_budget_single_s", 0.07)
        )
        await a.start()
        await bench.generate(a, 1)
        assert self.budgets(a)[:2] == (0.1, 0.07)


class TestClosing:
    """`close` blocks the event loop: whoever waits on the engine's thread must leave."""

    async def test_closed_while_waiting(self, bench: Bench, turn: gpu_turn.GpuTurn) -> None:
        _, b, gate, for_a, for_b = await contest(bench, turn)
        await b.stop()
        b.close()  # blocks the loop: it returns although the holder still holds
        assert not for_a.done()
        assert turn.snapshot().holder == "a"
        assert turn.snapshot().abandoned == 1
        for_b.cancel()
        gate.open()
        assert (await for_a).completion_tokens == 3

    @pytest.mark.parametrize("how", ["stop", "close"])
    async def test_it_leaves_at_once_and_not_at_its_next_look(
        self,
        bench: Bench,
        turn: gpu_turn.GpuTurn,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        looks: list[None] = []
        monkeypatch.setattr(gpu_sites, "say_decoding", lambda _: looks.append(None))
        monkeypatch.setattr(gpu_turn, "LOOK_S", 2.0)
        _, b, gate, for_a, for_b = await contest(bench, turn)
        await until(lambda: bool(looks))
        if how == "stop":
            await b.stop()
            await until(lambda: turn.snapshot().abandoned == 1)
        else:
            b.close()
        assert len(looks) == 1
        for_b.cancel()
        gate.open()
        await for_a

    async def test_work_that_comes_to_the_thread_while_it_closes_does_not_begin(
        self, bench: Bench, turn: gpu_turn.GpuTurn
    ) -> None:
        a = bench.core("a")
        a.scheduler.add_request(a_request())
        shutdown = a.scheduler.shutdown
        ended: list[type[BaseException] | None] = []

        def burst_comes_first() -> None:
            """What the executor may have held back when the engine began to close."""
            try:
                a._step_burst()
            except BaseException as error:
                ended.append(type(error))
            handle = types.SimpleNamespace(_engine=types.SimpleNamespace(engine=a))
            try:
                gpu_sites.vision(lambda: "encoded", handle, (), {})
            except gpu_sites.EngineClosing as error:
                ended.append(type(error))
            shutdown()

        a.scheduler.shutdown = burst_comes_first
        await a.start()
        await a.stop()
        steps = a.scheduler.steps
        scheduler = a.scheduler
        a.close()
        assert ended == [concurrent.futures.CancelledError, gpu_sites.EngineClosing]
        assert scheduler.steps == steps

    async def test_closed_while_holding(self, bench: Bench, turn: gpu_turn.GpuTurn) -> None:
        a, _, gate, for_a, for_b = await contest(bench, turn, 1000)
        await a.stop()
        # From here the loop is blocked until the burst has ended; nothing that the
        # burst or the hand-over needs may run there.
        threading.Thread(target=gate.open).start()
        a.close()
        for_a.cancel()
        assert (await for_b).completion_tokens == 3

    async def test_stopped_and_started_again_it_waits_again(
        self, bench: Bench, turn: gpu_turn.GpuTurn
    ) -> None:
        a = bench.core("a")
        await a.start()
        await bench.generate(a)
        await a.stop()
        await a.start()
        assert (await bench.generate(a)).completion_tokens == 3
        await bench.aclose()
        assert turn.snapshot().totals["a"].turns == 6

    async def test_the_abandoned_burst_ends_the_loop_without_a_fuss(
        self, bench: Bench, turn: gpu_turn.GpuTurn, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, b, gate, for_a, for_b = await contest(bench, turn)
        turn.abandon(b.scheduler)
        await until(lambda: b._task is not None and b._task.done())
        assert b.scheduler.running, "its requests were not failed on the way"
        for_b.cancel()
        gate.open()
        await for_a
        await bench.aclose()
        assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


class TestDecodeActivity:
    """A decoding engine that waits must not look idle to the others' prefill."""

    async def test_a_waiter_goes_on_saying_that_it_decodes(
        self, bench: Bench, turn: gpu_turn.GpuTurn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[None] = []
        publish = gpu_sites.say_decoding

        def counted(scheduler: Any) -> None:
            publish(scheduler)
            looks.append(None)

        monkeypatch.setattr(gpu_sites, "say_decoding", counted)
        activity = pytest.importorskip("omlx.decode_activity", reason="not in this oMLX")
        registry = activity.get_decode_activity()
        registry.clear()
        _, b, gate, for_a, for_b = await contest(bench, turn)
        key = b.scheduler._decode_activity_key
        for _ in range(3):  # said again and again, not once
            registry.remove(key)
            await until(lambda: registry.others_decoding("somebody else"))
        # One that waits with nothing running keeps silent.
        b.scheduler.waiting.append(None)
        running, b.scheduler.running = b.scheduler.running, {}
        # A look that began before may still speak; the ones after it may not.
        seen = len(looks)
        await until(lambda: len(looks) > seen)
        registry.remove(key)
        await until(lambda: len(looks) > seen + 3)
        assert not registry.others_decoding("somebody else")
        b.scheduler.running = running
        b.scheduler.waiting.clear()
        gate.open()
        await asyncio.gather(for_a, for_b)
        await bench.aclose()
        registry.clear()


class TestVision:
    """Vision encoding shares the engine's thread and its turn."""

    @pytest.fixture
    def engine(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
        core = bench.core("v")

        class Model:
            def get_input_embeddings(self, log: list[bool]) -> None:
                assert gpu_turn.current is not None
                log.append(gpu_turn.current.held())

        class Engine:
            _engine = type("Handle", (), {"engine": core})
            _vlm_model = Model()

            def _compute_vision_features(self, log: list[bool]) -> None:
                assert gpu_turn.current is not None
                log.append(gpu_turn.current.held())

            def process(self, pictures: int, log: list[bool]) -> str:
                """Templates and pictures are decoded first."""
                assert gpu_turn.current is not None
                log.append(gpu_turn.current.held())
                if pictures:
                    self._compute_vision_features(log)
                    self._vlm_model.get_input_embeddings(log)
                return "encoded"

        return Engine()

    @pytest.mark.parametrize(("pictures", "held"), [(0, [False]), (1, [False, True, True])])
    async def test_the_turn_is_taken_where_the_encoder_begins(
        self,
        bench: Bench,
        turn: gpu_turn.GpuTurn,
        engine: Any,
        pictures: int,
        held: list[bool],
    ) -> None:
        log: list[bool] = []

        core = engine._engine.engine
        answer = await asyncio.get_running_loop().run_in_executor(
            core._mlx_executor,
            lambda: gpu_sites.vision(engine.process, engine, (pictures, log), {}),
        )
        assert answer == "encoded"

        assert log == held
        assert [span.site for span in turn.snapshot().recent] == ["vision encoding"] * pictures
        assert "get_input_embeddings" not in vars(engine._vlm_model)
        assert "_compute_vision_features" not in vars(engine)

    async def test_a_chat_of_text_does_not_wait_for_the_turn(
        self, bench: Bench, turn: gpu_turn.GpuTurn, engine: Any
    ) -> None:
        a = bench.core("a")
        gate = Gate()
        a.scheduler.script.append(gate)
        await a.start()
        for_a = bench.ask(a)
        await gate.until_reached()
        answer = await asyncio.get_running_loop().run_in_executor(
            engine._engine.engine._mlx_executor,
            lambda: gpu_sites.vision(engine.process, engine, (0, []), {}),
        )
        assert answer == "encoded"
        gate.open()
        await for_a

    async def test_left_when_closing(
        self, bench: Bench, turn: gpu_turn.GpuTurn, engine: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        core = engine._engine.engine
        a = bench.core("a")
        gate = Gate()
        a.scheduler.script.append(gate)
        await a.start()
        for_a = bench.ask(a)
        await gate.until_reached()
        waiting = loop.run_in_executor(
            core._mlx_executor,
            lambda: gpu_sites.vision(engine.process, engine, (1, []), {}),
        )
        await waits(turn, "v")
        await core.stop()
        core.close()
        with pytest.raises(gpu_sites.EngineClosing, match="'v' is being unloaded"):
            await waiting
        gate.open()
        await for_a


async def test_nobody_waits_for_the_turn_on_an_event_loop(
    bench: Bench, turn: gpu_turn.GpuTurn
) -> None:
    a = bench.core("a")
    a.scheduler.add_request(a_request())
    hold = turn.acquire("other", "test")
    other = threading.Thread(target=lambda: None)
    other.start()
    other.join()
    hold.release()
    before = turn.snapshot().totals.get("a")
    a._step_burst()  # on the loop's own thread
    assert turn.snapshot().totals.get("a") == before


@pytest.mark.parametrize("bench", [{"serialize_engine_gpu": False}], indirect=True)
async def test_off_means_that_nothing_is_wrapped(bench: Bench) -> None:
    import omlx.engine_core as module
    import omlx.scheduler as scheduler_module

    assert gpu_turn.current is None
    for owner in (module.EngineCore, scheduler_module.Scheduler, module):
        wrapped = [n for n, v in vars(owner).items() if hasattr(v, "_self_wrapper")]
        assert wrapped == []


def test_undone_it_is_stock_again() -> None:
    import omlx.engine_core as module

    names = ("_step_burst", "stop", "close", "_reap_orphaned_collectors")
    before = {name: vars(module.EngineCore)[name] for name in names}
    executor = module.get_mlx_executor()
    values = {"serialize_engine_gpu": True, "exposure": True, "exit_on_gpu_lockout": True}
    with installed("omlx.engine_core", **values):
        assert all(vars(module.EngineCore)[name] is not before[name] for name in names)
        assert "submit" in vars(executor)
        assert gpu_turn.current is not None
    assert {name: vars(module.EngineCore)[name] for name in names} == before
    assert "submit" not in vars(executor)
    assert gpu_turn.current is None
    assert watch.exit is None


@pytest.mark.parametrize(
    "bench", [{"serialize_engine_gpu": True, "exposure": True}], indirect=True
)
async def test_a_gpu_fault_reaches_the_clients_in_plain_words_and_the_log_once(
    bench: Bench, turn: gpu_turn.GpuTurn, caplog: pytest.LogCaptureFixture
) -> None:
    watch._event = Event()
    a, b = bench.core("a"), bench.core("b")
    gate = Gate()
    a.scheduler.script.append(lambda: (gate(), fail(HANG)()))
    a.scheduler.script.append(lambda: None)  # the clean-up
    a.scheduler.script.append(fail(HANG))
    await a.start()
    await b.start()
    for_a = bench.ask(a, 100)
    await gate.until_reached()
    for_b = bench.ask(b, 3)
    await waits(turn, "b")
    gate.open()
    with pytest.raises(RuntimeError, match="hung the GPU; its requests have ended"):
        await for_a
    with pytest.raises(RuntimeError, match="hung the GPU"):
        await bench.generate(a)  # anew, by work that began after the first
    await for_b
    await bench.aclose()
    lines = [r.getMessage() for r in caplog.records if "GPU fault" in r.getMessage()]
    ours = [line for line in lines if line.startswith("admission: GPU fault Hang in 'a'")]
    assert len(ours) == 2, "each hang once, however many places saw it"
    assert "turn held by a (decode burst" in ours[0]
    assert "waiting: b (decode burst" in ours[0]
