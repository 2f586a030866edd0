"""Rows of a batch are taken out of one engine's scheduler and go on in another one.

Mostly on a real oMLX only: the stand-in's scheduler decodes each request by itself, and has
no batch of mlx-lm's that could move.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import standin
from omlx_admission.hooks.install import State
from omlx_admission.hooks.park import rows
from omlx_admission.hooks.patching import gate
from omlx_admission.settings import Settings
from standin import tinymodels
from tests.hooks import park_models
from tests.hooks.decided import decided

#: oMLX's own imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOKENS = 24
PROMPTS = ("hello", "another prompt, and a longer one", "third")

#: What is asked of the engine beside the prompt.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "a seed": {"temperature": 1.0, "top_p": 1.0, "seed": 11},
    "stop strings": {"temperature": 1.0, "top_p": 1.0, "seed": 5, "stop": ["zzzz", "q"]},
}


@pytest.fixture(scope="module")
def omlx() -> Any:
    pytest.importorskip("omlx.scheduler")
    import omlx.engine_core

    if Path(omlx.engine_core.__file__).is_relative_to(standin.PATH):
        pytest.skip("the stand-in has no batch of mlx-lm's")
    return omlx.engine_core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return tinymodels.make_text_model(root, name="tiny", seed=3, hidden=64, layers=2)


@pytest.fixture
def make_core(omlx: Any, folder: Path) -> Iterator[Callable[[], Any]]:
    """Cores of engines with weights of their own, as after another load."""
    from mlx_lm import load

    made: list[Any] = []

    def make() -> Any:
        model, tokenizer = load(str(folder))
        made.append(omlx.EngineCore(model, tokenizer))
        return made[-1]

    yield make
    for core in made:
        core.close()


@pytest.fixture
def make_shaped(omlx: Any, folder: Path) -> Iterator[Callable[[str, str], Any]]:
    """Cores with models of other shapes."""
    from mlx_lm.utils import load_tokenizer

    made: list[Any] = []

    def make(shape: str, dtype: str) -> Any:
        tokenizer = load_tokenizer(folder)
        model = park_models.make(shape, dtype, len(tokenizer.get_vocab()))
        made.append(omlx.EngineCore(model, tokenizer))
        return made[-1]

    yield make
    for core in made:
        core.close()


class Said:
    """What each request was told, step by step."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.ends: dict[str, tuple[str, int, int]] = {}

    def note(self, outputs: list[Any]) -> None:
        for output in outputs:
            name = output.request_id
            self.text[name] = self.text.get(name, "") + output.new_text
            if output.finished:
                counts = (output.prompt_tokens, output.completion_tokens)
                self.ends[name] = (str(output.finish_reason), *counts)


def run_on(core: Any, work: Callable[[], Any]) -> Any:
    """Run what a server runs on the engine's thread, here, on this one.

    MLX on the CPU may abort a process at its end where another thread has computed. That
    arrays cross from one engine's thread to another's is seen by the live tests.
    """
    return work()


def add(core: Any, count: int, **params: Any) -> None:
    from omlx.request import Request, SamplingParams

    for number in range(count):
        sampling = SamplingParams(max_tokens=TOKENS, **params)
        request = Request(f"r{number}", PROMPTS[number], sampling)
        run_on(core, lambda request=request: core.scheduler.add_request(request))


def go_on(core: Any, said: Said, steps: int = 10_000) -> None:
    for _ in range(steps):
        if not (core.scheduler.running or core.scheduler.waiting):
            return
        said.note(run_on(core, core.scheduler.step).outputs)


def whole(make_core: Callable[[], Any], count: int, **params: Any) -> Said:
    """The answers of requests that were left alone."""
    core, said = make_core(), Said()
    add(core, count, **params)
    go_on(core, said)
    return said


def names(core: Any) -> set[str]:
    return set(core.scheduler.requests)


