"""The turn round the jobs of the ``mlx-global`` thread, and where they pause in the middle."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from omlx_admission.gpu_turn import holding, sites
from omlx_admission.gpu_turn.turn import TurnTimeout
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.patching.ledger import Ledger, named
from omlx_admission.hooks.patching.part import Wanted

logger = logging.getLogger("omlx.admission")


def take_turn(job: gpu_jobs.Job, call: Callable[[], Any]) -> Any:
    """The layer of the turn."""
    kind = job.treatment
    if kind.idle or not kind.whole:
        return call()
    if kind.polls:
        return sites.poll(call, job.owner, (), {}, job.name)
    model = job.model if kind.pauses else None
    try:
        return sites.shared(kind.site, job.name, call, model)
    except TurnTimeout:
        if not kind.answers:
            raise
        # It has not begun: what such a job raises itself goes to its reader.
        logger.warning(
            "admission: '%s' (%s) waited too long for its turn on the GPU and runs without it",
            job.name,
            kind.site.name,
        )
        return call()


# --- models that are wrapped themselves ---------------------------------------------------

#: One batch of texts is one forward and one turn.
embed = sites.of_model(sites.EMBEDDING)
#: The documents of one request; others get their turn between two forwards.
rerank = sites.of_model(sites.RERANKER)


class _PausingModel:
    """Stands for the language model of a reranker that is asked once per document."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holding.yield_turn()
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
    if isinstance(result, tuple) and result:
        return (sites.pausing(result[0]), *result[1:])
    return result


def diffusion_steps(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Each denoising step that mlx-vlm reports is a step."""
    return sites.pausing(wrapped(*args, **kwargs))


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Take turns for the jobs of the global executor."""
    process.executors.add(module, ledger, take_turn)
    for site in dict.fromkeys(kind.site for kind in gpu_jobs.JOBS.values()):
        for name in (*site.steps, *site.items):
            ledger.while_in_use(f"model of {site.name}: {name}", named(sites.shared))


def apply_embedding(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the embedder's forward."""
    ledger.wrap_if_there(module, "MLXEmbeddingModel.embed", embed)


def apply_reranker(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the reranker, and its forwards where it makes many."""
    for name, wrapper in (
        ("rerank", rerank),
        ("_get_jina_hidden_states", sites.step),
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
