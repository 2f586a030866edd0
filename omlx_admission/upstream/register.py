"""The folders of ``patches/``: found, loaded, put in order."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import omlx_admission
from omlx_admission.upstream.change import Change, Refused

#: Order in which all changes are made: each stands on nothing that comes later.
ORDER = (
    "resident-path",
    "error-mapping",
    "leases",
    "admission-queue",
    "drain-queue",
    "gpu-turn",
    "submissions-exit",
)


def folder() -> Path:
    """``patches/`` of a checkout, or what the wheel carries of it.

    Raises:
        Refused: neither is there.
    """
    package = Path(omlx_admission.__file__).parent
    for place in (package / "_patches", package.parent / "patches"):
        if (place / "README.md").is_file():
            return place
    raise Refused(f"no patches/ beside {package} and none in it")


@cache
def changes() -> Mapping[str, Change]:
    """All changes by name, in the order in which they are made."""
    found = {place.parent.name: place for place in sorted(folder().glob("*/edit.py"))}
    names = [name for name in ORDER if name in found]
    names += [name for name in found if name not in ORDER]
    return {name: _load(found[name]) for name in names}


def _load(path: Path) -> Change:
    name = path.parent.name
    spec = importlib.util.spec_from_file_location(
        f"omlx_admission._patches.{name.replace('-', '_')}", path
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    change = module.CHANGE
    assert isinstance(change, Change), path
    assert change.name == name, path
    return replace(change, folder=path.parent)


def select(name: str) -> list[Change]:
    """What ``name`` (a change, or ``all``) consists of, in order.

    Raises:
        Refused: no such change; the text lists the names.
    """
    known = changes()
    if name == "all":
        return list(known.values())
    if name not in known:
        raise Refused(f"no change {name!r}; there are: {', '.join(known)}, all")
    wanted = _with_what_they_stand_on([name], known)
    return [change for change in known.values() if change.name in wanted]


def _with_what_they_stand_on(names: Iterable[str], known: Mapping[str, Change]) -> set[str]:
    wanted: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += known[name].after
    return wanted