def moved(make_core: Callable[[], Any], count: int, at: int, **params: Any) -> Said:
    """The same, moved to another engine after ``at`` steps."""
    old, new, said = make_core(), make_core(), Said()
    add(old, count, **params)
    go_on(old, said, at)
    taken = run_on(old, lambda: rows.take_out(old, names(old), None))
    assert not old.scheduler.requests
    assert not old.scheduler.running
    assert not old.scheduler.uid_to_request_id
    assert len(old.scheduler.batch_generator._generation_batch) == 0
    old.close()
    run_on(new, lambda: rows.put_back(new, taken, ()))
    go_on(new, said)
    assert not names(new)
    return said


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_as_if_nothing_had_been(
    make_core: Callable[[], Any], kind: str, count: int
) -> None:
    params = KINDS[kind]
    alone = whole(make_core, count, **params)
    for at in (count + 1, count + 9):
        then = moved(make_core, count, at, **params)
        assert (then.text, then.ends) == (alone.text, alone.ends), at


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", park_models.SHAPES)
def test_so_it_does_with_windows_and_recurrent_states(
    make_shaped: Callable[[str, str], Any], shape: str, dtype: str
) -> None:
    def make() -> Any:
        return make_shaped(shape, dtype)

    for count in (1, 3):
        alone = whole(make, count, **KINDS["penalties"])
        then = moved(make, count, count + 8, **KINDS["penalties"])
        assert (then.text, then.ends) == (alone.text, alone.ends), count


def prefilled(make_core: Callable[[], Any], at: int, **params: Any) -> Said:
    """What parking is not: the answer so far is prefilled in the other engine."""
    from omlx.request import Request, SamplingParams

    old, new, said = make_core(), make_core(), Said()
    add(old, 1, **params)
    go_on(old, said, at)
    request = old.scheduler.requests["r0"]
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    left = TOKENS - len(request.output_token_ids)
    again = Request("r0", tokens, SamplingParams(max_tokens=left, **params))
    run_on(new, lambda: new.scheduler.add_request(again))
    go_on(new, said)
    return said


