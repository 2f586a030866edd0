"""What is copied into oMLX as it is: the core, or those of its modules that a change needs.

A module that several changes need is brought by whichever is made first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import omlx_admission
from omlx_admission.upstream import editing
from omlx_admission.upstream.change import Make
from omlx_admission.upstream.code import Code, first_of, has, same

#: First line of every file of oMLX.
LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"

_ROOT = Path(omlx_admission.__file__).parent

#: Our folders to theirs.
FOLDERS = {"admission": _ROOT / "core", "gpu_turn": _ROOT / "gpu_turn"}


def copied(folder: str, *names: str) -> dict[str, Make]:
    """The modules of these dotted names in one of ``FOLDERS``, and all that they import.

    Without names, all there are. Paths are those below ``omlx/``.
    """
    root = FOLDERS[folder]
    todo = [root.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    todo = todo or sorted(root.rglob("*.py"))
    found: dict[Path, Make] = {}
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = _copy(path)
            todo += _needs(path, root)
    return {f"{folder}/{path.relative_to(root).as_posix()}": found[path] for path in found}


def added(folder: Path, to: str) -> dict[str, Make]:
    """What exists only there: the files of ``folder``, for ``omlx/<to>/``."""
    return {f"{to}/{path.name}": _copy(path) for path in sorted(folder.glob("*.py"))}


#: What our tests import, to what it is there.
_THERE = {"omlx_admission.core": "omlx.admission", "from benchmarks.simulation.": "from ."}


def tests(*paths: str) -> dict[str, Make]:
    """Tests of ours, and what they stand on, for ``tests/admission/``.

    As they are but for the names of the packages. Paths are those in a checkout.
    """
    made: dict[str, Make] = {"admission/__init__.py": lambda: LICENSE}
    return made | {f"admission/{Path(path).name}": _renamed(path) for path in paths}


def _renamed(path: str) -> Make:
    def make() -> str:
        # In a wheel they lie inside.
        inside = _ROOT / "_patches" / "_copied" / path
        place = inside if inside.is_file() else _ROOT.parent / path
        text = LICENSE + place.read_text("utf-8")
        for ours, theirs in _THERE.items():
            text = text.replace(ours, theirs)
        return text

    return make


def _copy(path: Path) -> Make:
    return lambda: LICENSE + path.read_text("utf-8")


@cache
def _needs(path: Path, root: Path) -> tuple[Path, ...]:
    """The files that one imports, and the packages that it lies in."""
    packages = [p / "__init__.py" for p in path.parents if p == root or root in p.parents]
    found = (file for files in imported(path.read_text("utf-8"), path) for file in files)
    return (*packages, *(file for file in found if file.is_file()))


def imported(text: str, path: Path) -> Iterator[tuple[Path, ...]]:
    """For each relative import in the text of ``path``, the files that it may mean."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        below = path.parents[node.level - 1]
        below = below.joinpath(*(node.module or "").split("."))
        # A module of that name, or modules in a package of that name.
        yield (
            below.parent / f"{below.name}.py",
            *(below / f"{alias.name}.py" for alias in node.names),
        )


#: What puts the request middleware into ``server.py``.
MIDDLEWARE = "app.add_middleware(RequestMiddleware)"


def add_middleware(module: Code) -> Code:
    """``server.py`` with the request middleware; as it is where it has it."""
    (wanted,) = ast.parse(MIDDLEWARE).body
    if any(same(statement, wanted) for statement in module.tree.body):
        return module
    module = editing.add_import(module, "from .admission.request import RequestMiddleware")
    return editing.insert_after_definition(module, "app", MIDDLEWARE)


_RELEASE = '''
def _release_loaded_engine(self, model_id: str) -> bool:
    """Give one lease back; False where a pending unload has to see it, locked."""
    entry = self._entries.get(model_id)
    if entry is not None and entry.pending_unload_reason:
        return False
    if entry is not None and entry.in_use > 0:
        entry.in_use -= 1
    return True
'''


def add_release(module: Code) -> Code:
    """``engine_pool.py`` with the two ways to give a lease back; as it is where it has them.

    Locked is oMLX's own; only 0.5.0 has that within ``release_engine`` still.
    """
    if not has(module, "EnginePool._release_engine_lease"):
        module = editing.split_function(
            module,
            "EnginePool.release_engine",
            head="await self._release_engine_lease(model_id)",
            rest="_release_engine_lease",
            doc="Give one lease back under the pool lock.",
        )
    if has(module, "EnginePool._release_loaded_engine"):
        return module
    getter = first_of(module, "EnginePool._get_engine_locked", "EnginePool.get_engine")
    return editing.insert_method(module, _RELEASE, after=getter)
