"""The hooks applied to mutated modules, in this process, beside the same modules as they are.

Every module of ``omlx`` is imported anew for each side, from the mutated checkout. The
pool then serves fake engines: load, hand out, release, swap, refuse, unload, shut down.
With the hooks it has to do what it does without them. An own fault that a wrapper had to
swallow counts as one: it is what the gate is there to prevent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import importlib.machinery
import json
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from benchmarks.mutations.model import Mutation
from omlx_admission.hooks import faults, install, pool_port, resident
from omlx_admission.hooks.features import MODULES
from omlx_admission.hooks.install import State

#: Bytes; the ceiling is 1000.
SIZES = {"a": 600, "b": 600, "d": 300, "x": 1200}
_STEP_S = 20.0
#: Seconds of this process's own computing that a whole story may take; most take a tenth.
_STORY_CPU_S = 3.0


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file that no mutation touched once for all of them."""

    known: ClassVar[dict[str, types.CodeType]] = {}

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        if os.path.islink(path) and path in self.known:
            return self.known[path]
        code: types.CodeType = compile(self.get_data(path), path, "exec", dont_inherit=True)
        if os.path.islink(path):
            self.known[path] = code
        return code


class _Finder:
    """Finds ``omlx`` in one folder, before anybody else does."""

    def __init__(self, source: Path) -> None:
        self._source = str(source)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: object = None
    ) -> Any:
        if name.partition(".")[0] != "omlx":
            return None
        for folder in path or [self._source]:
            finder = importlib.machinery.FileFinder(folder, (_Loader, [".py"]))
            spec = finder.find_spec(name)
            if spec is not None:
                return spec
        return None


@contextmanager
def imported_from(source: Path) -> Iterator[None]:
    """Within it, ``omlx`` is what ``source`` has; nothing of it is imported yet."""
    kept = _forget()
    finder = _Finder(source)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        _end_threads(_forget())
        sys.modules.update(kept)


def _forget() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "omlx"]
    # What the hooks keep of the classes that they have seen.
    pool_port._refused_class = None
    resident._vlm_engine = None
    faults._noted.clear()
    return {name: sys.modules.pop(name) for name in names}


def _end_threads(modules: dict[str, types.ModuleType]) -> None:
    """Each import brings an executor of its own, whose threads outlive the modules."""
    for module in modules.values():
        for value in vars(module).values():
            if isinstance(value, concurrent.futures.Executor):
                value.shutdown(wait=False)


def modules_for(mutation: Mutation) -> list[str]:
    """What to import: the pool, and what the mutation is about."""
    module = mutation.target.partition(":")[0]
    names = ["omlx.engine_pool"]
    if module in ("omlx.server", "omlx.exceptions"):
        names.append("omlx.server")
    elif module not in ("omlx._version", *names):
        names.append(module)
    return names


class _Engine:
    """A fake engine: no weights, no requests."""

    scheduler = _engine = None

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events
        self.tokenizer = types.SimpleNamespace(encode=lambda text: [])

    def has_active_requests(self) -> bool:
        return False

    async def start(self) -> None:
        self._events.append(f"load {self.name}")

    async def stop(self) -> None:
        self._events.append(f"unload {self.name}")

    async def abort_all_requests(self) -> int:
        return 0


def models(folder: Path) -> Path:
    """Folders of models whose files say how large they are."""
    for name, size in SIZES.items():
        place = folder / name
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (place / "model.safetensors").write_bytes(b"0" * size)
    return folder


