"""GPU work of the ``mlx-global`` thread: embedding, reranking, speech, diffusion, DFlash.

Most of it reaches the executor as local functions, which no attribute names. The one
place that all of it passes is the executor's ``submit``, so that is wrapped, and a job
is recognised by its function's name (`JOBS`). What is not in the table, loads above all,
passes untouched. Embedder and reranker are wrapped at their model instead: in 0.7.x the
job begins with a wait of oMLX's own, which must not be spent holding the GPU.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from omlx_admission.core import faults, load_work
from omlx_admission.gpu_turn.turn import TurnTimeout
from omlx_admission.hooks.gpu.hold import holding as gpu_hold
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger, named
from omlx_admission.hooks.patching.part import Wanted

logger = logging.getLogger("omlx.admission")

CORE = "omlx.engine_core"
EMBEDDING = "omlx.models.embedding"
RERANKER = "omlx.models.reranker"
DFLASH = "omlx.engine.dflash"
DIFFUSION = "mlx_vlm.generate.diffusion"

EXECUTOR = Need(
    CORE,
    "get_mlx_executor",
    Kind.SYNC,
    (),
    exact=True,
    returns=("ThreadPoolExecutor",),
)
#: Where the executor is kept once it is there.
EXECUTOR_VALUE = Need(CORE, "_global_mlx_executor", Kind.VALUE)

#: What is shadowed on the executor itself, as it is shown.
SUBMIT = f"{CORE}:get_mlx_executor().submit"

EMBED = Need(EMBEDDING, "MLXEmbeddingModel.embed", Kind.SYNC)
RERANK = Need(RERANKER, "MLXRerankerModel.rerank", Kind.SYNC)
DFLASH_EVENTS = Need(DFLASH, "DFlashEngine._stream_dflash_events", Kind.SYNC, optional=True)
#: The models that are wrapped themselves, and where they are in the middle of long work.
MODEL_NEEDS = (
    EMBED,
    RERANK,
    *(
        Need(RERANKER, f"MLXRerankerModel.{name}", Kind.SYNC, optional=True)
        for name in ("_get_jina_hidden_states", "_rerank_causal_lm")
    ),
    DFLASH_EVENTS,
    # What a job is called by in logs.
    *read_if_there(EMBEDDING, "MLXEmbeddingModel", "model_name"),
    *read_if_there(RERANKER, "MLXRerankerModel", "model_name", "model"),
    *(
        need
        for module, name in (
            (DFLASH, "DFlashEngine"),
            ("omlx.engine.embedding", "EmbeddingEngine"),
            ("omlx.engine.reranker", "RerankerEngine"),
            ("omlx.engine.sts", "STSEngine"),
            ("omlx.engine.stt", "STTEngine"),
            ("omlx.engine.tts", "TTSEngine"),
            ("omlx.engine.vlm", "VLMBatchedEngine"),
        )
        for need in read_if_there(module, name, "_model_name")
    ),
)


@dataclass(frozen=True)
class Treatment:
    """How a job of the global executor is treated.

    Attributes:
        site: its name in `hooks.gpu.sites`.
        whole: the turn is taken round the whole job (else deeper inside it).
        optional: it runs without the turn rather than fail for want of it.
        answers: its caller waits for what the job itself delivers, not for its end, and
            would wait indefinitely for a job that never ran: after a wait to the limit it
            runs without the turn.
        steps: methods of the job's model between whose calls others get their turn.
        items: a method of the model whose items are such steps.
    """

    site: str
    whole: bool = True
    optional: bool = False
    answers: bool = False
    steps: tuple[str, ...] = ()
    items: str | None = None


_SPEECH_TO_TEXT = Treatment(
    "speech to text", steps=("decode", "_generate_single_chunk", "decode_chunk")
)
_DIFFUSION = Treatment("diffusion")
_DFLASH = Treatment("DFlash")
_CLEAR = Treatment("cache clear", optional=True)

#: (module's last part or None for any, function name) -> treatment.
JOBS: dict[tuple[str | None, str], Treatment] = {
    ("embedding", "_embed_sync"): Treatment("embedding", whole=False),
    ("embedding", "_execute_microbatch"): Treatment("embedding", whole=False),
    ("reranker", "_rerank_sync"): Treatment("reranker", whole=False),
    ("tts", "_synthesize_sync"): Treatment("text to speech", items="generate"),
    ("tts", "_next_pcm_chunk"): Treatment("text to speech"),
    ("stt", "_transcribe_sync"): _SPEECH_TO_TEXT,
    ("stt", "_decode_segment"): _SPEECH_TO_TEXT,
    ("stt", "_next_chunk"): _SPEECH_TO_TEXT,
    ("stt", "_next_token"): _SPEECH_TO_TEXT,
    ("stt", "start_sync"): _SPEECH_TO_TEXT,
    ("stt", "poll_sync"): _SPEECH_TO_TEXT,
    ("stt", "close_sync"): _SPEECH_TO_TEXT,
    ("sts", "_process_sync"): Treatment("speech to speech"),
    ("vlm", "_worker"): replace(_DIFFUSION, answers=True),
    ("vlm", "_prepare_diffusion_inputs_from_prompt"): _DIFFUSION,
    ("vlm", "_process_diffusion_chat_messages"): _DIFFUSION,
    ("dflash", "_run"): _DFLASH,
    ("dflash", "_run_generate_streaming"): replace(_DFLASH, answers=True),
    (None, "_sync_and_clear_cache"): _CLEAR,
}


def names_in(module: str) -> tuple[str, ...]:
    """Names of the jobs that are known in one module (its last part); see `Kind.JOBS`."""
    return ("clear_cache", *(name for part, name in JOBS if part in (module, None)))


@dataclass(frozen=True)
class Job:
    """One recognised job and the model it works for."""

    treatment: Treatment
    name: str
    model: Any


Layer = Callable[[Job, Callable[[], Any]], Any]
#: Given the executor's own ``submit`` and a job: where it goes instead, None: nowhere else.
Route = Callable[[Callable[..., Any], Any, Any, Any], concurrent.futures.Future[Any] | None]


def recognise(function: Any) -> Job | None:
    """What ``function``, handed to the global executor, is; None: not GPU work of ours."""
    while isinstance(function, functools.partial):
        function = function.func
    bound = getattr(function, "__self__", None)
    function = inspect.unwrap(function)  # an oMLX that takes turns itself decorates it
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None)
    if code is None or not isinstance(module, str) or not module.startswith("omlx."):
        return None
    name = function.__name__
    kind = JOBS.get((module.rpartition(".")[2], name)) or JOBS.get((None, name))
    if kind is None and name == "<lambda>" and "clear_cache" in code.co_names:
        kind = _CLEAR
    if kind is None:
        return None
    owner = bound or _free(function, "self")
    model = _free(function, "model")
    text = getattr(owner, "_model_name", None) or getattr(model, "model_name", None)
    if not isinstance(text, str) or not text:
        text = kind.site
    return Job(kind, os.path.basename(text.rstrip("/")), model)


def _known(function: Any) -> Job | None:
    try:
        return recognise(function)
    except Exception as error:  # noqa: BLE001 - any callable may be handed in
        faults.note("a job of the global thread", error)
        return None


def _free(function: Any, name: str) -> Any:
    """A variable that a local function took along from where it was made."""
    function = getattr(function, "__func__", function)
    names = function.__code__.co_freevars
    if name not in names:
        return None
    try:
        return function.__closure__[names.index(name)].cell_contents
    except ValueError:
        return None  # not assigned yet


class Executors:
    """Layers round the jobs of the global executor, shared by the features that need them,
    a way past it, and whose load they belong to.

    The executor object stays oMLX's own, with one instance attribute more, so that its
    replacement or shutdown by oMLX works unchanged.
    """

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._route: Route | None = None
        self._changed: list[Any] = []

    def add(self, module: Any, ledger: Ledger, layer: Layer) -> None:
        """Put ``layer`` outside those that are there."""
        self._watch(module, ledger)
        self._layers.append(layer)

    def send(self, module: Any, ledger: Ledger, route: Route) -> None:
        """Ask ``route`` where a job goes before anything else is done with it."""
        self._watch(module, ledger)
        self._route = route

    def _watch(self, module: Any, ledger: Ledger) -> None:
        """The first one wraps the getter."""
        if not self._layers and self._route is None:
            ledger.wrap(module, "get_mlx_executor", self._get)
            if module._global_mlx_executor is not None:
                self.prepare(module._global_mlx_executor)
        ledger.changed(SUBMIT, named(self.prepare), self.undo)

    def _get(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        executor = wrapped(*args, **kwargs)
        # Modules that imported the getter by name keep this wrapper after undo.
        if self._layers or self._route is not None:
            self.prepare(executor)
        return executor

    def may_prepare(self, ledger: Ledger) -> None:
        """Executors may be changed from now on without layers: to see whose load runs."""
        ledger.changed(SUBMIT, named(self.prepare), self.let_go)

    def prepare(self, executor: Any) -> bool:
        """See to it that the jobs of ``executor`` pass here; whether they do."""
        if not isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            return False
        if executor in self._changed:
            return True
        if "submit" in vars(executor):
            return False
        stock = executor.submit

        def submit(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            future = self._submit(stock, function, args, kwargs)
            load_work.note(future)
            return future

        executor.submit = submit  # type: ignore[method-assign]
        self._changed.append(executor)
        return True

    def _submit(self, stock: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if self._route is not None:
            elsewhere = self._route(stock, function, args, kwargs)
            if elsewhere is not None:
                return elsewhere
        job = _known(function) if self._layers else None
        if job is None:
            return stock(function, *args, **kwargs)
        return stock(self._run, job, function, args, kwargs)

    def _run(self, job: Job, function: Any, args: Any, kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        for layer in self._layers:
            call = functools.partial(layer, job, call)
        return call()

    def undo(self) -> None:
        """Neither layers nor a way past it any more."""
        self._layers.clear()
        self._route = None
        self.let_go()

    def let_go(self) -> None:
        """Leave every executor as it was, unless layers or the way past it need it."""
        if self._layers or self._route is not None:
            return
        for executor in self._changed:
            vars(executor).pop("submit", None)
        self._changed.clear()


executors = Executors()


def drain_global() -> None:
    """What the global thread may have in flight: its default stream and the libraries'."""
    gpu_hold.drain(modules=True)


