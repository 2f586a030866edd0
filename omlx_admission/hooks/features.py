"""The register: every feature, its variable, what it needs of oMLX and how it is applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omlx_admission.hooks.gpu import engine as gpu_engine
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import names as gpu_names
from omlx_admission.hooks.gpu import setting as gpu_setting
from omlx_admission.hooks.gpu import turn as gpu_turn
from omlx_admission.hooks.gpu import watch as gpu_watch
from omlx_admission.hooks.park import parking
from omlx_admission.hooks.patching.gate import Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
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
    requires_any: tuple[Feature, ...] = ()
    #: Features that all have to be applied.
    requires_all: tuple[Feature, ...] = ()


RESIDENT = Feature(
    "resident",
    "OMLX_ADMISSION_RESIDENT_PATH",
    "resident_path",
    "requests for a loaded model never wait on another load or unload",
    resident.NEEDS,
    resident.NATIVE,
)

QUEUE = Feature(
    "queue",
    "OMLX_ADMISSION_QUEUE",
    "queue",
    "requests for other models queue, the busy model drains, then they are served",
    queue.NEEDS,
    queue.NATIVE,
)

UNLOADS = Feature(
    "unloads",
    "OMLX_ADMISSION_UNLOADS",
    "unloads",
    "unloads by hand wait for what runs instead of cutting it off (needs the queue)",
    unloads.NEEDS,
    requires_any=(QUEUE,),
)

ERRORS = Feature(
    "errors",
    "OMLX_ADMISSION_ERRORS",
    "errors",
    "503 with Retry-After for what passes, 507 for what never fits, on every route",
    errors.NEEDS,
    errors.NATIVE,
)

LEASES = Feature(
    "leases",
    "OMLX_ADMISSION_LEASES",
    "leases",
    "a model handed to a route that takes no lease stays until its request ends",
    resident.LEASE_NEEDS,
    resident.LEASE_NATIVE,
    # They hand out what it keeps.
    requires_any=(RESIDENT, QUEUE),
)

OFF_LOOP_CLOSE = Feature(
    "off_loop_close",
    "OMLX_ADMISSION_OFF_LOOP_CLOSE",
    "off_loop_close",
    "an engine is closed on a thread, not on the event loop",
    off_loop.NEEDS,
    off_loop.NATIVE,
    requires_any=(RESIDENT,),
)

DEAD_ENGINES = Feature(
    "dead_engines",
    "OMLX_ADMISSION",
    "enabled",
    "an engine whose loop has ended tells its requests, goes, and is loaded anew",
    dead.NEEDS,
    requires_any=(RESIDENT, QUEUE),
)

PROMPT_GUARD = Feature(
    "prompt_guard",
    "OMLX_ADMISSION",
    "enabled",
    "no prompt is too long for memory that is not in use or comes back",
    prompt_guard.NEEDS,
    requires_any=(QUEUE,),
)

LOAD_THREAD = Feature(
    "load_thread",
    "OMLX_ADMISSION_LOAD_THREAD",
    "load_thread",
    "embedders, rerankers and speech do not wait for another model's load",
    load_thread.NEEDS,
)

REQUESTS = Feature(
    "requests",
    "OMLX_ADMISSION",
    "enabled",
    "clients that leave while they wait are noticed; X-OMLX-Max-Wait",
    requests.NEEDS,
    # Ours stays as long as one of those that stand on it is ours.
    (*queue.NATIVE, *errors.NATIVE, *resident.LEASE_NATIVE),
    requires_any=(QUEUE, ERRORS, LEASES),
)

PARK = Feature(
    "park",
    "OMLX_ADMISSION_PARK",
    "park",
    "what a busy model runs is parked for another model, and goes on in its stream",
    parking.NEEDS,
    requires_all=(QUEUE, RESIDENT, REQUESTS, OFF_LOOP_CLOSE),
)

STREAM_HOLD = Feature(
    "stream_hold",
    "OMLX_ADMISSION_STREAM_HOLD_S",
    "stream_hold_s",
    "a stream that waits long gets oMLX's keep-alives until its model is there",
    stream_hold.NEEDS,
    requires_any=(QUEUE,),
)

SURFACES = Feature(
    "surfaces",
    "OMLX_ADMISSION_SURFACES",
    "surfaces",
    "status, metrics and a page under /admission, behind oMLX's own API key",
    surfaces.NEEDS,
)

GPU_SETTING = Feature(
    "gpu_setting",
    "scheduler.serialize_engine_gpu",
    "keep_gpu_setting",
    "serialize_engine_gpu in settings.json survives oMLX's own saves",
    gpu_setting.NEEDS,
    gpu_setting.NATIVE,
)

GPU_TURN = Feature(
    "gpu_turn",
    "OMLX_SERIALIZE_ENGINE_GPU",
    "serialize_engine_gpu",
    "one engine on the GPU at a time, first come first served",
    (
        *gpu_engine.NEEDS,
        gpu_jobs.EXECUTOR,
        gpu_jobs.EXECUTOR_VALUE,
        *gpu_jobs.MODEL_NEEDS,
        *gpu_names.NEEDS,
    ),
    gpu_setting.NATIVE,
)

EXPOSURE = Feature(
    "exposure",
    "OMLX_ADMISSION_EXPOSURE",
    "exposure",
    "counts hours by engines busy and GPU faults, logs faults and MTP replays",
    gpu_watch.EXPOSURE_NEEDS,
)

GPU_LOCKOUT = Feature(
    "gpu_lockout",
    "OMLX_ADMISSION_EXIT_ON_GPU_LOCKOUT",
    "exit_on_gpu_lockout",
    "ends a process whose GPU submissions the driver ignores (exit status 70)",
    gpu_watch.LOCKOUT_NEEDS,
    gpu_watch.LOCKOUT_NATIVE,
)

GPU_STUCK_EXIT = Feature(
    "gpu_stuck_exit",
    "OMLX_ADMISSION_EXIT_ON_GPU_STUCK",
    "exit_on_gpu_stuck",
    "ends a process whose GPU turn is stuck (exit status 70)",
    gpu_turn.EXIT_NEEDS,
    requires_any=(GPU_TURN,),
)

FEATURES: tuple[Feature, ...] = (
    RESIDENT,
    QUEUE,
    UNLOADS,
    ERRORS,
    LEASES,
    OFF_LOOP_CLOSE,
    DEAD_ENGINES,
    PROMPT_GUARD,
    LOAD_THREAD,
    REQUESTS,
    PARK,
    STREAM_HOLD,
    SURFACES,
    GPU_SETTING,
    GPU_TURN,
    EXPOSURE,
    GPU_LOCKOUT,
    GPU_STUCK_EXIT,
)


def _of(feature: Feature, *parts: Part) -> Iterator[Part]:
    for part in parts:
        yield replace(part, feature=feature.name)


def _without(other: Feature, part: Part) -> Part:
    """``part``, which does nothing where ``other`` does the same."""

    def apply(module: Any, ledger: Ledger, wanted: Wanted) -> None:
        if other.name not in wanted.features:
            part.apply(module, ledger, wanted)

    return replace(part, apply=apply)


#: Innermost wrapper first: the resident path meets a request before the queue,
#: the queue before stock.
PARTS: tuple[Part, ...] = (
    *_of(SURFACES, *surfaces.PARTS),
    *_of(ERRORS, Part(resident.POOL, errors.apply_pool)),
    *_of(RESIDENT, Part(resident.POOL, resident.apply_inner)),
    *_of(QUEUE, Part(resident.POOL, queue.apply)),
    *_of(RESIDENT, Part(resident.POOL, resident.apply_outer)),
    *_of(UNLOADS, Part(resident.POOL, unloads.apply), Part(unloads.ADMIN, model_dirs.apply)),
    *_of(QUEUE, Part(queue.UVICORN, queue.apply_uvicorn, optional=True)),
    *_of(RESIDENT, Part(resident.POOL, leases.apply)),
    *_of(QUEUE, Part(resident.POOL, leases.apply)),
    *_of(LEASES, Part(resident.POOL, leases.apply)),
    *_of(REQUESTS, Part(requests.SERVER, requests.apply)),
    *_of(STREAM_HOLD, Part(stream_hold.SERVER, stream_hold.apply)),
    *_of(GPU_SETTING, Part(gpu_setting.MODULE, gpu_setting.apply)),
    *_of(OFF_LOOP_CLOSE, *off_loop.PARTS),
    *_of(PARK, *parking.PARTS),
    *_of(DEAD_ENGINES, Part(dead.CORE, dead.apply)),
    *_of(PROMPT_GUARD, *prompt_guard.PARTS),
    *_of(LOAD_THREAD, *load_thread.PARTS),
    *_of(GPU_TURN, *gpu_turn.PARTS),
    *_of(GPU_TURN, _without(EXPOSURE, _without(GPU_LOCKOUT, gpu_names.PART))),
    *_of(EXPOSURE, *gpu_watch.EXPOSURE_PARTS),
    *_of(GPU_LOCKOUT, *(_without(EXPOSURE, part) for part in gpu_watch.FAULT_PARTS)),
    *_of(GPU_LOCKOUT, *gpu_watch.LOCKOUT_PARTS),
    *_of(GPU_STUCK_EXIT, *gpu_turn.EXIT_PARTS),
)

#: Modules to wait for.
MODULES: tuple[str, ...] = tuple(dict.fromkeys(part.module for part in PARTS))
