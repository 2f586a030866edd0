"""What changes would do to a checkout: computed whole before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.patching import gate
from omlx_admission.hooks.patching.source import Module
from omlx_admission.upstream import style
from omlx_admission.upstream.change import Change, Edit, Refused
from omlx_admission.upstream.code import Code

PACKAGE = "omlx"
TESTS = "tests"


class Tree:
    """The files of a checkout, some of them laid over another tree; never changed."""

    def __init__(
        self,
        root: Path,
        files: Mapping[str, bytes] = MappingProxyType({}),
        below: Tree | None = None,
    ) -> None:
        self.root = root
        self.files = files
        self.below = below
        #: The gate's eyes on this tree.
        self.source = _Source(self)

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, planned or on disk; None where there is none."""
        if path in self.files:
            return self.files[path]
        if self.below is not None:
            return self.below.read(path)
        try:
            return (self.root / path).read_bytes()
        except OSError:
            return None

    def under(self, files: Mapping[str, bytes]) -> Tree:
        """This tree with planned files laid over."""
        return Tree(self.root, files, self)


class _Source(gate.Source):
    """Reads modules from a :class:`Tree` instead of from disk."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(gate.Found(tree.root / PACKAGE, None))
        self._tree = tree

    def module(self, name: str) -> Module | str:
        """See :meth:`gate.Source.module`; what no file is laid over is read once."""
        below = self._tree.below
        if below is None or any(path in self._tree.files for path in _paths(name)):
            return super().module(name)
        return below.source.module(name)

    def read(self, module: str) -> bytes:
        """See :meth:`gate.Source.read`."""
        for path in _paths(module):
            content = self._tree.read(path)
            if content is not None:
                return content
        raise OSError(module)


def _paths(module: str) -> tuple[str, str]:
    base = module.replace(".", "/")
    return f"{base}/__init__.py", f"{base}.py"


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


def plan(tree: Tree, changes: Sequence[Change]) -> list[Step]:
    """Plan ``changes`` one on top of the other, the first on ``tree``.

    Raises:
        Refused: one of them cannot be made; the text names it and says why.
    """
    token = style.line_length.set(style.of_checkout(tree.root))
    try:
        steps = []
        for change in changes:
            try:
                step = _step(tree, change)
            except Refused as error:
                raise type(error)(f"{change.name}: {error}") from None
            tree = tree.under(step.files)
            steps.append(step)
        return steps
    finally:
        style.line_length.reset(token)


def is_in(tree: Tree, change: Change) -> bool:
    """Whether the tree does already what ``change`` brings, by it or by itself."""
    native = [need for f in FEATURES if f.name in change.features for need in f.native]
    return tree.source.has([*native, *change.native])


# Pure, and asked again for the same: once to say what fits, once to make it.
@cache
def _edited(edit: Edit, content: bytes, _line_length: int) -> bytes:
    return edit(Code(content)).content


def _step(tree: Tree, change: Change) -> Step:
    if is_in(tree, change):
        return Step(change, already=True)
    files: dict[str, bytes] = {}
    added = [(f"{PACKAGE}/{path}", make) for path, make in change.modules.items()]
    added += [(f"{TESTS}/{path}", make) for path, make in change.copied_tests.items()]
    for whole, make in added:
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
    if not is_in(tree.under(files), change):
        raise Refused("the edited code does not hold what the change promises")
    return Step(change, files, new=frozenset(new), line_length=style.line_length.get())
