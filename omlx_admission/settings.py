"""Every environment variable of the package, read here and nowhere else.

A value that does not parse costs one clear line that names the variable, the
value and what is allowed; the default is used then.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from omlx_admission._startup import OFF_WORDS
from omlx_admission.core.config import Config

ON_WORDS = frozenset({"1", "true", "on", "yes"})


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ON_WORDS:
        return True
    if word in OFF_WORDS:
        return False
    raise ValueError(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _auto_seconds(text: str) -> float | None:
    return None if text.strip().lower() == "auto" else _seconds(text)


@dataclass(frozen=True)
class Variable:
    """One environment variable: how it is read and what it means."""

    name: str
    field: str
    parse: Callable[[str], object]
    allowed: str
    meaning: str


@dataclass(frozen=True)
class Settings(Config):
    """The parsed variables. Durations in seconds; ``None`` means automatic."""

    enabled: bool = True
    resident_path: bool = True
    queue: bool = True
    unloads: bool = True
    leases: bool = True
    off_loop_close: bool = True
    load_thread: bool = False
    serialize_engine_gpu: bool = False
    exposure: bool = True
    exit_on_gpu_lockout: bool = True
    gpu_stuck_s: float = 60.0
    #: Not a variable: oMLX's settings file has ``scheduler.serialize_engine_gpu``.
    keep_gpu_setting: bool = False
    stream_hold_s: float = 10.0
    surfaces: bool = True
    stuck_s: float | None = None
    strict: bool = False


_SWITCH = "0 or 1"
_SECONDS = "a number of seconds, 0 or more"
_COUNT = "a whole number, 0 or more"
_AUTO = "auto or a number of seconds, 0 or more"

VARIABLES: tuple[Variable, ...] = (
    Variable("OMLX_ADMISSION", "enabled", _switch, _SWITCH, "0: nothing is installed"),
    Variable(
        "OMLX_ADMISSION_RESIDENT_PATH",
        "resident_path",
        _switch,
        _SWITCH,
        "requests for a loaded model bypass the pool lock",
    ),
    Variable(
        "OMLX_ADMISSION_QUEUE",
        "queue",
        _switch,
        _SWITCH,
        "requests for other models queue, and the busy model drains",
    ),
    Variable(
        "OMLX_ADMISSION_UNLOADS",
        "unloads",
        _switch,
        _SWITCH,
        "unloads by hand wait for what runs; 0: they cut it off, as oMLX does",
    ),
    Variable(
        "OMLX_ADMISSION_ERRORS",
        "errors",
        _switch,
        _SWITCH,
        "503 with Retry-After for a shortage that passes, 507 for one that does not",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_WAIT_S",
        "max_wait_s",
        _seconds,
        _SECONDS,
        "wait budget of one request, its load included; 0 serves only what is loaded",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_QUEUE",
        "max_queue",
        _count,
        _COUNT,
        "most requests that may wait for models not in memory, and as many for those that are",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_MODELS",
        "max_models",
        _count,
        _COUNT,
        "most text and vision models in memory at any instant (embedders, rerankers and "
        "speech models do not count); 0 is no limit",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_AGE_S",
        "max_age_s",
        _auto_seconds,
        _AUTO,
        "age of the oldest waiter at which the loaded model stops taking new requests",
    ),
    Variable(
        "OMLX_ADMISSION_LINGER_S",
        "linger_s",
        _auto_seconds,
        _AUTO,
        "how long an idle model that keeps coming back is kept while others wait",
    ),
    Variable(
        "OMLX_ADMISSION_LEASES",
        "leases",
        _switch,
        _SWITCH,
        "a model handed to a route that takes no lease stays until its request ends",
    ),
    Variable(
        "OMLX_ADMISSION_OFF_LOOP_CLOSE",
        "off_loop_close",
        _switch,
        _SWITCH,
        "an engine is closed on a thread, while the server goes on (needs the resident path)",
    ),
    Variable(
        "OMLX_ADMISSION_LOAD_THREAD",
        "load_thread",
        _switch,
        _SWITCH,
        "text and vision models load on a thread of their own, so that a loaded embedder, "
        "reranker or speech model does not wait for a load; tried with MLX on the CPU only",
    ),
    Variable(
        "OMLX_SERIALIZE_ENGINE_GPU",
        "serialize_engine_gpu",
        _switch,
        _SWITCH,
        "one engine on the GPU at a time; takes precedence over scheduler.serialize_engine_gpu "
        "in oMLX's settings file",
    ),
    Variable(
        "OMLX_ADMISSION_GPU_STUCK_S",
        "gpu_stuck_s",
        _seconds,
        _SECONDS,
        "a GPU turn held longer than this while others wait is reported with its stack "
        "(0: never); after ten times this, at least 300 s, a waiter gives up",
    ),
    Variable(
        "OMLX_ADMISSION_EXPOSURE",
        "exposure",
        _switch,
        _SWITCH,
        "count GPU exposure and faults in a small file under oMLX's base path, and log "
        "faults and MTP replays",
    ),
    Variable(
        "OMLX_ADMISSION_EXIT_ON_GPU_LOCKOUT",
        "exit_on_gpu_lockout",
        _switch,
        _SWITCH,
        "end a process whose GPU submissions the driver ignores, so that its supervisor "
        "starts it again",
    ),
    Variable(
        "OMLX_ADMISSION_STREAM_HOLD_S",
        "stream_hold_s",
        _seconds,
        _SECONDS,
        "a stream that waits longer gets its 200 and oMLX's keep-alives, and any refusal as "
        "an event; 0: never",
    ),
    Variable(
        "OMLX_ADMISSION_SURFACES",
        "surfaces",
        _switch,
        _SWITCH,
        "GET /admission, /admission/status and /admission/metrics, behind oMLX's own API key",
    ),
    Variable(
        "OMLX_ADMISSION_STUCK_S",
        "stuck_s",
        _auto_seconds,
        _AUTO,
        "a load, unload or drain longer than this is called stuck in log and status; auto: "
        "a minute, more where a load is expected to take longer, and half of the wait budget "
        "for a drain",
    ),
    Variable(
        "OMLX_ADMISSION_STRICT",
        "strict",
        _switch,
        _SWITCH,
        "1: refuse to start where a wanted feature cannot be applied or a value is wrong",
    ),
)


def default_of(variable: Variable) -> str:
    """The default as a user would write it in the variable."""
    value = next(f.default for f in fields(Settings) if f.name == variable.field)
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(environ: Mapping[str, str] | None = None) -> tuple[Settings, list[str]]:
    """Read all variables. Never raises; what was wrong comes back as lines to show.

    An empty value counts as unset, which is what ``VAR= omlx serve`` means in a
    shell script that fills the variable from another one.
    """
    source = os.environ if environ is None else environ
    values: dict[str, object] = {}
    problems: list[str] = []
    for variable in VARIABLES:
        text = source.get(variable.name, "")
        if not text.strip():
            continue
        try:
            values[variable.field] = variable.parse(text)
        except ValueError:
            problems.append(
                f"{variable.name}={text!r} is not {variable.allowed}; "
                f"using the default {default_of(variable)}"
            )
    problems += _unknown(source)
    return Settings(**values), problems  # type: ignore[arg-type]


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
