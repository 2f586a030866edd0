"""What feeds the exposure ledger and the fault log. Cheap: some microseconds a burst.

An engine is busy from its first request to its last one's end. The burst says so when
it begins and when it leaves nothing to do; oMLX's sweep, once a second, puts right what
an abort or a closed engine left standing.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlx_admission import __version__
from omlx_admission.core import faults
from omlx_admission.gpu.exposure_file import FILE_NAME, Versions, system_version
from omlx_admission.gpu.exposure_recorder import ExposureRecorder
from omlx_admission.gpu.faults import GpuFault
from omlx_admission.gpu.watch import GpuFaultError, watch
from omlx_admission.gpu_turn import sites
from omlx_admission.hooks.gpu import engine as gpu_engine
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import names as gpu_names
from omlx_admission.hooks.gpu import native as gpu_native
from omlx_admission.hooks.gpu.process import process
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted

SERVER = "omlx.server"
POOL = "omlx.engine_pool"
MTP = "omlx.patches.mlx_lm_mtp.batch_generator"
FATAL = "omlx.utils.fatal"
REQUEST = "omlx.request"

FAULT_NEEDS = (
    gpu_engine.STEP,
    gpu_engine.FAIL_ALL,
    gpu_engine.CLOSE,
    gpu_engine.STOP,
    gpu_jobs.EXECUTOR,
    gpu_engine.SCHEDULER_VALUE,
    *gpu_engine.CALLED,
    gpu_jobs.EXECUTOR_VALUE,
    gpu_engine.VISION,
    Need(gpu_engine.CORE, "EngineCore.config", Kind.VALUE),
    # MLX's own functions are wrapped where the engine core has them from.
    Need(gpu_engine.CORE, "mx", Kind.NAME),
    Need(gpu_engine.CORE, "EngineCore._reap_orphaned_collectors", Kind.SYNC, ("now",)),
    Need(gpu_engine.CORE, "_reap_orphaned_collectors", Kind.USED),
    Need(gpu_engine.SCHEDULER, "Scheduler.waiting", Kind.VALUE),
    *read_if_there(gpu_engine.SCHEDULER, "Scheduler", "prefilling"),
    Need(
        gpu_engine.SCHEDULER,
        "Scheduler.running",
        Kind.VALUE,
        types=("dict[...]", "OrderedDict[...]"),
    ),
    Need(gpu_engine.SCHEDULER, "SchedulerOutput.outputs", Kind.VALUE),
    # How long the context of an engine's longest request is, and what one has failed of.
    Need(REQUEST, "Request.num_prompt_tokens", Kind.VALUE, types=("int",)),
    Need(REQUEST, "Request.output_token_ids", Kind.VALUE, types=("list[...]",)),
    Need(REQUEST, "RequestOutput.error", Kind.VALUE, types=("str | None",)),
    *gpu_names.NEEDS,
)
EXPOSURE_NEEDS = (
    *FAULT_NEEDS,
    Need(SERVER, "init_server", Kind.SYNC),
    # Where the ledger is kept.
    *read_if_there(SERVER, "ServerState", "global_settings"),
    *read_if_there("omlx.settings", "GlobalSettings", "base_path"),
    Need(POOL, "EnginePool.shutdown", Kind.ASYNC),
    Need(MTP, "_reconcile_mtp_to_standard", Kind.SYNC, optional=True),
)
FATAL_EXIT = Need(FATAL, "fatal_exit", Kind.SYNC, ("reason",))
LOCKOUT_NEEDS = (*FAULT_NEEDS, FATAL_EXIT)
#: 0.7.x ends itself.
LOCKOUT_NATIVE = (Need(FATAL, "exit_if_gpu_submissions_ignored", Kind.SYNC),)


def _queues(scheduler: Any) -> tuple[Any, ...]:
    return (scheduler.running, scheduler.waiting, getattr(scheduler, "prefilling", ()))


def _longest(scheduler: Any) -> int:
    running, waiting, prefilling = _queues(scheduler)
    longest = 0
    for group in (running.values(), waiting, prefilling):
        for request in group:
            tokens = request.num_prompt_tokens + len(request.output_token_ids)
            if tokens > longest:
                longest = tokens
    return longest


def step_burst(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Note that the engine is busy, look at what the burst raises or reports."""
    name = sites.name_of(core)
    scheduler = core.scheduler
    try:
        watch.busy(name, _longest(scheduler))
    except Exception as error:  # noqa: BLE001 - counting must not stop the work
        faults.note("the exposure ledger", error)
    with watch.work(name):
        outputs = _seen(name, lambda: wrapped(*args, **kwargs))
    try:
        for step in outputs:
            for output in step.outputs:
                if output.error:
                    _swallowed(output, name)
        if not any(_queues(scheduler)):
            watch.idle(name)
    except Exception as error:  # noqa: BLE001
        faults.note("the exposure ledger", error)
    return outputs


