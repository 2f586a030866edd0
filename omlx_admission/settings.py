"""Every environment variable of the package, read here and nowhere else.

A value that does not parse costs one clear line that names the variable, the
value and what is allowed; the default is used then.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from omlx_admission.core import variables
from omlx_admission.core.config import Config
from omlx_admission.core.variables import (
    AUTO,
    SECONDS,
    SWITCH,
    Variable,
    auto_seconds,
    seconds,
    switch,
)


@dataclass(frozen=True)
class Settings(Config):
    """The parsed variables. Durations in seconds; ``None`` means automatic."""

    enabled: bool = True
    resident_path: bool = True
    unloads: bool = True
    leases: bool = True
    off_loop_close: bool = True
    load_thread: bool = False
    #: ``auto`` and ``alternate`` are words of `gpu_turns`.
    serialize_engine_gpu: bool | str = False
    exposure: bool = True
    exit_on_gpu_lockout: bool = True
    exit_on_gpu_stuck: bool = False
    gpu_stuck_s: float = 60.0
    #: Not a variable: oMLX's settings file has ``scheduler.serialize_engine_gpu``.
    keep_gpu_setting: bool = False
    stream_hold_s: float = 10.0
    surfaces: bool = True
    stuck_s: float | None = None
    strict: bool = False


#: When engines take turns on the GPU, but for always and never.
GPU_MODES = ("auto", "alternate")
GPU_TURNS = f"0, 1, {' or '.join(GPU_MODES)}"


def gpu_turns(text: str) -> bool | str:
    """Whether engines take turns on the GPU, or when."""
    word = text.strip().lower()
    return word if word in GPU_MODES else switch(word)


_OF_CORE = {variable.name: variable for variable in variables.VARIABLES}

VARIABLES: tuple[Variable, ...] = (
    Variable("OMLX_ADMISSION", "enabled", switch, SWITCH, "0: nothing is installed"),
    Variable(
        "OMLX_ADMISSION_RESIDENT_PATH",
        "resident_path",
        switch,
        SWITCH,
        "requests for a loaded model bypass the pool lock",
    ),
    _OF_CORE["OMLX_ADMISSION_QUEUE"],
    Variable(
        "OMLX_ADMISSION_UNLOADS",
        "unloads",
        switch,
        SWITCH,
        "unloads by hand wait for what runs; 0: they cut it off, as oMLX does",
    ),
    Variable(
        "OMLX_ADMISSION_ERRORS",
        "errors",
        switch,
        SWITCH,
        "503 with Retry-After for a shortage that passes, 507 for one that does not",
    ),
    _OF_CORE["OMLX_ADMISSION_MAX_WAIT_S"],
    _OF_CORE["OMLX_ADMISSION_MAX_QUEUE"],
    _OF_CORE["OMLX_ADMISSION_MAX_MODELS"],
    _OF_CORE["OMLX_ADMISSION_MAX_AGE_S"],
    _OF_CORE["OMLX_ADMISSION_LINGER_S"],
    Variable(
        "OMLX_ADMISSION_LEASES",
        "leases",
        switch,
        SWITCH,
        "a model handed to a route that takes no lease stays until its request ends",
    ),
    Variable(
        "OMLX_ADMISSION_OFF_LOOP_CLOSE",
        "off_loop_close",
        switch,
        SWITCH,
        "an engine is closed on a thread, while the server goes on (needs the resident path)",
    ),
    Variable(
        "OMLX_ADMISSION_PARK",
        "park",
        switch,
        SWITCH,
        "what a busy model runs is parked when another model is due, instead of waited for, "
        "and goes on in its stream when the model is back; tried with MLX on the CPU only",
    ),
    Variable(
        "OMLX_ADMISSION_LOAD_THREAD",
        "load_thread",
        switch,
        SWITCH,
        "text and vision models load on a thread of their own, so that a loaded embedder, "
        "reranker or speech model does not wait for a load; tried with MLX on the CPU only",
    ),
    Variable(
        "OMLX_SERIALIZE_ENGINE_GPU",
        "serialize_engine_gpu",
        gpu_turns,
        GPU_TURNS,
        "one engine on the GPU at a time; auto: from the first GPU hang with two engines busy "
        "on; alternate: on and off by the hour, for `omlx-admission report`; takes precedence "
        "over scheduler.serialize_engine_gpu in oMLX's settings file",
    ),
    Variable(
        "OMLX_ADMISSION_GPU_STUCK_S",
        "gpu_stuck_s",
        seconds,
        SECONDS,
        "a GPU turn that others wait for longer than this is reported with its stack (0: "
        "never); after ten times this, at least 300 s (with 0: 600 s), a waiter gives up",
    ),
    Variable(
        "OMLX_ADMISSION_EXPOSURE",
        "exposure",
        switch,
        SWITCH,
        "count GPU exposure and faults in a small file under oMLX's base path, and log "
        "faults and MTP replays",
    ),
    Variable(
        "OMLX_ADMISSION_EXIT_ON_GPU_LOCKOUT",
        "exit_on_gpu_lockout",
        switch,
        SWITCH,
        "end a process whose GPU submissions the driver ignores, so that its supervisor "
        "starts it again",
    ),
    Variable(
        "OMLX_ADMISSION_EXIT_ON_GPU_STUCK",
        "exit_on_gpu_stuck",
        switch,
        SWITCH,
        "end a process where a waiter has given up on a GPU turn that was never handed over "
        "while it waited, so that its supervisor starts it again",
    ),
    Variable(
        "OMLX_ADMISSION_STREAM_HOLD_S",
        "stream_hold_s",
        seconds,
        SECONDS,
        "a stream that waits longer gets its 200 and oMLX's keep-alives, and any refusal as "
        "an event; 0: never",
    ),
    Variable(
        "OMLX_ADMISSION_SURFACES",
        "surfaces",
        switch,
        SWITCH,
        "GET /admission, /admission/status and /admission/metrics, behind oMLX's own API key",
    ),
    Variable(
        "OMLX_ADMISSION_STUCK_S",
        "stuck_s",
        auto_seconds,
        AUTO,
        "a load, unload or drain longer than this is called stuck in log and status; auto: "
        "a minute, more where a load is expected to take longer, and half of the wait budget "
        "for a drain",
    ),
    Variable(
        "OMLX_ADMISSION_STRICT",
        "strict",
        switch,
        SWITCH,
        "1: refuse to start where a wanted feature cannot be applied or a value is wrong",
    ),
)


def default_of(variable: Variable) -> str:
    """The default as a user would write it in the variable."""
    return variables.default_of(variable, Settings)


def load(environ: Mapping[str, str] | None = None) -> tuple[Settings, list[str]]:
    """Read all variables. Never raises; what was wrong comes back as lines to show."""
    source = os.environ if environ is None else environ
    values, problems = variables.read(VARIABLES, source, Settings)
    return Settings(**values), problems + _unknown(source)  # type: ignore[arg-type]


def _unknown(source: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like one of ours and is none."""
    problems: list[str] = []
    known = {variable.name for variable in VARIABLES}
    for name in sorted(source):
        if name.startswith("OMLX_ADMISSION_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"{name} is not a variable of this release, ignored{hint}")
    return problems


def api_key(environ: Mapping[str, str] | None = None) -> str | None:
    """oMLX's own ``OMLX_API_KEY``, with which a command asks a running server; None: unset."""
    source = os.environ if environ is None else environ
    return source.get("OMLX_API_KEY") or None