class _Endless(BaseException):
    """A mutated oMLX computes for ever, and never comes to an await."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise `_Endless` where the body computes too long (only a main thread can)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Endless(f"more than {_STORY_CPU_S:.0f} s of computing")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again: raised in a finalizer, it is swallowed.
    signal.setitimer(signal.ITIMER_VIRTUAL, _STORY_CPU_S, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def pool_story(module: Any, folder: Path) -> list[str]:
    """What one pool does, step by step."""
    events: list[str] = []

    def engine(*args: Any, **keywords: Any) -> _Engine:
        path = keywords.get("model_name") or keywords.get("model_path") or args[0]
        return _Engine(Path(str(path)).name, events)

    async def step(what: str, call: Callable[[], Any]) -> None:
        try:
            result = call()
            if hasattr(result, "__await__"):
                result = await asyncio.wait_for(result, _STEP_S)
            said = getattr(result, "name", None) or type(result).__name__
        except Exception as error:  # noqa: BLE001 - it is what is compared
            said = type(error).__name__
        events.append(f"{what}: {said}")

    async def story() -> None:
        kind = getattr(module, "EnginePool", None) or module.EnginePoolV2
        pool = kind()
        pool._get_final_ceiling = lambda: 1000

        def now(name: str) -> Any:
            """A method by its name, or by the one that a rename gave it."""
            return getattr(pool, name, None) or getattr(pool, f"{name}_v2")

        now("discover_models")([str(folder)], [])
        for name, size in SIZES.items():
            pool._entries[name].estimated_size = size

        get, release = now("get_engine"), now("release_engine")
        # First, because stock evicts what is idle before it sees that x never fits.
        await step("x never fits", lambda: get("x"))
        await step("a leased", lambda: get("a", _lease=True))
        await step("a again", lambda: get("a", _lease=True))
        await step("a by position", lambda: get("a", False, False, None))
        await step("a given back", lambda: release("a"))
        await step("a given back", lambda: release(model_id="a"))
        await step("d beside it", lambda: get("d", _lease=True))
        await step("d given back", lambda: release("d"))
        await step("b in their place", lambda: get("b"))
        await step("nobody", lambda: get("nobody"))
        await step("b still", lambda: get("b"))
        await step("b unloaded", lambda: now("_unload_engine")("b"))
        await step("a once more", lambda: get(model_id="a", _lease=True))
        await step("victim", lambda: now("_find_lru_victim")())
        await step("a given back", lambda: release("a"))
        await step("the end", lambda: now("shutdown")())
        held = {m: e.in_use for m, e in pool._entries.items() if e.in_use}
        loaded = [m for m, e in pool._entries.items() if e.engine is not None]
        events.append(f"held {held}, loaded {loaded}, counted {pool._current_model_memory}")

    with ExitStack() as stack:
        for name, value in (("BatchedEngine", engine), ("get_phys_footprint", lambda: 0)):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))
        try:
            with _bounded():
                asyncio.run(story())
        except (Exception, _Endless) as error:  # noqa: BLE001 - it is what is compared
            events.append(f"broke off: {type(error).__name__}: {error}")
    return events


def server_story(module: Any) -> list[str]:
    """What the application answers without having started."""
    import httpx

    async def ask() -> list[str]:
        transport = httpx.ASGITransport(app=module.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://omlx") as client:
            answers = [(path, await client.get(path)) for path in ("/health", "/v1/models")]
        return [f"{path} {answer.status_code}" for path, answer in answers]

    try:
        return asyncio.run(asyncio.wait_for(ask(), _STEP_S))
    except Exception as error:  # noqa: BLE001 - it is what is compared
        return [f"no answer: {type(error).__name__}: {error}"]


def _side(
    source: Path, mutation: Mutation, folder: Path, report: install.Report | None
) -> list[str]:
    """One side: the modules imported, the hooks applied if there is a report, the stories."""
    events: list[str] = []
    with imported_from(source):
        for name in modules_for(mutation):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - it is what is compared
                events.append(f"import {name}: {type(error).__name__}: {error}")
        loaded = [sys.modules[name] for name in MODULES if name in sys.modules]
        installer = install.Installer(report) if report is not None else None
        try:
            if installer is not None:
                for module in loaded:
                    installer.on_import(module)
            if "omlx.engine_pool" in sys.modules:
                events += pool_story(sys.modules["omlx.engine_pool"], folder)
            if "omlx.server" in sys.modules:
                events += server_story(sys.modules["omlx.server"])
            if report is not None:
                events += [f"fault: {text}" for text in _strays(report)]
        finally:
            if installer is not None:
                installer.undo()
    return events


def _strays(report: install.Report) -> list[str]:
    """Features that failed, and wrappers of features that were not to be applied."""
    found = [
        f"{v.feature.name} failed: {'; '.join(v.reasons)}"
        for v in report.verdicts
        if v.state is State.FAILED
    ]
    allowed = {
        name.rpartition(":")[2]
        for v in report.verdicts
        if v.state in (State.APPLIED, State.READY)
        for name in v.wrapped
    }
    for name in MODULES:
        module = sys.modules.get(name)
        if module is None or not name.startswith("omlx"):
            continue
        for label, holder in [("", module), *vars(module).items()]:
            if label and not (isinstance(holder, type) and holder.__module__ == name):
                continue
            for key, value in list(vars(holder).items()):
                dotted = f"{label}.{key}" if label else key
                if hasattr(value, "_self_wrapper") and dotted not in allowed:
                    found.append(f"{name}:{dotted} is wrapped for no feature")
    return found


def _is_broken(stock: list[str]) -> bool:
    """Whether the mutation has left an oMLX that does not work by itself."""
    marks = ("import ", "broke off", "no answer")
    errors = ("AttributeError", "TypeError", "NameError", "UnboundLocalError", "RuntimeError")
    return any(
        event.startswith(marks) or event.endswith((*errors, "ModelUnavailableError"))
        for event in stock
    )


class _Listener(logging.Handler):
    """Keeps what the package logs as its own fault."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(f"{record.getMessage()}: {error!r}")


def compare(
    source: Path, mutation: Mutation, report: install.Report, folder: Path
) -> list[str]:
    """What the hooks did wrong on the mutated modules; empty where nothing."""
    listener = _Listener()
    logger = logging.getLogger("omlx.admission")
    stock = _side(source, mutation, folder, None)
    logger.addHandler(listener)
    try:
        patched = _side(source, mutation, folder, report)
    finally:
        logger.removeHandler(listener)
    wrong = [f"own fault: {text}" for text in listener.texts]
    wrong += [event for event in patched if event.startswith("fault: ")]
    patched = [event for event in patched if not event.startswith("fault: ")]
    if _is_broken(stock):
        # Nobody can say what is right there; it has to come to its end, that is all.
        return [e for e in patched if e.startswith("broke off") and e not in stock]
    if stock != patched:
        pairs = [(s, p) for s, p in zip(stock, patched, strict=False) if s != p]
        first = pairs[0] if pairs else (len(stock), len(patched))
        wrong.append(f"with the hooks {first[1]!r}, without {first[0]!r}")
    return wrong


@contextmanager
def quiet() -> Iterator[None]:
    """Fake memory, no collector runs and no log lines of oMLX's, for the whole suite."""
    import mlx.core as mx

    # The libraries that every side shares.
    for name in ("fastapi", "httpx", "uvicorn"):
        importlib.import_module(name)
    level = logging.root.manager.disable
    omlx = logging.getLogger("omlx")
    was = omlx.level, omlx.propagate
    omlx.propagate = False
    omlx.addHandler(null := logging.NullHandler())
    with (
        mock.patch("gc.collect", return_value=0),
        mock.patch.object(mx, "get_active_memory", return_value=0),
    ):
        try:
            yield
        finally:
            omlx.removeHandler(null)
            omlx.level, omlx.propagate = was
            logging.disable(level)
