"""``scheduler.serialize_engine_gpu`` in oMLX's settings file.

oMLX does not know the key: it ignores it on reading and loses it at its first save. So
it is read from the file before oMLX's settings are made, and where it is there, oMLX's
own settings object carries it along.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.settings import GPU_MODES, Settings, gpu_turns

MODULE = "omlx.settings"
KEY = "serialize_engine_gpu"
VARIABLE = "OMLX_SERIALIZE_ENGINE_GPU"

NEEDS = (
    Need(MODULE, "SchedulerSettings", Kind.CLASS),
    Need(
        MODULE,
        "SchedulerSettings.from_dict",
        Kind.CLASS_METHOD,
        ("data",),
        returns=("SchedulerSettings", "Self"),
    ),
    Need(
        MODULE,
        "SchedulerSettings.to_dict",
        Kind.SYNC,
        (),
        returns=("dict[...]",),
    ),
    Need(MODULE, "from_dict", Kind.USED),
    Need(MODULE, "to_dict", Kind.USED),
)
#: A release that knows the key itself needs none of this.
NATIVE = (Need(MODULE, f"SchedulerSettings.{KEY}", Kind.VALUE),)

#: Where the macOS app notes a moved data folder.
_BOOTSTRAP = ("Library", "Application Support", "oMLX", "base-path")


def base_path(
    arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Path:
    """The folder that ``omlx serve`` with these arguments will use, by its own rules."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for at, word in enumerate(words):
        if word == "--base-path" and at + 1 < len(words):
            return Path(words[at + 1]).expanduser()
        if word.startswith("--base-path="):
            return Path(word.partition("=")[2]).expanduser()
    named = (os.environ if environ is None else environ).get("OMLX_BASE_PATH")
    if named:
        return Path(named).expanduser()
    try:
        moved = Path.home().joinpath(*_BOOTSTRAP).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        moved = ""
    return Path(moved).expanduser() if moved else Path.home() / ".omlx"


def read(folder: Path) -> tuple[bool | str | None, str | None]:
    """The key's value in ``folder``'s settings file (None: not there), and a problem."""
    path = folder / "settings.json"
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError):
        return None, None  # oMLX itself says so when it reads the file
    section = content.get("scheduler") if isinstance(content, dict) else None
    value = section.get(KEY) if isinstance(section, dict) else None
    if value is None or isinstance(value, bool):
        return value, None
    try:
        return gpu_turns(str(value)), None
    except ValueError:
        modes = " or ".join(GPU_MODES)
        return None, f"scheduler.{KEY}={value!r} in {path} is not true, false, {modes}; ignored"


def with_file(
    settings: Settings, problems: list[str], environ: Mapping[str, str] | None = None
) -> Settings:
    """``settings`` with what oMLX's settings file says; the variable takes precedence."""
    value, problem = read(base_path(environ=environ))
    if problem is not None:
        problems.append(problem)
    if value is None:
        return settings
    source = os.environ if environ is None else environ
    if source.get(VARIABLE, "").strip():
        return replace(settings, keep_gpu_setting=True)
    return replace(settings, keep_gpu_setting=True, serialize_engine_gpu=value)


def from_dict(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Take the key along when settings are read."""
    result = wrapped(*args, **kwargs)
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, dict) and KEY in data:
        setattr(result, KEY, data[KEY])
    return result


def to_dict(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Put it back when they are saved."""
    result = wrapped(*args, **kwargs)
    if KEY in vars(instance):
        result[KEY] = getattr(instance, KEY)
    return result


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Make oMLX's own settings object carry the key."""
    ledger.wrap(module, "SchedulerSettings.from_dict", from_dict)
    ledger.wrap(module, "SchedulerSettings.to_dict", to_dict)
