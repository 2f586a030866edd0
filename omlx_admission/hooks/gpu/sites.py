"""Every place where oMLX submits GPU work, and whether the turn covers it.

A site that is not covered says why. Shares of GPU time are those of oMLX issue 4224.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from omlx_admission.gpu_turn import sites
from omlx_admission.hooks.gpu import engine as gpu_engine
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.patching.gate import Kind, Need, Source
from omlx_admission.hooks.pool import load_thread


@dataclass(frozen=True)
class Site:
    """One place.

    Attributes:
        covered: the turn is held there.
        note: how it is held, or why it is not.
        anchor: what of oMLX it hangs on; where that is missing, so is the site.
        jobs: the module's jobs for the global executor, by which it is recognised; where
            one is not known, the site is not shown as covered.
    """

    name: str
    covered: bool
    note: str
    anchor: Need | None = None
    jobs: Need | None = None


def _jobs(module: str, *others: str) -> Need:
    """All jobs of one engine's module: those that are treated, and ``others`` that need
    no turn (loads, and what stays on the CPU)."""
    known = gpu_jobs.names_in(module)
    return Need(f"omlx.engine.{module}", "get_mlx_executor", Kind.JOBS, jobs=(*known, *others))


def _covered(site: sites.Site, anchor: Need, jobs: Need | None = None) -> Site:
    return Site(site.name, True, site.note, anchor, jobs)


SITES: tuple[Site, ...] = (
    _covered(sites.BURST, gpu_engine.STEP),
    _covered(sites.PROMPT, replace(gpu_engine.PROGRESS, optional=False)),
    _covered(sites.CLEAN_UP, gpu_engine.FAIL_ALL),
    _covered(sites.VISION, replace(gpu_engine.VISION, optional=False)),
    _covered(sites.EMBEDDING, gpu_jobs.EMBED, _jobs("embedding", "load", "close")),
    _covered(sites.RERANKER, gpu_jobs.RERANK, _jobs("reranker", "load", "close")),
    _covered(
        sites.TEXT_TO_SPEECH,
        Need("omlx.engine.tts", "TTSEngine", Kind.CLASS),
        _jobs("tts", "_load_sync"),
    ),
    _covered(
        sites.SPEECH_TO_TEXT,
        Need("omlx.engine.stt", "STTEngine", Kind.CLASS),
        _jobs("stt", "_load_sync", "_load_audio_samples"),
    ),
    _covered(
        sites.SPEECH_TO_SPEECH,
        Need("omlx.engine.sts", "STSEngine", Kind.CLASS),
        _jobs("sts", "_load_sync"),
    ),
    _covered(
        sites.DIFFUSION,
        Need(
            gpu_engine.VLM,
            "VLMBatchedEngine._iter_diffusion_outputs_sync",
            Kind.GENERATOR,
        ),
        replace(_jobs("vlm"), jobs=load_thread.KNOWN),
    ),
    _covered(
        sites.DFLASH,
        replace(gpu_jobs.DFLASH_EVENTS, optional=False),
        _jobs("dflash", "_load_models"),
    ),
    *(
        _covered(sites.KEEP_WARM, Need(gpu_engine.CORE, f"EngineCore.{name}", Kind.SYNC))
        for name in gpu_engine.KEEP_WARM
    ),
    Site(
        "cache clear",
        False,
        "computes nothing: it waits for what its own thread has in flight, and frees memory",
        gpu_jobs.EXECUTOR,
    ),
    Site(
        "store worker",
        False,
        "copies of finished requests' caches, 0.2 to 0.6 % of GPU time: holding the turn "
        "there would hold it over disk writes, and teardown waits for this thread",
        Need(gpu_engine.SCHEDULER, "Scheduler._async_store_cache_worker", Kind.SYNC),
    ),
    Site(
        "prefix restore helpers",
        False,
        "threads that read cached blocks while their engine holds the turn and waits",
    ),
    Site(
        "model load",
        False,
        "weights are read for minutes; holding the turn would stop every engine meanwhile",
    ),
    Site(
        "teardown",
        False,
        "runs while the event loop is blocked on it and must never wait; it drains its own "
        "stream and computes nothing",
        gpu_engine.CLOSE,
    ),
    Site(
        "quantisation and tuning",
        False,
        "started by hand from the admin page; text routes answer 503 meanwhile",
    ),
    Site("distributed ranks", False, "other processes; nothing is submitted here"),
    Site(
        "generate_batch_sync",
        False,
        "library call outside the server, on its caller's thread",
        Need(gpu_engine.CORE, "EngineCore.generate_batch_sync", Kind.SYNC),
    ),
)


def present(source: Source) -> list[Site]:
    """The sites of one oMLX, by its source."""
    found = []
    for site in SITES:
        if site.anchor is not None and source.problem(site.anchor) is not None:
            continue
        unknown = None if site.jobs is None else source.problem(site.jobs)
        if unknown is not None:
            site = replace(site, covered=False, note=f"not known in this oMLX: {unknown}")
        found.append(site)
    return found
