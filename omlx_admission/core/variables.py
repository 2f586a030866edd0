"""Environment variables: how they are read, and those of the queue.

A value that does not parse costs one clear line that names the variable, the value and
what is allowed; the default is used then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

from .config import Config

OFF_WORDS = frozenset({"0", "false", "off", "no"})
ON_WORDS = frozenset({"1", "true", "on", "yes"})


def switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ON_WORDS:
        return True
    if word in OFF_WORDS:
        return False
    raise ValueError(text)


def seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def auto_seconds(text: str) -> float | None:
    return None if text.strip().lower() == "auto" else seconds(text)


@dataclass(frozen=True)
class Variable:
    """One environment variable: how it is read and what it means."""

    name: str
    field: str
    parse: Callable[[str], object]
    allowed: str
    meaning: str


SWITCH = "0 or 1"
SECONDS = "a number of seconds, 0 or more"
COUNT = "a whole number, 0 or more"
AUTO = "auto or a number of seconds, 0 or more"

#: The fields of :class:`Config` that have one.
VARIABLES: tuple[Variable, ...] = (
    Variable(
        "OMLX_ADMISSION_QUEUE",
        "queue",
        switch,
        SWITCH,
        "requests for other models queue, and the busy model drains",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_WAIT_S",
        "max_wait_s",
        seconds,
        SECONDS,
        "wait budget of one request, its load included; 0 serves only what is loaded",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_QUEUE",
        "max_queue",
        count,
        COUNT,
        "most requests that may wait for models not in memory, and as many for those that are",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_MODELS",
        "max_models",
        count,
        COUNT,
        "most text and vision models in memory at any instant (embedders, rerankers and "
        "speech models do not count); 0 is no limit",
    ),
    Variable(
        "OMLX_ADMISSION_MAX_AGE_S",
        "max_age_s",
        auto_seconds,
        AUTO,
        "age of the oldest waiter at which the loaded model stops taking new requests",
    ),
    Variable(
        "OMLX_ADMISSION_LINGER_S",
        "linger_s",
        auto_seconds,
        AUTO,
        "how long an idle model that keeps coming back is kept while others wait",
    ),
)


def default_of(variable: Variable, kind: type[Config] = Config) -> str:
    """The default as a user would write it in the variable."""
    value = next(f.default for f in fields(kind) if f.name == variable.field)
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(
    variables: Iterable[Variable], environ: Mapping[str, str], kind: type[Config] = Config
) -> tuple[dict[str, object], list[str]]:
    """The fields of ``kind`` that are set, and lines to show about what was wrong.

    An empty value counts as unset, which is what ``VAR= omlx serve`` means in a shell
    script that fills the variable from another one.
    """
    values: dict[str, object] = {}
    problems: list[str] = []
    for variable in variables:
        text = environ.get(variable.name, "")
        if not text.strip():
            continue
        try:
            values[variable.field] = variable.parse(text)
        except ValueError:
            problems.append(
                f"{variable.name}={text!r} is not {variable.allowed}; "
                f"using the default {default_of(variable, kind)}"
            )
    return values, problems


def load(environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The configuration of the queue. Never raises; see :func:`read`."""
    values, problems = read(VARIABLES, environ)
    return Config(**values), problems  # type: ignore[arg-type]