def take_turn(job: Job, call: Callable[[], Any]) -> Any:
    """The layer of the turn."""
    kind = job.treatment
    if not kind.whole:
        return call()
    if (kind.steps or kind.items) and job.model is not None:
        call = functools.partial(_with_pauses, job.model, kind, call)
    try:
        return gpu_hold.held(job.name, kind.site, call, drain_global, optional=kind.optional)
    except TurnTimeout:
        if not kind.answers:
            raise
        # It has not begun: what such a job raises itself goes to its reader.
        logger.warning(
            "admission: '%s' (%s) waited too long for its turn on the GPU and runs without it",
            job.name,
            kind.site,
        )
        return call()


def _with_pauses(model: Any, kind: Treatment, call: Callable[[], Any]) -> Any:
    """Run ``call`` while the model's own methods make room for others between steps.

    The methods are shadowed on the instance for the time of the job; the global thread
    is the only one that uses this model.
    """
    shadowed: list[str] = []
    own = getattr(model, "__dict__", None)
    for name in (*kind.steps, *((kind.items,) if kind.items else ())):
        method = getattr(model, name, None)
        if own is None or not callable(method) or name in own:
            continue
        shadow = _items(method) if name == kind.items else _step(method)
        try:
            object.__setattr__(model, name, shadow)
        except (AttributeError, TypeError):
            continue
        shadowed.append(name)
    try:
        return call()
    finally:
        for name in shadowed:
            object.__delattr__(model, name)