def test_a_prefill_in_its_place_is_seen_where_kernels_round_as_on_a_gpu(
    make_shaped: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return make_shaped("gemma3_text", "bfloat16")

    park_models.HalvedLinear(monkeypatch)
    params = KINDS["greedy"]
    alone = whole(make, 1, **params)
    places = range(2, 20, 3)
    assert {moved(make, 1, at, **params).text["r0"] for at in places} == {alone.text["r0"]}
    assert {prefilled(make, at, **params).text["r0"] for at in places} != {alone.text["r0"]}


def test_it_may_be_moved_after_each_of_its_tokens(make_core: Callable[[], Any]) -> None:
    """A stop string is hit on the way, and its first part is held back."""
    params = {"temperature": 1.0, "top_p": 1.0, "seed": 5}
    full = whole(make_core, 1, **params).text["r0"]
    params["stop"] = [full[14:17], full[2:4] + "?"]
    alone = whole(make_core, 1, **params)
    assert alone.ends["r0"][0] == "stop"
    for at in range(1, alone.ends["r0"][2]):
        then = moved(make_core, 1, at, **params)
        assert (then.text, then.ends) == (alone.text, alone.ends), at


def test_rows_join_what_runs_there(make_core: Callable[[], Any]) -> None:
    params = KINDS["penalties"]
    alone = whole(make_core, 3, **params)
    old, new, said = make_core(), make_core(), Said()
    add(old, 2, **params)
    go_on(old, said, 6)
    taken = run_on(old, lambda: rows.take_out(old, names(old), None))
    from omlx.request import Request, SamplingParams

    third = Request("r2", PROMPTS[2], SamplingParams(max_tokens=TOKENS, **params))
    run_on(new, lambda: new.scheduler.add_request(third))
    go_on(new, said, 4)
    run_on(new, lambda: rows.put_back(new, taken, ()))
    go_on(new, said)
    assert (said.text, said.ends) == (alone.text, alone.ends)


def test_what_has_left_meanwhile_leaves_nothing(make_core: Callable[[], Any]) -> None:
    params = KINDS["greedy"]
    alone = whole(make_core, 3, **params)
    old, new, said = make_core(), make_core(), Said()
    add(old, 3, **params)
    go_on(old, said, 8)
    taken = run_on(old, lambda: rows.take_out(old, names(old), None))
    run_on(new, lambda: rows.put_back(new, taken, {"r1"}))
    assert set(new.scheduler.running) == {"r0", "r2"}
    go_on(new, said)
    assert {n: said.ends.get(n) for n in alone.ends} == {**alone.ends, "r1": None}
    assert {said.text[n] == alone.text[n] for n in ("r0", "r2")} == {True}
    assert not names(new)


def test_the_weights_are_let_go(make_core: Callable[[], Any]) -> None:
    """What stays in use after the unload is what was parked, within one per cent."""
    import mlx.core as mx

    gc.collect()
    before = mx.get_active_memory()
    core, said = make_core(), Said()
    add(core, 2, **KINDS["greedy"])
    go_on(core, said, 6)
    taken = run_on(core, lambda: rows.take_out(core, names(core), None))
    assert mx.get_active_memory() - before > 1.5 * taken.bytes
    core.close()
    gc.collect()
    mx.clear_cache()
    left = mx.get_active_memory() - before
    assert abs(left - taken.bytes) <= taken.bytes / 100


def test_what_is_not_known_is_not_moved(make_core: Callable[[], Any]) -> None:
    core, said = make_core(), Said()
    add(core, 1, **KINDS["greedy"])
    go_on(core, said, 3)
    batch = core.scheduler.batch_generator._generation_batch

    def refused(most: int | None = None) -> str:
        with pytest.raises(rows.NotParkable) as error:
            run_on(core, lambda: rows.take_out(core, names(core), most))
        assert "r0" in core.scheduler.running
        return str(error.value)

    batch.future = 1
    assert "its batch is not the known one: future" in refused()
    del batch.future
    cache, batch.prompt_cache[0] = batch.prompt_cache[0], object()
    assert "its KV cache is a object" in refused()
    batch.prompt_cache[0] = cache
    batch.logits_processors = [[Said()]]
    assert "an answer is steered by Said" in refused()
    batch.logits_processors = [[]]
    core.scheduler._turboquant_kv_bits = 4.0
    assert "its KV cache is quantized" in refused()
    core.scheduler._turboquant_kv_bits = None
    assert "bytes, and 10 may be parked" in refused(most=10)
    with pytest.raises(rows.NotNow):
        run_on(core, lambda: rows.take_out(core, {"other"}, None))
    go_on(core, said)
    alone = whole(make_core, 1, **KINDS["greedy"])
    assert (said.text, said.ends) == (alone.text, alone.ends)


def test_the_batch_of_this_mlx_lm_is_the_known_one(omlx: Any) -> None:
    batch = sys.modules["omlx.scheduler"].GenerationBatch.empty(None, None)
    assert rows.unknown_batch(batch) is None


def test_it_is_off_unless_it_is_wanted(omlx_found: gate.Found) -> None:
    assert decided(Settings()).verdict("park").state is State.OFF


def test_it_needs_all_that_it_stands_on(omlx: Any) -> None:
    assert decided(Settings(park=True)).verdict("park").state is State.READY
    for field, name in (("resident_path", "resident"), ("off_loop_close", "off_loop_close")):
        verdict = decided(Settings(park=True, **{field: False})).verdict("park")
        assert verdict.state is State.OFF
        assert f"our '{name}' (off)" in verdict.reasons[0]


def test_an_omlx_without_such_a_batch_runs_stock(omlx_found: gate.Found) -> None:
    if not omlx_found.root.is_relative_to(standin.PATH):
        pytest.skip("the stand-in is one")
    verdict = decided(Settings(park=True)).verdict("park")
    assert verdict.state is State.REFUSED
    assert "omlx.scheduler:GenerationBatch is missing" in verdict.reasons
