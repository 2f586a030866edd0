"""The register: every feature, its variable, what it needs of oMLX and how it is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omlx_admission.hooks.gpu import engine as gpu_engine
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import setting as gpu_setting
from omlx_admission.hooks.gpu import turn as gpu_turn
from omlx_admission.hooks.gpu import watch as gpu_watch
from omlx_admission.hooks.patching.gate import Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.pool import (
    dead,
    leases,
    load_thread,
    model_dirs,
    off_loop,
    prompt_guard,
    queue,
    resident,
    unloads,
)
from omlx_admission.hooks.server import errors, requests, stream_hold, surfaces
from omlx_admission.settings import Settings


@dataclass(frozen=True)
class Wanted:
    """Which features are to be applied, known before the first one is."""

    settings: Settings
    features: frozenset[str]


@dataclass(frozen=True)
class Part:
    """One piece of a feature: applied when ``module`` has been imported, in this order."""

    feature: str
    module: str
    apply: Callable[[Any, Ledger, Wanted], None]
    #: The feature is whole without it: its module is not always imported.
    optional: bool = False


@dataclass(frozen=True)
class Feature:
    """One switchable feature. All of its parts are applied, or none."""

    name: str
    variable: str
    field: str
    summary: str
    needs: tuple[Need, ...]
    native: tuple[Need, ...] = ()
    #: Features of which one has to be applied: without it this has nothing to act on.
    requires_any: tuple[str, ...] = ()


FEATURES: tuple[Feature, ...] = (
    Feature(
        "resident",
        "OMLX_ADMISSION_RESIDENT_PATH",
        "resident_path",
        "requests for a loaded model never wait on another load or unload",
        resident.NEEDS,
        resident.NATIVE,
    ),
    Feature(
        "queue",
        "OMLX_ADMISSION_QUEUE",
        "queue",
        "requests for other models queue, the busy model drains, then they are served",
        queue.NEEDS,
        queue.NATIVE,
    ),
    Feature(
        "unloads",
        "OMLX_ADMISSION_UNLOADS",
        "unloads",
        "unloads by hand wait for what runs instead of cutting it off (needs the queue)",
        unloads.NEEDS,
        requires_any=("queue",),
    ),
    Feature(
        "errors",
        "OMLX_ADMISSION_ERRORS",
        "errors",
        "503 with Retry-After for what passes, 507 for what never fits, on every route",
        errors.NEEDS,
        errors.NATIVE,
    ),
    Feature(
        "leases",
        "OMLX_ADMISSION_LEASES",
        "leases",
        "a model handed to a route that takes no lease stays until its request ends",
        resident.LEASE_NEEDS,
        resident.LEASE_NATIVE,
        # They hand out what it keeps.
        requires_any=("resident", "queue"),
    ),
    Feature(
        "off_loop_close",
        "OMLX_ADMISSION_OFF_LOOP_CLOSE",
        "off_loop_close",
        "an engine is closed on a thread, not on the event loop",
        off_loop.NEEDS,
        off_loop.NATIVE,
        requires_any=("resident",),
    ),
    Feature(
        "dead_engines",
        "OMLX_ADMISSION",
        "enabled",
        "an engine whose loop has ended tells its requests, goes, and is loaded anew",
        dead.NEEDS,
        requires_any=("resident", "queue"),
    ),
    Feature(
        "prompt_guard",
        "OMLX_ADMISSION",
        "enabled",
        "no prompt is too long for memory that is not in use or comes back",
        prompt_guard.NEEDS,
        requires_any=("queue",),
    ),
    Feature(
        "load_thread",
        "OMLX_ADMISSION_LOAD_THREAD",
        "load_thread",
        "embedders, rerankers and speech do not wait for another model's load",
        load_thread.NEEDS,
    ),
    Feature(
        "requests",
        "OMLX_ADMISSION",
        "enabled",
        "clients that leave while they wait are noticed; X-OMLX-Max-Wait",
        requests.NEEDS,
        # Ours stays as long as one of those that stand on it is ours.
        (*queue.NATIVE, *errors.NATIVE, *resident.LEASE_NATIVE),
        requires_any=("queue", "errors", "leases"),
    ),
    Feature(
        "stream_hold",
        "OMLX_ADMISSION_STREAM_HOLD_S",
        "stream_hold_s",
        "a stream that waits long gets oMLX's keep-alives until its model is there",
        stream_hold.NEEDS,
        requires_any=("queue",),
    ),
    Feature(
        "surfaces",
        "OMLX_ADMISSION_SURFACES",
        "surfaces",
        "status, metrics and a page under /admission, behind oMLX's own API key",
        surfaces.NEEDS,
    ),
    Feature(
        "gpu_setting",
        "scheduler.serialize_engine_gpu",
        "keep_gpu_setting",
        "serialize_engine_gpu in settings.json survives oMLX's own saves",
        gpu_setting.NEEDS,
        gpu_setting.NATIVE,
    ),
    Feature(
        "gpu_turn",
        "OMLX_SERIALIZE_ENGINE_GPU",
        "serialize_engine_gpu",
        "one engine on the GPU at a time, first come first served",
        (
            *gpu_engine.NEEDS,
            gpu_jobs.EXECUTOR,
            gpu_jobs.EXECUTOR_VALUE,
            *gpu_jobs.MODEL_NEEDS,
        ),
        gpu_setting.NATIVE,
    ),
    Feature(
        "exposure",
        "OMLX_ADMISSION_EXPOSURE",
        "exposure",
        "counts hours by engines busy and GPU faults, logs faults and MTP replays",
        gpu_watch.EXPOSURE_NEEDS,
    ),
    Feature(
        "gpu_lockout",
        "OMLX_ADMISSION_EXIT_ON_GPU_LOCKOUT",
        "exit_on_gpu_lockout",
        "ends a process whose GPU submissions the driver ignores (exit status 70)",
        gpu_watch.LOCKOUT_NEEDS,
        gpu_watch.LOCKOUT_NATIVE,
    ),
)


def _keep(module: Any, ledger: Ledger, wanted: Wanted) -> None:
    if wanted.settings.leases:
        leases.apply(module, ledger)


#: Innermost wrapper first: the resident path meets a request before the queue,
#: the queue before stock.
PARTS: tuple[Part, ...] = (
    *surfaces.parts(Part),
    Part("errors", resident.POOL, lambda m, ledger, _w: errors.apply_pool(m, ledger)),
    Part("resident", resident.POOL, lambda m, ledger, _w: resident.apply_inner(m, ledger)),
    Part(
        "queue",
        resident.POOL,
        lambda m, ledger, w: queue.apply(
            m, ledger, w.settings, with_resident="resident" in w.features
        ),
    ),
    Part("resident", resident.POOL, lambda m, ledger, _w: resident.apply_outer(m, ledger)),
    Part("unloads", resident.POOL, lambda m, ledger, _w: unloads.apply(m, ledger)),
    Part("unloads", unloads.ADMIN, lambda m, ledger, _w: model_dirs.apply(m, ledger)),
    Part(
        "queue",
        queue.UVICORN,
        lambda m, ledger, _w: queue.apply_uvicorn(m, ledger),
        optional=True,
    ),
    # Our hand-outs are kept by us, also where oMLX keeps its own (the feature is native).
    Part("resident", resident.POOL, _keep),
    Part("queue", resident.POOL, _keep),
    Part("leases", resident.POOL, lambda m, ledger, _w: leases.apply(m, ledger)),
    Part("requests", requests.SERVER, lambda m, ledger, _w: requests.apply(m, ledger)),
    Part(
        "stream_hold",
        stream_hold.SERVER,
        lambda m, ledger, w: stream_hold.apply(m, ledger, w.settings.stream_hold_s),
    ),
    Part("gpu_setting", gpu_setting.MODULE, lambda m, ledger, _w: gpu_setting.apply(m, ledger)),
    *off_loop.parts(Part),
    Part("dead_engines", dead.CORE, lambda m, ledger, _w: dead.apply(m, ledger)),
    *prompt_guard.parts(Part),
    *load_thread.parts(Part),
    *gpu_turn.parts(Part),
    *gpu_watch.parts(Part),
)

#: Modules to wait for.
MODULES: tuple[str, ...] = tuple(dict.fromkeys(part.module for part in PARTS))
