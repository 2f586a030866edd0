"""Every place where oMLX submits GPU work, and whether the turn covers it.

A site that is not covered says why. Shares of GPU time are those of oMLX issue 4224.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


SITES: tuple[Site, ...] = (
    Site(
        "decode burst",
        True,
        "one burst a turn: decode, prefill chunks, MTP, prefix restore and what else a "
        "scheduler step does; an unchunked prefill is one turn",
        gpu_engine.STEP,
    ),
    Site(
        "failure clean-up",
        True,
        f"waits at most {5:.0f} s, then goes on without: clean-up must happen",
        gpu_engine.FAIL_ALL,
    ),
    Site(
        "vision encoding",
        True,
        "one chat's images and audio a turn",
        replace(gpu_engine.VISION, optional=False),
    ),
    Site(
        "embedding",
        True,
        "one forward a turn, inside any fairness wait of oMLX's own",
        gpu_jobs.EMBED,
        _jobs("embedding", "load", "close"),
    ),
    Site(
        "reranker",
        True,
        "others get their turn between two forwards",
        gpu_jobs.RERANK,
        _jobs("reranker", "load", "close"),
    ),
    Site(
        "text to speech",
        True,
        "one chunk of audio a turn",
        Need("omlx.engine.tts", "TTSEngine", Kind.CLASS),
        _jobs("tts", "_load_sync"),
    ),
    Site(
        "speech to text",
        True,
        "streams: one chunk a turn; files: others get their turn between two windows where "
        "the model decodes window by window (Whisper, Parakeet, Qwen3-ASR), else the whole "
        "file is one turn",
        Need("omlx.engine.stt", "STTEngine", Kind.CLASS),
        _jobs("stt", "_load_sync", "_load_audio_samples"),
    ),
    Site(
        "speech to speech",
        True,
        "one file is one turn: its models offer no step between",
        Need("omlx.engine.sts", "STSEngine", Kind.CLASS),
        _jobs("sts", "_load_sync"),
    ),
    Site(
        "diffusion",
        True,
        "others get their turn between two denoising steps that mlx-vlm reports",
        Need(
            gpu_engine.VLM,
            "VLMBatchedEngine._iter_diffusion_outputs_sync",
            Kind.GENERATOR,
        ),
        replace(_jobs("vlm"), jobs=load_thread.KNOWN),
    ),
    Site(
        "DFlash",
        True,
        "others get their turn between two events; a stream of its own library is waited "
        "for by the evaluation of each event only",
        replace(gpu_jobs.DFLASH_EVENTS, optional=False),
        _jobs("dflash", "_load_models"),
    ),
    *(
        Site(
            "keep-warm",
            True,
            "gives way to requests; runs without the turn after 5 s",
            Need(gpu_engine.CORE, f"EngineCore.{name}", Kind.SYNC),
        )
        for name in gpu_engine.KEEP_WARM
    ),
    Site(
        "cache clear",
        True,
        "clears on the global thread; wait at most 5 s, then go on without",
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
