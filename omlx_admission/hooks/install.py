"""Decide once, apply as oMLX's modules are imported, undo, and say what happened."""

from __future__ import annotations

import enum
import gc
import logging
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wrapt

from omlx_admission import settings as settings_module
from omlx_admission.hooks.features import FEATURES, MODULES, PARTS, Feature
from omlx_admission.hooks.gpu import process as gpu_process
from omlx_admission.hooks.gpu import setting as gpu_setting
from omlx_admission.hooks.gpu import sites as gpu_sites
from omlx_admission.hooks.patching import gate
from omlx_admission.hooks.patching.ledger import Change, Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.observation import observe
from omlx_admission.settings import Settings

logger = logging.getLogger("omlx.admission")

#: The last of oMLX's modules that a server imports.
LAST = "omlx.server"


class State(enum.Enum):
    """What became of a feature."""

    APPLIED = "applied"
    READY = "ready"  # fits; its modules are not imported in this process
    NATIVE = "native"  # oMLX does it itself
    OFF = "off"  # switched off by its variable
    REFUSED = "refused"  # this oMLX lacks something it needs
    FAILED = "failed"  # applying it raised; undone


@dataclass
class Verdict:
    """One feature: its state, the reasons, and what is wrapped for it."""

    feature: Feature
    state: State
    reasons: list[str] = field(default_factory=list)
    wrapped: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The whole decision for one oMLX."""

    found: gate.Found | None
    problem: str | None
    verdicts: list[Verdict]
    settings: Settings
    setting_problems: list[str]
    #: Where this oMLX submits GPU work. Found with the rest, from the sources that are
    #: open then: a Python of 3.11 or 3.12 may fail to parse beside another thread that
    #: parses, so nothing is parsed while a server works.
    sites: list[gpu_sites.Site] = field(default_factory=list)

    def verdict(self, feature: str) -> Verdict:
        """The verdict on one feature by name."""
        return next(v for v in self.verdicts if v.feature.name == feature)


def decide(source: Path | None = None, settings: Settings | None = None) -> Report:
    """Decide for the oMLX in ``source`` (or in this Python); imports and changes nothing."""
    problems: list[str] = []
    if settings is None:
        settings, problems = settings_module.load()
        settings = gpu_setting.with_file(settings, problems)
    try:
        found = gate.find(source)
    except gate.NoOmlx as error:
        verdicts = [Verdict(f, State.REFUSED, [str(error)]) for f in FEATURES]
        return Report(None, str(error), verdicts, settings, problems)
    problem = gate.version_problem(found.version)
    with _no_collection():
        code = gate.Source(found)
        verdicts = [_verdict(f, settings, problem, code) for f in FEATURES]
        sites = gpu_sites.present(code) if settings.enabled and problem is None else []
    states = {v.feature.name: v.state for v in verdicts}
    for verdict in verdicts:
        if verdict.state is State.READY:
            _apply_dependencies(verdict, states)
            states[verdict.feature.name] = verdict.state
    return Report(found, problem, verdicts, settings, problems, sites)


def _apply_dependencies(verdict: Verdict, states: dict[str, State]) -> None:
    """A feature that none of the required ones is there for could do nothing: say why."""
    required = [feature.name for feature in verdict.feature.requires_any]
    if not required or any(states[name] is State.READY for name in required):
        every = [feature.name for feature in verdict.feature.requires_all]
        required = [name for name in every if states[name] is not State.READY]
        if not required:
            return
    refused = any(states[name] is State.REFUSED for name in required)
    verdict.state = State.REFUSED if refused else State.OFF
    named = " or ".join(f"our '{name}' ({states[name].value})" for name in required)
    verdict.reasons = [f"needs {named}"]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Syntax trees have no cycles and very many nodes: looking through them for garbage
    took half of the time that a server's start spends on the decision."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _verdict(
    feature: Feature, settings: Settings, problem: str | None, code: gate.Source
) -> Verdict:
    if not settings.enabled:
        return Verdict(feature, State.OFF, ["OMLX_ADMISSION=0"])
    if not getattr(settings, feature.field):
        # A dotted name is a key of oMLX's settings file.
        off = " is not set" if "." in feature.variable else "=0"
        return Verdict(feature, State.OFF, [feature.variable + off])
    if problem is not None:
        return Verdict(feature, State.REFUSED, [problem])
    if code.has(feature.native):
        return Verdict(feature, State.NATIVE, ["this oMLX does it itself"])
    missing = code.problems(feature.needs)
    if missing:
        return Verdict(feature, State.REFUSED, missing)
    return Verdict(feature, State.READY)


class Installer:
    """Applies one report in this process. Thread-safe; imports may run in any thread."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._lock = threading.RLock()
        self._applied_modules: set[str] = set()
        self._ledger = Ledger()
        names = frozenset(v.feature.name for v in report.verdicts if v.state is State.READY)
        self._wanted = Wanted(report.settings, names)
        self._missing_parts = {
            name: [p.module for p in PARTS if p.feature == name and not p.optional]
            for name in names
        }

    def on_import(self, module: Any) -> None:
        """Apply all parts that belong to ``module``; never raises but for STRICT."""
        with self._lock:
            if module.__name__ in self._applied_modules:
                return
            self._applied_modules.add(module.__name__)
            for part in PARTS:
                if part.module == module.__name__:
                    self._apply(part, module)
        self._strict()
        if module.__name__ == LAST:
            self._log_active()

    def _log_active(self) -> None:
        """One line in the server's own log, which is set up by now."""
        applied = [v.feature.name for v in self.report.verdicts if v.state is State.APPLIED]
        found = self.report.found
        if applied and found is not None:
            logger.info("admission: active on oMLX %s: %s", found.version, ", ".join(applied))

    def _apply(self, part: Part, module: Any) -> None:
        name = part.feature
        verdict = self.report.verdict(name)
        if verdict.state not in (State.READY, State.APPLIED):
            return
        mark = self._ledger.begin(name)
        try:
            part.apply(module, self._ledger, self._wanted)
            verdict.wrapped += self._ledger.wrapped(mark)
        except Exception as error:
            if part.optional:
                # The last layer of all comes off alone, and nothing else needs it.
                self._ledger.undo(mark)
                logger.exception(
                    "admission: '%s' goes without its part in %s", name, part.module
                )
                verdict.reasons.append(f"goes without its part in {part.module}")
                return
            logger.exception("admission: applying '%s' failed; oMLX runs stock", name)
            # The wrappers lie round each other: a feature cannot be taken out of
            # the middle, and half a stack is what no test has ever run.
            self.undo(f"applying '{name}' raised {_describe(error)}")
            return
        if not part.optional:
            self._missing_parts[name].remove(part.module)
        if not self._missing_parts[name]:
            verdict.state = State.APPLIED

    @property
    def changes(self) -> list[Change]:
        """What is changed in oMLX now, in the order of application."""
        return self._ledger.changes

    def undo(self, reason: str = "undone") -> None:
        """Put oMLX back as it was, all features."""
        with self._lock:
            self._ledger.undo()
            switches.reset()
            observe.observer.reset()
            gpu_process.process.reset()
            for verdict in self.report.verdicts:
                if verdict.state in (State.APPLIED, State.READY):
                    verdict.state = State.FAILED
                    verdict.reasons = [reason]
                    verdict.wrapped = []

    def _strict(self) -> None:
        if not self.report.settings.strict:
            return
        reasons = list(self.report.setting_problems)
        for verdict in self.report.verdicts:
            if verdict.state in (State.REFUSED, State.FAILED):
                reasons.append(f"{verdict.feature.name}: {'; '.join(verdict.reasons)}")
        if reasons:
            sys.exit("omlx-admission: OMLX_ADMISSION_STRICT=1 and " + "; ".join(reasons))


