"""Every name of oMLX that a hook reads is one that the register names.

A name that no need states is read on whatever oMLX there is: where it is gone, the hook
fails at work, and not at the gate. The hooks' sources are read here, not run: what is
read of an object is known by the name of the variable that holds it. What is read by
``getattr`` or out of an object's ``__dict__``, whatever holds it and whether it may be
missing or not, is known by the name that is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import standin
from omlx_admission import hooks
from omlx_admission.core import pool as core_pool
from omlx_admission.gpu_turn import sites as gpu_turn_sites
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.patching.gate import Kind

#: Variables of the hooks that hold an object of oMLX: what it is. "": a module.
HOLDERS: dict[str, tuple[str, ...]] = {
    "pool": ("EnginePool",),
    "_pool": ("EnginePool",),
    "EnginePool": ("EnginePool",),
    "entry": ("EngineEntry",),
    "e": ("EngineEntry",),
    "_entries[]": ("EngineEntry",),
    "engine": ("BaseEngine", "BaseNonStreamingEngine", "BatchedEngine", "VLMBatchedEngine"),
    "handle": ("AsyncEngineCore",),
    "core": ("EngineCore",),
    "EngineCore": ("EngineCore",),
    "scheduler": ("Scheduler",),
    "step": ("SchedulerOutput",),
    "output": ("RequestOutput",),
    "manager": ("ModelSettingsManager",),
    "reranker": ("MLXRerankerModel",),
    "activity": ("",),
    "get_decode_activity()": ("DecodeActivityRegistry",),
    "module": ("",),
    "_module": ("",),
    "routes": ("",),
    "_server_state": ("ServerState",),
    "_errors": ("",),
    "theirs": ("",),
}
#: Such variables that hold something of ours in one file.
OURS = {
    ("server/surfaces.py", "routes"),
    ("pool/model_dirs.py", "e"),
    ("patching/ledger.py", "e"),
    ("patching/ledger.py", "entry"),
    ("patching/ledger.py", "module"),
    ("install.py", "module"),
    ("features.py", "module"),
    ("patching/moved.py", "module"),
    ("patching/bodies.py", "module"),
    ("patching/gate.py", "module"),
}
#: And such that hold something of oMLX in one file only.
THEIRS = {
    ("gpu/watch.py", "request"): ("Request",),
    ("core/pool/port.py", "errors"): ("",),
    ("core/pool/errors.py", "errors"): ("",),
    ("server/requests.py", "app"): ("FastAPI",),
}
#: Read without a need, and why.
ALLOWED = {
    "module.startswith": "of a module's name",
    "module.rpartition": "of a module's name",
    "module.Server": "uvicorn's, asked for with getattr where it matters",
    "app.add_middleware": "Starlette's",
    "app.user_middleware": "Starlette's",
}


#: What of the core reads oMLX's pool.
CORE = Path(core_pool.__file__).parent
#: What of the turn reads oMLX's engines.
SITES = Path(gpu_turn_sites.__file__)


def _place(path: Path) -> str:
    """Where the file is below ``hooks/``, or in the core; its name elsewhere."""
    if path.parent == CORE:
        return f"core/pool/{path.name}"
    if path == SITES:
        return "gpu_turn/sites.py"
    root = Path(hooks.__file__).parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _base(node: ast.expr) -> str:
    """The variable's own name; ``x[]`` of an item, ``x()`` of what a call gives."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return f"{_base(node.value)}[]"
    if isinstance(node, ast.Call):
        return f"{_base(node.func)}()"
    return node.id if isinstance(node, ast.Name) else ""


