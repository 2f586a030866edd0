"""Engines take a process-wide turn on the GPU; ``new/`` says where."""

from __future__ import annotations

import ast
from pathlib import Path

from omlx_admission.gpu_turn import sites
from omlx_admission.hooks.gpu.jobs import JOBS
from omlx_admission.upstream import editing, package
from omlx_admission.upstream.change import Change, Edit
from omlx_admission.upstream.code import Code, find, has, has_anywhere
from omlx_admission.upstream.editing import decorate, insert_first

FIELD = """
# When True, one engine at a time has the GPU, first come first served.
# Engines lose the overlap of their CPU work and never meet on the GPU.
# Read at start; OMLX_SERIALIZE_ENGINE_GPU goes before it.
serialize_engine_gpu: bool = False
"""


def _imported(module: Code, place: str) -> Code:
    return editing.import_name(module, place, "gpu_turn")


# --- edits --------------------------------------------------------------------------------


def settings(module: Code) -> Code:
    """The field, and reading it; `to_dict` saves every field by itself."""
    module = editing.insert_field(module, "SchedulerSettings", FIELD)
    name = "serialize_engine_gpu"
    value = f'bool(data.get("{name}", False))'
    return editing.add_keyword(module, "SchedulerSettings.from_dict", "cls", name, value)


def server(module: Code) -> Code:
    """The turn is made before the first engine, and shown in the status."""
    module = insert_first(module, "init_server", "gpu_turn.configure(global_settings)")
    module = editing.add_entry(module, "server_status", "gpu_turn", "gpu_turn.status()")
    return _imported(module, ".")


def engine_core(module: Code) -> Code:
    """A burst is one turn; an engine that ends waits for none."""
    module = decorate(module, "EngineCore._step_burst", "gpu_turn.burst")
    for method, anchor, call in (
        ("start", "self._running = True", "enter"),
        ("stop", "self._running = False", "leave"),
        ("close", "self._closed = True", "leave"),
    ):
        name = f"EngineCore.{method}"
        module = editing.insert_beside(module, name, anchor, f"gpu_turn.{call}(self)")
    for method in ("_keepwarm", "_run_prompt_tail_prewarm"):
        name = f"EngineCore.{method}"
        if has(module, name) and isinstance(find(module, name), ast.FunctionDef):
            module = decorate(module, name, "gpu_turn.ahead")
    return _imported(module, ".")


def scheduler(module: Code) -> Code:
    """Clean-up after an error, and a prompt's chunks within one step."""
    module = decorate(module, "Scheduler.fail_all_requests", "gpu_turn.clean_up")
    module = decorate(module, "Scheduler._on_prompt_progress", "gpu_turn.progress")
    return _imported(module, ".")


def specprefill(module: Code) -> Code:
    """A draft model's chunks, and those of the prompt that it has thinned out."""
    for name in ("_prefill_draft", "sparse_prefill"):
        pause = "gpu_turn.yield_turn()"
        module = editing.insert_beside(module, name, "mx.clear_cache()", pause)
    return _imported(module, "..")


def decode_activity(module: Code) -> Code:
    """Not edited; the new package calls it."""
    find(module, "get_decode_activity")
    find(module, "DecodeActivityRegistry.publish")
    return module


def _hands_over(edit: Edit) -> Edit:
    """``edit`` for an engine's file; one that hands no work to a thread has no site."""

    def wrapper(module: Code) -> Code:
        return edit(module) if "run_in_executor" in module.text else module

    return wrapper


def _jobs(module: Code, engine: str, optional: frozenset[str] = frozenset()) -> Code:
    """Each job of one engine's file that is a turn; ``optional`` ones where they are there."""
    for (place, name), job in JOBS.items():
        if place != engine or not job.whole:
            continue
        if name in optional and not has_anywhere(module, name):
            continue
        arguments = [_constant(job.site)]
        if name not in _OF_BACKENDS:
            arguments.append("self._model_name")
            if job.pauses:
                arguments.append("model")
        turn = f"gpu_turn.one_turn({', '.join(arguments)})"
        if job.polls:
            turn = "gpu_turn.poll"
        module = editing.decorate_everywhere(module, name, turn)
    return _imported(module, "..")


#: Methods of an object that knows no model's name.
_OF_BACKENDS = ("start_sync", "poll_sync", "close_sync")