def _swallowed(output: Any, name: str) -> None:
    """oMLX ends a request whose prefill failed by itself and keeps only the error's text.

    A text may quote anything, so it never ends the process: where it tells of a lockout,
    the GPU is asked, and MLX's own error, if there is one, is what counts.
    """
    fault = watch.saw_text(output.error, name)
    if fault is None:
        return
    output.error = str(GpuFaultError(RuntimeError(output.error), fault, name))
    if fault is GpuFault.SUBMISSIONS_IGNORED and watch.exit is not None:
        import mlx.core as mx

        try:
            mx.eval(mx.zeros((1,)) + 1)
        except RuntimeError as error:
            watch.saw(error, name)


def sweep(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """About once a second per engine, on the event loop."""
    try:
        if core.scheduler is not None and not any(_queues(core.scheduler)):
            watch.idle(sites.name_of(core))
    except Exception as error:  # noqa: BLE001
        faults.note("the exposure ledger", error)
    return wrapped(*args, **kwargs)


async def stop(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """An engine whose loop has ended works on nothing."""
    try:
        return await wrapped(*args, **kwargs)
    finally:
        watch.idle(sites.name_of(core))


def close(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Nor does one that is closed."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        watch.idle(sites.name_of(core))


def fail_all(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    """Clean-up may meet the next fault."""
    try:
        return wrapped(*args, **kwargs)
    except RuntimeError as error:
        watch.saw(error, watch.engine_of_thread())
        raise


def vision(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Vision encoding is work of its engine, also where none of its requests runs yet."""
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    name = sites.name_of(core) if core is not None else "vision"
    scheduler = getattr(core, "scheduler", None)
    try:
        watch.busy(name, _longest(scheduler) if scheduler is not None else 0)
    except Exception as error:  # noqa: BLE001
        faults.note("the exposure ledger", error)
    try:
        with watch.work(name):
            return _seen(name, lambda: wrapped(*args, **kwargs))
    finally:
        try:
            if scheduler is None or not any(_queues(scheduler)):
                watch.idle(name)
        except Exception as error:  # noqa: BLE001
            faults.note("the exposure ledger", error)


def job(this: gpu_jobs.Job, call: Callable[[], Any]) -> Any:
    """A job of the global executor. One that only cleans up is no work of its own."""
    if this.treatment.idle:
        return _seen(this.name, call)
    watch.busy(this.name, 0)
    try:
        with watch.work(this.name):
            return _seen(this.name, call)
    finally:
        watch.idle(this.name)


def _seen(name: str, call: Callable[[], Any]) -> Any:
    """``call``; a fault of the GPU is noted, and told the client as one."""
    try:
        return call()
    except RuntimeError as error:
        fault = watch.saw(error, name)
        if fault is None:
            raise
        raise GpuFaultError(error, fault, name) from error


def synchronize(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """oMLX swallows the error of a drain in its cache clears: see it before it is gone."""
    try:
        return wrapped(*args, **kwargs)
    except RuntimeError as error:
        watch.saw(error, watch.engine_of_thread())
        raise


def reconcile(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """An MTP row goes back to standard decoding: its committed tokens are computed again."""
    started = time.perf_counter()
    ok = False
    try:
        ok = bool(wrapped(*args, **kwargs))
        return ok
    finally:
        try:
            batch = args[0] if args else kwargs.get("gen_batch")
            rows = getattr(batch, "tokens", None)
            tokens = len(rows[0]) if rows else 0
            if tokens:
                watch.replayed(
                    tokens, time.perf_counter() - started, ok, watch.engine_of_thread()
                )
        except Exception as error:  # noqa: BLE001
            faults.note("counting MTP replays", error)


def init_server(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """The server knows its base path now: begin the ledger there."""
    result = wrapped(*args, **kwargs)
    try:
        begin()
    except Exception as error:  # noqa: BLE001
        faults.note("the exposure ledger", error)
    return result


def begin() -> None:
    """Begin the ledger of this process, once, where the server has a base path."""
    state = getattr(sys.modules.get(SERVER), "_server_state", None)
    base = getattr(getattr(state, "global_settings", None), "base_path", None)
    if watch.recorder is not None or not isinstance(base, str | Path):
        return
    recorder = ExposureRecorder(
        Path(base) / FILE_NAME, versions(), serialised=gpu_native.current() is not None
    )
    watch.recorder = recorder
    recorder.start()
    atexit.register(recorder.close)


async def shutdown(wrapped: Any, _pool: Any, args: Any, kwargs: Any) -> Any:
    """The server ends in good order; its process is killed by its own signal after that,
    so nothing that runs at interpreter exit would."""
    try:
        return await wrapped(*args, **kwargs)
    finally:
        if watch.recorder is not None:
            watch.recorder.close()


def versions() -> Versions:
    """What runs here."""
    from omlx._version import __version__ as omlx

    try:
        import mlx.core as mx

        version = str(getattr(mx, "__version__", ""))
    except ImportError:
        version = ""
    return Versions(omlx, version, system_version(), __version__)


# --- applying ------------------------------------------------------------------------------


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Watch engines, the global executor, and MLX's own synchronise."""
    ledger.wrap(module, "EngineCore._step_burst", step_burst)
    ledger.wrap(module, "EngineCore._reap_orphaned_collectors", sweep)
    ledger.wrap(module, "EngineCore.stop", stop)
    ledger.wrap(module, "EngineCore.close", close)
    process.executors.add(module, ledger, job)
    ledger.wrap(module.mx, "synchronize", synchronize)
    watch.turn = gpu_native.current


def apply_scheduler(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Watch the clean-up."""
    ledger.wrap(module, "Scheduler.fail_all_requests", fail_all)


def apply_vlm(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Watch vision encoding."""
    ledger.wrap_if_there(module, "VLMBatchedEngine._process_chat_messages", vision)


def apply_server(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Begin the ledger when the server is set up."""
    ledger.wrap(module, "init_server", init_server)


def apply_pool(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """End the ledger's line when the server ends."""
    ledger.wrap(module, "EnginePool.shutdown", shutdown)


def apply_mtp(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Show reconcile replays without DEBUG."""
    ledger.wrap_if_there(module, "_reconcile_mtp_to_standard", reconcile)


def leave(reason: str) -> None:
    """End the process the way oMLX ends itself, exit status 70."""
    from omlx.utils.fatal import fatal_exit

    fatal_exit(reason)


def apply_exit(_module: Any, _ledger: Ledger, _wanted: Wanted) -> None:
    """End a process that the driver ignores."""
    watch.exit = leave


#: What both features that watch want wrapped: where both are on, by the first one.
FAULT_PARTS = (
    Part(gpu_engine.SCHEDULER, apply_scheduler),
    Part(gpu_engine.CORE, apply_core),
    Part(gpu_engine.VLM, apply_vlm, optional=True),
    gpu_names.PART,
)
EXPOSURE_PARTS = (
    *FAULT_PARTS,
    Part(SERVER, apply_server),
    Part(POOL, apply_pool),
    Part(MTP, apply_mtp, optional=True),
)
LOCKOUT_PARTS = (Part(gpu_engine.CORE, apply_exit),)