def reads(path: Path) -> Iterator[tuple[int, str, str, tuple[str, ...]]]:
    """(line, variable, attribute, what the variable may be) of one file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            holder, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            holder, name = node.args[0], str(node.args[1].value)
        else:
            continue
        base = _base(holder)
        kinds = THEIRS.get((_place(path), base)) or HOLDERS.get(base)
        if name.startswith("__") or (_place(path), base) in OURS:
            continue
        if kinds is not None:
            yield node.lineno, base, name, kinds


NEEDED = {
    need.name: need
    for feature in FEATURES
    for need in (*feature.needs, *feature.native)
    if need.kind not in (Kind.USED, Kind.JOBS)
}
FILES = sorted([*Path(hooks.__file__).parent.rglob("*.py"), *CORE.rglob("*.py"), SITES])


def missing(path: Path) -> set[str]:
    return {
        f"{_place(path)}:{line}: {base}.{name}"
        for line, base, name, kinds in reads(path)
        if f"{base}.{name}" not in ALLOWED
        and not any((f"{kind}.{name}" if kind else name) in NEEDED for kind in kinds)
        and not any(n.startswith(f"{name}.") for n in NEEDED)
    }


@pytest.mark.parametrize("path", FILES, ids=_place)
def test_what_a_hook_reads_of_omlx_is_needed_somewhere(path: Path) -> None:
    assert missing(path) == set()


def _private_names() -> set[str]:
    names: set[str] = set()
    for path in standin.PATH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


@pytest.mark.parametrize("path", FILES, ids=_place)
def test_private_names_of_omlx_are_needed_whatever_holds_them(path: Path) -> None:
    theirs = _private_names()
    members = {part for name in NEEDED for part in name.split(".")}
    found = {
        f"{_place(path)}:{node.lineno}: {node.attr}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in theirs - members
        and _base(node.value) != "self"
        and f"{_base(node.value)}.{node.attr}" not in ALLOWED
    }
    assert found == set()


#: Read by ``getattr`` of what is not oMLX's, and names that are computed: what they are.
NOT_THEIRS = {
    "core/pool/ceiling.py:n": "the enforcer's ways to tell, which have rows",
    "core/pool/engines.py:done": "asyncio's, of a task",
    "pool/prompt_guard.py:status_code": "Starlette's, of an answer raised as an error",
    "gpu/engine.py:name": "KEEP_WARM, which has rows",
    "gpu/executors.py:submit": "Python's, of an executor",
    "gpu/shared.py:name": "a reranker's model's own",
    "gpu_turn/sites.py:key": "budgets of a burst, which have rows",
    "gpu_turn/sites.py:name": "a model's own methods, of the libraries for speech",
    "gpu/native.py:current": "of the change that brings the turn to oMLX",
    "gpu/setting.py:KEY": "ours, put on oMLX's settings",
    "gpu/watch.py:tokens": "mlx-lm's",
    "park/answers.py:refusal": "of an error of ours",
    "park/rows.py:func": "Python's, of a partial function",
    "park/rows.py:name": "mlx-lm's, of its batch and its generator",
    "pool/leases.py:name": "methods of the pool that have rows",
    "install.py:feature.field": "a setting of ours",
    "install.py:obj": "Python's, of an AttributeError",
    "patching/ledger.py:self.attribute": "what a row has named",
    "patching/ledger.py:attribute": "what a row has named",
    "patching/ledger.py:part": "what a row has named",
    "pool/resident.py:RELEASE_TASK": "which has a row",
    "patching/source.py:lineno": "of a syntax tree",
    "patching/source.py:module": "of a syntax tree",
    "patching/gate.py:value": "of a syntax tree",
    "server/stream_hold.py:value": "of an enumeration",
    "server/surface_sections.py:observer": "of the turn, ours or the change's",
    "pool/phantom.py:name": "queues of a scheduler, which have rows",
}
#: Attributes of ours on objects of oMLX.
_MARK = ("_ATTRIBUTE", "_GONE", "_self_wrapper")


def guarded(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of all that one file reads by ``getattr``, or out of a ``__dict__``."""
    tree = ast.parse(path.read_text("utf-8"))
    held = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_dict(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name: ast.expr | None = None
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            holder = node.func.value
            if _is_dict(holder) or (isinstance(holder, ast.Name) and holder.id in held):
                name = node.args[0]
        if name is not None:
            read = str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)
            if not read.startswith("__") and read not in _MARK:
                yield node.lineno, read


def _is_dict(node: ast.expr) -> bool:
    return "__dict__" in ast.unparse(node) or (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "vars"
    )


def unstated(path: Path) -> set[str]:
    members = {name.rpartition(".")[2] for name in NEEDED}
    return {
        f"{_place(path)}:{line}: {name}"
        for line, name in guarded(path)
        if name not in members and f"{_place(path)}:{name}" not in NOT_THEIRS
    }


@pytest.mark.parametrize("path", FILES, ids=_place)
def test_what_a_hook_may_find_missing_is_needed_too(path: Path) -> None:
    assert unstated(path) == set()


@pytest.mark.parametrize("path", FILES, ids=_place)
def test_what_a_hook_imports_from_omlx_is_needed(path: Path) -> None:
    needed = {(need.module, need.name.partition(".")[0]) for need in NEEDED.values()}
    found = {
        f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("omlx.")
        for alias in node.names
        if (node.module, alias.name) not in needed
        # A module, whose names are looked at above.
        and f"{node.module}.{alias.name}" not in {module for module, _ in needed}
    }
    # The gate has read it, or nothing is applied at all.
    assert found <= {"omlx._version:__version__"}


def test_a_read_that_nobody_states_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text(
        "def f(pool, entry):\n"
        "    pool._lock, pool._next_lock, getattr(pool, '_third', None)\n"
        "    pool._entries[1].in_use = entry.hits = getattr(pool, '_fourth')\n"
    )
    assert missing(path) == {
        "new.py:2: pool._next_lock",
        "new.py:2: pool._third",
        "new.py:3: entry.hits",
        "new.py:3: pool._fourth",
    }


def test_a_guarded_read_that_nobody_states_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text(
        "def f(pool, entry, name):\n"
        "    getattr(pool, '_lock', None), getattr(entry, 'hits', 0), hasattr(pool, '_third')\n"
        "    vars(pool).get('_fourth'), getattr(pool, name, None)\n"
        "    fields = getattr(pool, '__dict__', None)\n"
        "    fields.get('_fifth'), {}.get('sixth')\n"
    )
    assert unstated(path) == {
        "new.py:2: hits",
        "new.py:2: _third",
        "new.py:3: _fourth",
        "new.py:3: name",
        "new.py:5: _fifth",
    }


def test_the_list_of_exceptions_holds_nothing_else() -> None:
    """What is allowed for no reason any more goes."""
    named = {f"{_place(path)}:{name}" for path in FILES for _, name in guarded(path)}
    assert {place for place in NOT_THEIRS if place not in named} == set()
    seen = {f"{base}.{name}" for path in FILES for _, base, name, _ in reads(path)}
    assert {name for name in ALLOWED if name not in seen} == set()