def _constant(site: sites.Site) -> str:
    name = next(name for name, value in vars(sites).items() if value is site)
    return f"gpu_turn.{name}"


def embedding(module: Code) -> Code:
    """One batch of texts is one turn."""
    module = decorate(module, "MLXEmbeddingModel.embed", "gpu_turn.embedding")
    return _imported(module, "..")


def reranker(module: Code) -> Code:
    """One request is one turn, with pauses between its forwards."""
    module = decorate(module, "MLXRerankerModel.rerank", "gpu_turn.reranker")
    for name, forward in (
        ("_rerank_causal_lm", "logits = self.model(...)"),
        ("_get_jina_hidden_states", "hidden_states = backbone(...)"),
    ):
        name = f"MLXRerankerModel.{name}"
        if has(module, name):
            pause = "gpu_turn.yield_turn()"
            module = editing.insert_beside(module, name, forward, pause, before=True)
    return _imported(module, "..")


def text_to_speech(module: Code) -> Code:
    """One chunk of audio is one turn; a file has pauses between its chunks."""
    return _jobs(module, "tts")


def speech_to_text(module: Code) -> Code:
    """One chunk of a stream is one turn; a file has pauses between its windows."""
    some = frozenset({"_decode_segment", "_next_token", *_OF_BACKENDS})
    return _jobs(module, "stt", some)


def speech_to_speech(module: Code) -> Code:
    """One file is one turn."""
    return _jobs(module, "sts")


def vlm(module: Code) -> Code:
    """Vision encoding is one turn; a diffusion pauses between its steps."""
    engine = "VLMBatchedEngine"
    module = decorate(module, f"{engine}._process_chat_messages", "gpu_turn.vision")
    for name in ("_prepare_diffusion_inputs_from_prompt", "_process_diffusion_chat_messages"):
        turn = f"gpu_turn.one_turn({_constant(sites.DIFFUSION)})"
        module = decorate(module, f"{engine}.{name}", turn)
    module = editing.insert_beside(
        module,
        f"{engine}._iter_diffusion_outputs_sync",
        "results = stream_diffusion_generate(...)",
        f"results = gpu_turn.steps(results, {_constant(sites.DIFFUSION)}, self._model_name)",
    )
    return _imported(module, "..")


def dflash(module: Code) -> Code:
    """A generation is one turn with pauses between its events."""
    module = editing.insert_beside(
        module,
        "DFlashEngine._stream_dflash_events",
        "event_iter = stream_dflash_generate(...)",
        f"event_iter = gpu_turn.steps(event_iter, {_constant(sites.DFLASH)}, self._model_name)",
    )
    return _imported(module, "..")


def test_settings(module: Code) -> Code:
    """It compares the whole section."""
    name = "TestSchedulerSettings.test_to_dict"
    return editing.add_entry(module, name, "serialize_engine_gpu", "False")


CHANGE = Change(
    name="gpu-turn",
    title="feat(engine): let engines take turns on the GPU (serialize_engine_gpu)",
    message="""
Each text engine has its own thread and Metal command queue, and the shared
MLX thread has another, so several of them submit work at the same time.
Users report GPU hangs that occur only while two engines are busy.

scheduler.serialize_engine_gpu, or OMLX_SERIALIZE_ENGINE_GPU=1, makes them
take turns: one decode burst, forward, image encoding or chunk of audio at a
time, first come first served. The holder synchronises its streams before it
hands over. Off by default; off, nothing is taken.
""",
    issues=(4224,),
    features=("gpu_setting", "gpu_turn"),
    edits={
        "decode_activity.py": decode_activity,
        "settings.py": settings,
        "server.py": server,
        "engine_core.py": engine_core,
        "scheduler.py": scheduler,
        "patches/specprefill.py": specprefill,
        "models/embedding.py": embedding,
        "models/reranker.py": reranker,
        "engine/tts.py": _hands_over(text_to_speech),
        "engine/stt.py": _hands_over(speech_to_text),
        "engine/sts.py": _hands_over(speech_to_speech),
        "engine/vlm.py": _hands_over(vlm),
        "engine/dflash.py": dflash,
    },
    optional=frozenset({"engine/dflash.py", "patches/specprefill.py"}),
    test_edits={"test_settings.py": test_settings},
    modules={
        **package.copied("gpu_turn"),
        **package.added(Path(__file__).parent / "new", "gpu_turn"),
    },
)