def _items(method: Any) -> Any:
    @functools.wraps(method)
    def shadow(*args: Any, **kwargs: Any) -> Any:
        items = method(*args, **kwargs)
        return gpu_hold.YieldingIterator(items) if hasattr(items, "__iter__") else items

    return shadow


def _step(method: Any) -> Any:
    @functools.wraps(method)
    def shadow(*args: Any, **kwargs: Any) -> Any:
        gpu_hold.yield_turn()
        return method(*args, **kwargs)

    return shadow


# --- models that are wrapped themselves ---------------------------------------------------


def _model_name(model: Any) -> str:
    name = getattr(model, "model_name", None)
    return os.path.basename(name.rstrip("/")) if isinstance(name, str) else "embedder"


def embed(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """One batch of texts is one forward and one turn."""
    return gpu_hold.held(
        _model_name(model), "embedding", lambda: wrapped(*args, **kwargs), drain_global
    )


def rerank(wrapped: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """The documents of one request; others get their turn between two forwards."""
    return gpu_hold.held(
        _model_name(model), "reranker", lambda: wrapped(*args, **kwargs), drain_global
    )


def jina_forward(wrapped: Any, _model: Any, args: Any, kwargs: Any) -> Any:
    """One forward of a Jina reranker."""
    gpu_hold.yield_turn()
    return wrapped(*args, **kwargs)


class _PausingModel:
    """Stands for the language model of a reranker that is asked once per document."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gpu_hold.yield_turn()
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def causal_documents(wrapped: Any, reranker: Any, args: Any, kwargs: Any) -> Any:
    """A language model as reranker: one forward per document."""
    model = getattr(reranker, "model", None)
    if not callable(model) or isinstance(model, _PausingModel):
        return wrapped(*args, **kwargs)
    reranker.model = _PausingModel(model)
    try:
        return wrapped(*args, **kwargs)
    finally:
        reranker.model = model


def dflash_events(wrapped: Any, _engine: Any, args: Any, kwargs: Any) -> Any:
    """Each event of a DFlash generation is a step."""
    result = wrapped(*args, **kwargs)
    if isinstance(result, tuple) and result and hasattr(result[0], "__iter__"):
        return (gpu_hold.YieldingIterator(result[0]), *result[1:])
    return result


def diffusion_steps(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Each denoising step that mlx-vlm reports is a step."""
    return gpu_hold.YieldingIterator(wrapped(*args, **kwargs))


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Take turns for the jobs of the global executor."""
    executors.add(module, ledger, take_turn)
    for kind in dict.fromkeys(JOBS.values()):
        for name in (*kind.steps, *((kind.items,) if kind.items else ())):
            ledger.while_in_use(f"model of {kind.site}: {name}", named(_with_pauses))


def apply_embedding(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the embedder's forward."""
    ledger.wrap_if_there(module, "MLXEmbeddingModel.embed", embed)


def apply_reranker(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the reranker, and its forwards where it makes many."""
    for name, wrapper in (
        ("rerank", rerank),
        ("_get_jina_hidden_states", jina_forward),
        ("_rerank_causal_lm", causal_documents),
    ):
        ledger.wrap_if_there(module, f"MLXRerankerModel.{name}", wrapper)
    ledger.while_in_use("model of reranker: model", named(_PausingModel))


def apply_dflash(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Pause between the events of a DFlash generation."""
    ledger.wrap_if_there(module, "DFlashEngine._stream_dflash_events", dflash_events)


def apply_diffusion(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Pause between mlx-vlm's denoising steps."""
    ledger.wrap_if_there(module, "stream_diffusion_generate", diffusion_steps)
