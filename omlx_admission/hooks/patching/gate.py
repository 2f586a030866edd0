"""What each hook needs of oMLX, and whether this oMLX has it.

The check reads oMLX's *source* and imports nothing, so ``doctor`` can run it on
any checkout, and a feature that spans two modules is decided before the first
of them is imported. Unknown means no: a missing file, an unreadable version, a
renamed method or a changed parameter turns the feature off and leaves oMLX
stock.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from omlx_admission.hooks.patching import bodies
from omlx_admission.hooks.patching.moved import Search
from omlx_admission.hooks.patching.needs import Kind, Need, read_if_there
from omlx_admission.hooks.patching.source import Function, Module

__all__ = [
    "SUPPORTED",
    "Found",
    "Kind",
    "Need",
    "NoOmlx",
    "Source",
    "find",
    "read_if_there",
    "version_problem",
]

#: Releases whose code was read (0.5.0 to 0.6.3rc2) or whose text is known in
#: part (0.7.x). Prereleases count: many people run them.
SUPPORTED = SpecifierSet(">=0.5.0,<0.8")

#: What stands in the way of a file's source.
_UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError, SystemError)


@dataclass(frozen=True)
class Found:
    """The oMLX that was found: its folder and release (None: not readable)."""

    root: Path
    version: str | None

    def module_path(self, module: str) -> Path:
        """File of a dotted module below this oMLX, existing or not."""
        base = self.root.joinpath(*module.split(".")[1:])
        package = base / "__init__.py"
        return package if package.exists() else base.with_suffix(".py")


class NoOmlx(Exception):
    """There is no oMLX where it was looked for; the text says where."""


def find(source: Path | None = None) -> Found:
    """Find oMLX in ``source`` (a checkout or the package folder) or in this Python.

    Raises:
        NoOmlx: nothing readable there.
    """
    if source is None:
        spec = importlib.util.find_spec("omlx")
        if spec is None or not spec.submodule_search_locations:
            raise NoOmlx("no module named 'omlx' in this Python")
        root = Path(next(iter(spec.submodule_search_locations)))
    else:
        root = source / "omlx" if (source / "omlx").is_dir() else source
        # Either of two: a release that has moved its pool is an oMLX still.
        if not any((root / name).is_file() for name in ("engine_pool.py", "_version.py")):
            raise NoOmlx(
                f"{source} holds no oMLX: expected omlx/engine_pool.py or engine_pool.py in it"
            )
    return Found(root, _read_version(root))


def _read_version(root: Path) -> str | None:
    """The release as ``_version.py`` gives it in plain text; None where it computes it."""
    try:
        node = _module((root / "_version.py").read_bytes()).node("__version__")
    except _UNREADABLE:
        return None
    value = getattr(node, "value", None)
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    return None


def version_problem(version: str | None) -> str | None:
    """Why this release is not supported, or None when it is."""
    if version is None:
        return "the oMLX release could not be read from omlx/_version.py"
    try:
        parsed = Version(version)
    except InvalidVersion:
        return f"oMLX release {version!r} is not a version number"
    # `contains` with prereleases=True still keeps 0.8.0rc1 out of "<0.8".
    if not SUPPORTED.contains(parsed, prereleases=True):
        return f"oMLX {version} is outside the supported range {SUPPORTED}"
    return None


def _module(source: bytes) -> Module:
    """Read a source; once more where another thread was in the way.

    Pythons 3.11.4 to 3.11.7, 3.12.0 and 3.12.1 count how deep a syntax tree is in one place
    for all threads: of two that parse at once, one gets a SystemError.
    """
    for _ in range(10):
        try:
            return Module(source)
        except SystemError:
            continue
    return Module(source)


class Fit(enum.Enum):
    """How a need fares on one oMLX."""

    FITS = "fits"
    CHANGED = "changed"
    MISSING = "missing"
    MOVED = "moved"  # not where it was, and another module has the name


class Source:
    """The modules of one oMLX, each read once."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._modules: dict[str, Module | str] = {}
        self._answers: dict[Need, str | None] = {}
        self._search = Search(found.root)

    def problem(self, need: Need) -> str | None:
        """Why ``need`` is not met, or None when it is."""
        # Features share most of their needs.
        if need not in self._answers:
            self._answers[need] = self._judge(need)
        return self._answers[need]

    def _judge(self, need: Need) -> str | None:
        if need.optional and need.kind is Kind.NAME:
            return None
        module = self.module(need.module)
        if isinstance(module, str):
            return None if need.optional else module
        problem = module.problem(need)
        if problem is None and need.run and not self.was_run(str(need)):
            return f"{need} has a body that was never run with this package"
        return problem

    def fingerprint(self, name: str) -> str | None:
        """That of a function, ``module:name``; None where it is not surely one."""
        place, _, function = name.partition(":")
        module = self.module(place)
        node = None if isinstance(module, str) else module.node(function)
        return bodies.fingerprint(node) if isinstance(node, Function) else None

    def was_run(self, name: str) -> bool:
        """Whether the body of a function, ``module:name``, is one of the table's."""
        return self.fingerprint(name) in bodies.known().get(name, {})

    def never_run(self) -> list[str]:
        """Functions of the table that this oMLX has with a body that was never run."""
        return [n for n in bodies.known() if self.fingerprint(n) and not self.was_run(n)]

    def problems(self, needs: Iterable[Need]) -> list[str]:
        """All reasons in order, and where the name is now; empty when every need is met."""
        reasons = [
            text + self._hint(need)
            for need in needs
            if (text := self.problem(need)) is not None
        ]
        # A class that is gone is one reason, not one for each of its members.
        return list(dict.fromkeys(reasons))

    def fit(self, need: Need) -> tuple[Fit, str]:
        """How ``need`` fares, and why where it is not met."""
        problem = self.problem(need)
        if problem is None:
            return Fit.FITS, ""
        hint = self._hint(need)
        if hint:
            return Fit.MOVED, problem + hint
        return Fit.MISSING if problem.endswith("is missing") else Fit.CHANGED, problem

    def has(self, needs: Sequence[Need]) -> bool:
        """Whether all of ``needs`` are met; an empty sequence never is."""
        return bool(needs) and all(self.problem(need) is None for need in needs)

    def is_there(self, need: Need) -> bool:
        """Whether this oMLX may have the name of a row that can do without it."""
        module = self.module(need.module)
        return not isinstance(module, str) and module.has(need.name)

    def read(self, module: str) -> bytes:
        """The source of a dotted module; raises OSError where there is none."""
        return self._found.module_path(module).read_bytes()

    def module(self, name: str) -> Module | str:
        """A dotted module, or why it cannot be read."""
        if name not in self._modules:
            try:
                self._modules[name] = _module(self.read(name))
            except OSError:
                self._modules[name] = f"{name} is missing"
            except _UNREADABLE:
                self._modules[name] = f"{name} cannot be parsed"
        return self._modules[name]

    def _hint(self, need: Need) -> str:
        # Jobs are of the module that hands them over, not of the executor's.
        if need.kind is Kind.JOBS:
            return ""
        return self._search.hint(need.module, need.name)