def _describe(error: Exception) -> str:
    """The error in a line. Of a module whose import hooks run, Python says that it is
    imported in a circle whenever it lacks a name."""
    holder = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(holder, types.ModuleType):
        return f"AttributeError: {holder.__name__} has no {error.name}"
    return repr(error)


_installer: Installer | None = None


def register() -> None:
    """Decide for the oMLX of this Python and hook the import of its modules.

    Called by the ``.pth`` line's finder when ``omlx`` is about to be imported.
    """
    global _installer
    if _installer is not None:
        return
    report = decide()
    _installer = installer = Installer(report)
    _announce(report)

    def hook(module: Any) -> None:
        installer.on_import(module)

    for name in MODULES:
        wrapt.register_post_import_hook(hook, name)


def current() -> Report | None:
    """What was decided in this process, None before ``omlx`` was imported."""
    return _installer.report if _installer is not None else None


def changes() -> list[Change]:
    """What is changed in oMLX in this process, in the order of application."""
    return _installer.changes if _installer is not None else []


def undo() -> None:
    """Undo everything in this process."""
    if _installer is not None:
        _installer.undo()


def _announce(report: Report) -> None:
    """One line for what is wrong; nothing where all is well (the server logs later)."""
    for line in _lines(report):
        logger.warning("admission: %s", line)


def _lines(report: Report) -> Iterable[str]:
    yield from report.setting_problems
    if report.problem is not None:
        yield f"not active, oMLX runs stock: {report.problem}"
        return
    refused = [v for v in report.verdicts if v.state is State.REFUSED]
    if refused:
        # Features share needs: one changed name is one line, not one a feature.
        names = ", ".join(v.feature.name for v in refused)
        reasons = "; ".join(dict.fromkeys(r for v in refused for r in v.reasons))
        yield f"off, oMLX runs stock there: {names}: {reasons}"
