"""The sources to mutate: where a name is defined, and edits of that place."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Files = dict[str, str | None]


@dataclass(frozen=True)
class Place:
    """One definition: its file, its node, and the class that holds it."""

    path: str
    node: ast.AST
    holder: ast.ClassDef | None

    @property
    def first(self) -> int:
        """First line, decorators included; counted from 0."""
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        return min(n.lineno for n in (self.node, *decorators)) - 1  # type: ignore[attr-defined]

    @property
    def end(self) -> int:
        """The line after the last."""
        return int(self.node.end_lineno)  # type: ignore[attr-defined]

    @property
    def indent(self) -> str:
        """What stands before its first line."""
        return " " * int(self.node.col_offset)  # type: ignore[attr-defined]


class Tree:
    """The package ``omlx`` of one checkout; paths are relative to the package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module] = {}

    def paths(self) -> Iterator[str]:
        """Every module's file."""
        for path in sorted(self.root.rglob("*.py")):
            yield path.relative_to(self.root).as_posix()

    def text(self, path: str) -> str:
        """Text of a file."""
        if path not in self._texts:
            self._texts[path] = (self.root / path).read_text("utf-8")
        return self._texts[path]

    def tree(self, path: str) -> ast.Module:
        """Syntax tree of a file."""
        if path not in self._trees:
            self._trees[path] = ast.parse(self.text(path))
        return self._trees[path]

    @staticmethod
    def path_of(module: str) -> str:
        """File of a module; here every one that matters is a plain file."""
        return "/".join(module.split(".")[1:]) + ".py"

    def find(self, module: str, name: str) -> Place | None:
        """Where ``name`` (``x``, ``Class`` or ``Class.x``) is defined."""
        path = self.path_of(module)
        if not (self.root / path).is_file():
            return None
        head, _, member = name.partition(".")
        top = _named(self.tree(path).body, head)
        if top is None or not member:
            return None if top is None else Place(path, top, None)
        if not isinstance(top, ast.ClassDef):
            return None
        inside = _named(top.body, member)
        if inside is None:
            inside = _assigned_in_init(top, member)
        return None if inside is None else Place(path, inside, top)

    # -- edits ---------------------------------------------------------------

    def replaced(self, place: Place, text: str) -> Files:
        """The file with ``text`` in the definition's place."""
        lines = self.text(place.path).splitlines()
        new = textwrap.indent(text, place.indent).splitlines()
        return {
            place.path: "\n".join([*lines[: place.first], *new, *lines[place.end :]]) + "\n"
        }

    def reshaped(self, place: Place, change: Callable[[Function], ast.AST | str]) -> Files:
        """The file with a changed copy of a function in its place."""
        node = copy.deepcopy(place.node)
        assert isinstance(node, Function)
        new = change(node)
        return self.replaced(place, new if isinstance(new, str) else ast.unparse(new))

    def appended(self, path: str, text: str, base: Files | None = None) -> Files:
        """The file with ``text`` at its end."""
        old = (base or {}).get(path) or self.text(path)
        return {**(base or {}), path: f"{old}\n{text}\n"}

    def at_top(self, path: str, text: str, files: Files) -> Files:
        """``files`` with ``text`` after the file's own ``from __future__`` imports."""
        old = files[path]
        assert old is not None
        at = 0
        for node in ast.parse(old).body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_text and getattr(node, "module", None) != "__future__":
                break
            at = node.end_lineno or 0
        lines = old.splitlines()
        return {**files, path: "\n".join([*lines[:at], text, *lines[at:]]) + "\n"}

    def everywhere(self, old: str, new: str) -> Files:
        """Each file that says ``old``, with ``new`` in its place: a rename done well."""
        word = re.compile(rf"\b{re.escape(old)}\b")
        return {
            path: word.sub(new, self.text(path))
            for path in self.paths()
            if old in self.text(path)
        }

    def taken_elsewhere(self, path: str, stem: str, name: str, files: Files) -> Files:
        """``files``, in which ``name`` has left ``path``, and who imports it looks there."""
        old = path.rpartition("/")[2].removesuffix(".py")
        changed = dict(files)
        for other in self.paths():
            if other == path or f"{old} import" not in self.text(other):
                continue
            lines = self.text(other).splitlines()
            imports = [n for n in ast.walk(self.tree(other)) if isinstance(n, ast.ImportFrom)]
            for node in sorted(imports, key=lambda n: n.lineno, reverse=True):
                package, dot, last = (node.module or "").rpartition(".")
                if last != old or name not in [alias.name for alias in node.names]:
                    continue
                kept = [alias for alias in node.names if alias.name != name]
                taken = [alias for alias in node.names if alias.name == name]
                split = [ast.ImportFrom(f"{package}{dot}{stem}", taken, node.level)]
                if kept:
                    split.append(ast.ImportFrom(node.module, kept, node.level))
                indent = " " * node.col_offset
                new = [indent + ast.unparse(statement) for statement in split]
                lines[node.lineno - 1 : node.end_lineno] = new
            text = "\n".join(lines) + "\n"
            if text.rstrip() != self.text(other).rstrip():
                changed[other] = text
        return changed

    def imports_rewritten(self, old: str, new: str) -> Files:
        """Each file with its imports of the module ``old`` (last part) renamed."""
        line = re.compile(rf"^(\s*(?:from\s+[\w.]*|import\s+[\w.]*))\b{old}\b(?!\s*=)", re.M)
        package = re.compile(rf"^(\s*from\s+\.+\s+import\s+)\b{old}\b", re.M)
        found: Files = {}
        for path in self.paths():
            text = self.text(path)
            if old not in text:
                continue
            changed = package.sub(rf"\1{new} as {old}", line.sub(rf"\1{new}", text))
            if changed != text:
                found[path] = changed
        return found


def _named(body: list[ast.stmt], name: str) -> ast.AST | None:
    found: ast.AST | None = None
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            if node.name == name:
                found = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                found = node
    return found


def _assigned_in_init(holder: ast.ClassDef, name: str) -> ast.AST | None:
    init = _named(holder.body, "__init__")
    for node in ast.walk(init) if init is not None else ():
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(t) == f"self.{name}" for t in targets):
                return node
    return None
