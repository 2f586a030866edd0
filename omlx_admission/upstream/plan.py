"""What changes would do to a checkout: computed whole before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import libcst as cst

from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.patching import gate
from omlx_admission.upstream import style
from omlx_admission.upstream.change import Change, Edit, Refused

PACKAGE = "omlx"
TESTS = "tests"


class Tree:
    """The files of a checkout, with what has been planned for them laid over."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._new: dict[str, bytes] = {}

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, planned or on disk; None where there is none."""
        if path in self._new:
            return self._new[path]
        try:
            return (self.root / path).read_bytes()
        except OSError:
            return None

    def lay(self, files: dict[str, bytes]) -> None:
        """Take planned files for granted from now on."""
        self._new.update(files)

    def source(self) -> gate.Source:
        """The gate's eyes on this tree."""
        return _Source(self)


class _Source(gate.Source):
    """Reads modules from a :class:`Tree` instead of from disk."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(gate.Found(tree.root / PACKAGE, None))
        self._files = tree

    def read(self, module: str) -> bytes:
        """See :meth:`gate.Source.read`."""
        base = module.replace(".", "/")
        for path in (f"{base}/__init__.py", f"{base}.py"):
            content = self._files.read(path)
            if content is not None:
                return content
        raise OSError(module)


@dataclass
class Step:
    """One change on one tree: the files to write, or why there is nothing to do.

    Those of ``new`` are formatted as the checkout wants it when they are written.
    """

    change: Change
    files: dict[str, bytes] = field(default_factory=dict)
    already: bool = False
    new: frozenset[str] = frozenset()
    line_length: int = style.DEFAULT_LINE_LENGTH

    def formatted(self) -> dict[str, bytes]:
        """The files as they are to be written.

        Raises:
            SyntaxError: an edit has put together what is no Python.
        """
        files = {
            path: style.formatted(content.decode(), self.line_length).encode()
            if path in self.new
            else content
            for path, content in self.files.items()
        }
        for path, content in files.items():
            compile(content, path, "exec")
        return files


def plan(root: Path, changes: Sequence[Change]) -> list[Step]:
    """Plan ``changes`` one on top of the other.

    Raises:
        Refused: one of them cannot be made; the text names it and says why.
    """
    tree = Tree(root)
    token = style.line_length.set(style.of_checkout(root))
    try:
        steps = []
        for change in changes:
            try:
                step = _step(tree, change)
            except Refused as error:
                raise type(error)(f"{change.name}: {error}") from None
            tree.lay(step.files)
            steps.append(step)
        return steps
    finally:
        style.line_length.reset(token)


def is_in(tree: Tree, change: Change) -> bool:
    """Whether the tree does already what ``change`` brings, by it or by itself."""
    source = tree.source()
    native = [need for f in FEATURES if f.name in change.features for need in f.native]
    return source.has([*native, *change.native])


# Pure, and asked again for the same: once to say what fits, once to make it.
@cache
def _edited(edit: Edit, content: bytes, _line_length: int) -> bytes:
    module = edit(_parsed(content))
    edited = module.bytes
    _modules[edited] = module
    return edited


def _parsed(content: bytes) -> cst.Module:
    if content not in _modules:
        try:
            _modules[content] = cst.parse_module(content)
        except cst.ParserSyntaxError:
            raise Refused("it cannot be parsed") from None
    return _modules[content]


#: Parsed once: a file of oMLX may have ten thousand lines, and several edits.
_modules: dict[bytes, cst.Module] = {}


def _step(tree: Tree, change: Change) -> Step:
    if is_in(tree, change):
        return Step(change, already=True)
    files: dict[str, bytes] = {}
    for path, make in change.modules.items():
        whole = f"{PACKAGE}/{path}"
        if tree.read(whole) is None:
            files[whole] = make().encode()
    new = set(files)
    edits = [(f"{PACKAGE}/{p}", e, p in change.optional) for p, e in change.edits.items()]
    edits += [(f"{TESTS}/{p}", e, True) for p, e in change.test_edits.items()]
    for whole, edit, optional in edits:
        content = tree.read(whole)
        if content is None and optional:
            continue
        if content is None:
            raise Refused(f"{whole} is missing")
        try:
            edited = _edited(edit, content, style.line_length.get())
        except Refused as error:
            raise type(error)(f"{whole}: {error}") from None
        if edited != content:
            files[whole] = edited
    for test in change.tests:
        whole = f"{TESTS}/{test.name}"
        if tree.read(whole) is not None:
            raise Refused(f"{whole} is there already")
        files[whole] = test.read_bytes()
        new.add(whole)
    tree.lay(files)
    if not is_in(tree, change):
        raise Refused("the edited code does not hold what the change promises")
    return Step(change, files, new=frozenset(new), line_length=style.line_length.get())
