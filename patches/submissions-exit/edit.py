"""A process whose GPU submissions the driver ignores ends itself (exit status 70)."""

from __future__ import annotations

from omlx_admission.upstream import editing
from omlx_admission.upstream.change import Change
from omlx_admission.upstream.code import Code, find

EXIT = "exit_if_gpu_submissions_ignored"
CHECK = EXIT + "({})"

TEXTS = """
# Metal reports a failed command buffer as text: who says so first, what it was after.
_GPU_ERROR_HEADS = (
    "[METAL] Command buffer",
    "Execution of the command buffer",
    "ANE ",
    "Metal ",
)
_SUBMISSIONS_IGNORED = ("SubmissionsIgnored", "prior/excessive GPU errors")
"""

FUNCTIONS = '''
def exit_if_gpu_submissions_ignored(error: BaseException) -> None:
    """Leave the process if ``error`` says that the GPU driver ignores its submissions.

    After enough GPU errors the driver rejects whatever a process submits, for as long as
    it lives. Such a server answers health checks and never generates again, and every
    recovery fails the way its cause did. A supervisor can start a clean one.

    What ``error`` was raised from counts as well. Only a RuntimeError whose text begins
    as Metal's does is believed: other texts may quote anything, a prompt for example.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link) if isinstance(link, RuntimeError) else ""
        if text.startswith(_GPU_ERROR_HEADS) and any(
            word in text for word in _SUBMISSIONS_IGNORED
        ):
            fatal_exit(f"The GPU driver ignores this process's submissions ({text})")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def run_gpu_work(fn, /, *args, **kwargs):
    """Call ``fn``; what it raises may be a reason to leave the process."""
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        exit_if_gpu_submissions_ignored(error)
        raise
'''

EXECUTOR = '''
class MLXExecutor(concurrent.futures.ThreadPoolExecutor):
    """A thread for MLX work; the process ends where the GPU driver ignores that work."""

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(run_gpu_work, fn, *args, **kwargs)
'''


def fatal(module: Code) -> Code:
    """The check, beside the exit that it uses."""
    find(module, "fatal_exit")
    module = editing.insert_after_definition(module, "FATAL_TEARDOWN_TIMEOUT_S", TEXTS)
    return editing.append_definitions(module, FUNCTIONS)


def metal_sync(module: Code) -> Code:
    """The error of the targeted synchronise is swallowed here, and comes again."""
    module = editing.insert_in_handlers(module, "_sync_and_clear_cache", "RuntimeError", CHECK)
    return editing.import_name(module, ".fatal", EXIT)


def engine_core(module: Code) -> Code:
    """Everything on the engines' threads and the shared one passes their executors."""
    stock = "concurrent.futures.ThreadPoolExecutor"
    for name in ("get_mlx_executor", "EngineCore.__init__"):
        module = editing.replace_callee(module, name, stock, "MLXExecutor")
    module = editing.insert_before_definition(module, "_final_engine_thread_reclaim", EXECUTOR)
    return editing.import_name(module, ".utils.fatal", "run_gpu_work")


def scheduler(module: Code) -> Code:
    """Handlers that end requests and keep only the error's text."""
    find(module, "Scheduler.fail_all_requests")
    before = module
    module = editing.insert_in_handlers(
        module, "Scheduler", "RuntimeError", CHECK, needed=False
    )
    clean_up = "Scheduler.fail_all_requests"
    module = editing.insert_in_handlers(module, clean_up, "Exception", CHECK, needed=False)
    if module.content == before.content:
        return module
    return editing.import_name(module, ".utils.fatal", EXIT)


def vlm(module: Code) -> Code:
    """A diffusion's error goes to its reader instead of the executor."""
    if "run_in_executor" not in module.text:
        return module
    module = editing.insert_in_handlers(module, "_worker", "BaseException", CHECK)
    return editing.import_name(module, "..utils.fatal", EXIT)


def dflash(module: Code) -> Code:
    """So does the error of a streamed generation."""
    name = "DFlashEngine._run_generate_streaming"
    module = editing.insert_in_handlers(module, name, "Exception", CHECK)
    return editing.import_name(module, "..utils.fatal", EXIT)


CHANGE = Change(
    name="submissions-exit",
    title="fix(engine): exit once the GPU driver ignores all submissions",
    message="""
After GPU errors the Metal driver may reject every command buffer of a
process (kIOGPUCommandBufferCallbackErrorSubmissionsIgnored) until it ends.
The server then answers /v1/models and fails every generation, and its
recovery fails the same way.

fatal.exit_if_gpu_submissions_ignored leaves with status 70, as a teardown
that hangs does already, so that a supervisor starts a clean process. The
executors of the engines and the shared one ask it about the errors of their
work. So do the handlers that end or swallow such an error before it gets
there: prefill and clean-up, the targeted synchronise before a cache clear,
the worker of a diffusion and the stream of DFlash.
""",
    issues=(3706,),
    features=("gpu_lockout",),
    edits={
        "utils/fatal.py": fatal,
        "utils/metal_sync.py": metal_sync,
        "engine_core.py": engine_core,
        "scheduler.py": scheduler,
        "engine/vlm.py": vlm,
        "engine/dflash.py": dflash,
    },
    optional=frozenset({"engine/dflash.py"}),
)
