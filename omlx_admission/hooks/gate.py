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

from omlx_admission.hooks.needs import Kind, Need
from omlx_admission.hooks.source_jobs import jobs_problem
from omlx_admission.hooks.source_names import names_read, owners, resolve
from omlx_admission.hooks.source_search import Search
from omlx_admission.hooks.source_shapes import holder_problem, shape_problem

__all__ = ["SUPPORTED", "Found", "Kind", "Need", "NoOmlx", "Source", "find", "version_problem"]

#: Releases whose code was read (0.5.0 to 0.6.3rc2) or whose text is known in
#: part (0.7.x). Prereleases count: many people run them.
SUPPORTED = SpecifierSet(">=0.5.0,<0.8")


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
        tree = parse((root / "_version.py").read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    meanings = resolve(tree, "__version__")
    value = getattr(meanings[0], "value", None) if len(meanings) == 1 else None
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


class Fit(enum.Enum):
    """How a need fares on one oMLX."""

    FITS = "fits"
    CHANGED = "changed"
    MISSING = "missing"
    MOVED = "moved"  # not where it was, and another module has the name


class Source:
    """Parsed modules of one oMLX, each read once."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._trees: dict[str, ast.Module | str] = {}
        self._read: dict[str, frozenset[str]] = {}
        self._answers: dict[Need, str | None] = {}
        self._search = Search(found.root)

    def problem(self, need: Need) -> str | None:
        """Why ``need`` is not met, or None when it is."""
        # Features share most of their needs.
        if need not in self._answers:
            self._answers[need] = self._judge(need)
        return self._answers[need]

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

    def _hint(self, need: Need) -> str:
        # Jobs are of the module that hands them over, not of the executor's.
        if need.kind is Kind.JOBS:
            return ""
        return self._search.hint(need.module, need.name)

    def has(self, needs: Sequence[Need]) -> bool:
        """Whether all of ``needs`` are met; an empty sequence never is."""
        return bool(needs) and all(self.problem(need) is None for need in needs)

    def _judge(self, need: Need) -> str | None:
        if need.where and not self._is_there(need.where):
            return None
        tree = self._tree(need.module)
        if isinstance(tree, str):
            return None if need.optional else tree
        if need.kind is Kind.USED:
            return self._used_problem(need, tree)
        if need.kind is Kind.JOBS:
            return jobs_problem(need, tree)
        meanings = resolve(tree, need.name)
        if all(node is None for node in meanings):
            return self._unseen(need, tree) if need.optional else self._missing(need, tree)
        for owner in owners(tree, need.name):
            problem = holder_problem(need, owner)
            if problem is not None:
                return problem
        for node in meanings:
            if node is None:
                if not need.optional:
                    return f"{need} is there only under a condition"
                continue
            problem = shape_problem(need, node)
            if problem is not None:
                return problem
        return None

    def _is_there(self, place: str) -> bool:
        module, _, name = place.partition(":")
        tree = self._tree(module)
        return not isinstance(tree, str) and any(resolve(tree, name))

    @staticmethod
    def _unseen(need: Need, tree: ast.Module) -> str | None:
        """Why an optional member that is not seen may be there all the same.

        A class that is made elsewhere may have it, in whatever shape.
        """
        head, _, member = need.name.partition(".")
        made = [node for node in resolve(tree, head) if node is not None]
        if not member or not made:
            return None
        classes = [node for node in made if isinstance(node, ast.ClassDef)]
        if classes:
            problems = (holder_problem(need, node) for node in classes)
            return next((text for text in problems if text is not None), None)
        return f"{need}: {head} is not defined in {need.module}, so nobody can tell"

    def _used_problem(self, need: Need, tree: ast.Module) -> str | None:
        if need.module not in self._read:
            self._read[need.module] = names_read(tree)
        if need.name in self._read[need.module]:
            return None
        return f"{need.module} does not use {need.name}"

    @staticmethod
    def _missing(need: Need, tree: ast.Module) -> str:
        head, _, rest = need.name.partition(".")
        if rest and not any(isinstance(n, ast.ClassDef) for n in resolve(tree, head)):
            return f"{need.module}:{head} is missing"
        return f"{need} is missing"

    def read(self, module: str) -> bytes:
        """The source of a dotted module; raises OSError where there is none."""
        return self._found.module_path(module).read_bytes()

    def _tree(self, module: str) -> ast.Module | str:
        if module not in self._trees:
            try:
                self._trees[module] = parse(self.read(module))
            except OSError:
                self._trees[module] = f"{module} is missing"
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._trees[module] = f"{module} cannot be parsed"
        return self._trees[module]


def parse(source: bytes) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(source)
