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
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: Releases whose code was read (0.5.0 to 0.6.3rc2) or whose text is known in
#: part (0.7.x). Prereleases count: many people run them.
SUPPORTED = SpecifierSet(">=0.5.0,<0.8")


class Kind(enum.Enum):
    """What a name must be in oMLX's source."""

    SYNC = "function"
    ASYNC = "coroutine function"
    CLASS = "class"
    VALUE = "module or class attribute"


@dataclass(frozen=True)
class Need:
    """One name that a hook relies on.

    ``params`` are the leading parameter names in order, ``self`` left out;
    None means that the hook passes whatever there is. With ``exact`` nothing
    may follow them; otherwise further parameters are fine as long as they have
    defaults, because wrappers pass them through. With ``awaits`` its body awaits
    nothing but calls of functions with these names.
    """

    module: str
    name: str
    kind: Kind
    params: tuple[str, ...] | None = None
    exact: bool = False
    awaits: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


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
        if not (root / "engine_pool.py").is_file():
            raise NoOmlx(
                f"{source} holds no oMLX: expected omlx/engine_pool.py or engine_pool.py in it"
            )
    return Found(root, _read_version(root))


def _read_version(root: Path) -> str | None:
    try:
        text = (root / "_version.py").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^__version__\s*(?::[^=]+)?=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
    return match.group(1) if match else None


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


class Source:
    """Parsed modules of one oMLX, each read once."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._trees: dict[str, ast.Module | str] = {}

    def problem(self, need: Need) -> str | None:
        """Why ``need`` is not met, or None when it is."""
        tree = self._tree(need.module)
        if isinstance(tree, str):
            return tree
        node = _lookup(tree, need.name.split("."))
        if node is None:
            return f"{need} is missing"
        return _shape_problem(need, node)

    def problems(self, needs: Iterable[Need]) -> list[str]:
        """All reasons, in order; empty when every need is met."""
        return [text for need in needs if (text := self.problem(need)) is not None]

    def has(self, needs: Sequence[Need]) -> bool:
        """Whether all of ``needs`` are met; an empty sequence never is."""
        return bool(needs) and not self.problems(needs)

    def read(self, module: str) -> bytes:
        """The source of a dotted module; raises OSError where there is none."""
        return self._found.module_path(module).read_bytes()

    def _tree(self, module: str) -> ast.Module | str:
        if module not in self._trees:
            try:
                self._trees[module] = ast.parse(self.read(module))
            except OSError:
                self._trees[module] = f"{module} is missing"
            except (SyntaxError, ValueError):
                self._trees[module] = f"{module} cannot be parsed"
        return self._trees[module]


def _lookup(tree: ast.AST, parts: Sequence[str]) -> ast.AST | None:
    """The last definition of a dotted name, as Python would leave it."""
    node: ast.AST | None = tree
    for part in parts:
        if node is None:
            return None
        node = _member(node, part)
    return node


def _member(node: ast.AST, name: str) -> ast.AST | None:
    found: ast.AST | None = None
    for child in _statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name == name:
                found = child
        elif isinstance(child, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in child.targets):
                found = child
        elif (
            isinstance(child, ast.AnnAssign)
            and isinstance(child.target, ast.Name)
            and child.target.id == name
        ):
            found = child
    if found is None and isinstance(node, ast.ClassDef):
        found = _set_in_init(node, name)
    return found


def _statements(node: ast.AST) -> list[ast.stmt]:
    body: list[ast.stmt] = getattr(node, "body", [])
    if not isinstance(body, list):
        return []
    flat: list[ast.stmt] = []
    for child in body:
        flat.append(child)
        # Definitions inside `if TYPE_CHECKING` or `try: import` at the same level.
        if isinstance(child, ast.If | ast.Try):
            flat.extend(_statements(child))
    return flat


def _set_in_init(node: ast.ClassDef, name: str) -> ast.AST | None:
    init = _member_function(node, "__init__")
    if init is None:
        return None
    for child in ast.walk(init):
        targets: list[ast.expr] = []
        if isinstance(child, ast.Assign):
            targets = child.targets
        elif isinstance(child, ast.AnnAssign):
            targets = [child.target]
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and target.attr == name
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                return child
    return None


def _member_function(node: ast.ClassDef, name: str) -> ast.AST | None:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
            return child
    return None


def _shape_problem(need: Need, node: ast.AST) -> str | None:
    actual = {
        ast.FunctionDef: Kind.SYNC,
        ast.AsyncFunctionDef: Kind.ASYNC,
        ast.ClassDef: Kind.CLASS,
    }.get(type(node), Kind.VALUE)
    if actual is not need.kind:
        return f"{need} is a {actual.value}, expected a {need.kind.value}"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if need.params is not None:
        problem = _parameter_problem(need, need.params, node)
        if problem is not None:
            return problem
    return None if need.awaits is None else _await_problem(need, need.awaits, node)


def _await_problem(need: Need, names: tuple[str, ...], node: ast.AST) -> str | None:
    for child in ast.walk(node):
        if isinstance(child, ast.AsyncFor | ast.AsyncWith):
            return f"{need} awaits in a loop or a with statement"
        if not isinstance(child, ast.Await):
            continue
        called = child.value.func if isinstance(child.value, ast.Call) else child.value
        name = getattr(called, "attr", getattr(called, "id", ast.unparse(called)))
        if name not in names:
            return f"{need} awaits {name}, expected only {', '.join(names)}"
    return None


def _parameter_problem(
    need: Need, params: tuple[str, ...], node: ast.FunctionDef | ast.AsyncFunctionDef
) -> str | None:
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    if positional[:1] in (["self"], ["cls"]):
        positional, required = positional[1:], required - 1
    keyword = [a.arg for a in arguments.kwonlyargs]
    known = (*positional, *keyword)
    if known[: len(params)] != params:
        return f"{need} takes ({', '.join(known)}), expected ({', '.join(params)})"
    if need.exact and (len(known) > len(params) or arguments.vararg or arguments.kwarg):
        return f"{need} takes more than ({', '.join(params)})"
    unknown_required = positional[len(params) : required] + [
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None and a.arg not in params
    ]
    if unknown_required:
        return f"{need} requires the unknown ({', '.join(unknown_required)})"
    return None
