"""GPU work of the ``mlx-global`` thread: embedding, reranking, speech, diffusion, DFlash.

Most of it reaches the executor as local functions, which no attribute names. The one
place that all of it passes is the executor's ``submit``, so that is wrapped, and a job
is recognised by its function's name (`JOBS`). What is not in the table, loads above all,
passes untouched. Embedder and reranker are wrapped at their model instead: in 0.7.x the
job begins with a wait of oMLX's own, which must not be spent holding the GPU.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

from omlx_admission.gpu_turn import sites
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there

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
        site: the kind of its work.
        whole: the turn is taken round the whole job (else deeper inside it).
        pauses: others get their turn between the steps of its model.
        polls: the turn is taken only if it finds that there is work.
        idle: nothing is computed: it takes no turn, and its engine is not busy.
        answers: its caller waits for what the job itself delivers, not for its end, and
            would wait indefinitely for a job that never ran: after a wait to the limit it
            runs without the turn.
    """

    site: sites.Site
    whole: bool = True
    pauses: bool = False
    polls: bool = False
    idle: bool = False
    answers: bool = False


_SPEECH_TO_TEXT = Treatment(sites.SPEECH_TO_TEXT, pauses=True)
_DIFFUSION = Treatment(sites.DIFFUSION)
_DFLASH = Treatment(sites.DFLASH)
#: It waits for what its own thread has in flight, and frees memory.
_CLEAR = Treatment(sites.Site("cache clear", "computes nothing"), idle=True)

#: (module's last part or None for any, function name) -> treatment.
JOBS: dict[tuple[str | None, str], Treatment] = {
    ("embedding", "_embed_sync"): Treatment(sites.EMBEDDING, whole=False),
    ("embedding", "_execute_microbatch"): Treatment(sites.EMBEDDING, whole=False),
    ("reranker", "_rerank_sync"): Treatment(sites.RERANKER, whole=False),
    ("tts", "_synthesize_sync"): Treatment(sites.TEXT_TO_SPEECH, pauses=True),
    ("tts", "_next_pcm_chunk"): Treatment(sites.TEXT_TO_SPEECH),
    ("stt", "_transcribe_sync"): _SPEECH_TO_TEXT,
    ("stt", "_decode_segment"): _SPEECH_TO_TEXT,
    ("stt", "_next_chunk"): _SPEECH_TO_TEXT,
    ("stt", "_next_token"): _SPEECH_TO_TEXT,
    ("stt", "start_sync"): _SPEECH_TO_TEXT,
    ("stt", "poll_sync"): replace(_SPEECH_TO_TEXT, polls=True),
    ("stt", "close_sync"): _SPEECH_TO_TEXT,
    ("sts", "_process_sync"): Treatment(sites.SPEECH_TO_SPEECH),
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
    """One recognised job, the model it works for, and the object whose method it is."""

    treatment: Treatment
    name: str
    model: Any
    owner: Any = None


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
        text = kind.site.name
    return Job(kind, sites.short(text), model, owner)


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
