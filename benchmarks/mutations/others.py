"""Mutations of attributes, classes, modules, the release, and native features."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterator, Sequence

from benchmarks.mutations.functions import distinctive, whole_tree_rename
from benchmarks.mutations.model import (
    Hits,
    Mutation,
    below,
    both,
    either,
    is_defined,
    named,
    none,
    required,
)
from benchmarks.mutations.tree import Files, Place, Tree
from omlx_admission.hooks.gate import Kind, Need


def of_value(tree: Tree, module: str, name: str, place: Place) -> Iterator[Mutation]:
    """All of one attribute or module variable."""
    me, target = named(module, name), f"{module}:{name}"
    leaf = name.rpartition(".")[2]
    node = place.node
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    there = both(me, required)
    text = ast.unparse(node)
    left = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    right = ast.unparse(node.value) if node.value is not None else None
    if distinctive(leaf):
        everywhere = tree.everywhere(leaf, f"{leaf}_v2")
        yield Mutation("renamed everywhere", target, everywhere, whole_tree_rename(leaf))
    renamed = tree.replaced(place, text.replace(leaf, f"{leaf}_v2", 1))
    yield Mutation("renamed", target, renamed, there)
    yield Mutation("removed", target, tree.replaced(place, "pass"), there)
    in_init = left.startswith("self.")
    if place.holder is not None:
        yield Mutation("made a property", target, _property(tree, place, leaf, in_init), me)
    if in_init or place.holder is None:
        bare = tree.replaced(place, f"{left}: object")
        yield Mutation("announced, not set", target, bare, there)
    if place.holder is None:
        under = tree.replaced(place, f"if __name__ != '__never__':\n    {text}")
        yield Mutation("set under a condition", target, under, there)
    if right is not None and place.holder is None:
        gone = tree.appended(place.path, f"del {name}")
        yield Mutation("deleted below", target, gone, there)
    if right is not None and (in_init or place.holder is None):
        made = tree.replaced(place, f"{left} = _make_it(lambda: {right})")
        made = tree.at_top(place.path, "def _make_it(f):\n    return f()", made)
        hits = both(me, lambda n: bool(n.made_by))
        yield Mutation("made by something else", target, made, hits)
        nothing = tree.replaced(place, f"{left} = None")
        hits = both(me, lambda n: n.made_by is not None)
        yield Mutation("nothing at first", target, nothing, hits)
        if in_init:
            return_to = tree.replaced(place, f"{left}: tuple[int, ...] = {right}")
            hits = both(me, lambda n: n.types is not None)
            yield Mutation("of another type", target, return_to, hits)
    if place.holder is not None and not in_init:
        default = f" = {right}" if right is not None else ""
        other = tree.replaced(place, f"{left}: tuple[int, ...]{default}")
        hits = both(me, lambda n: n.types is not None)
        yield Mutation("a field of another type", target, other, hits)
        if right is not None and isinstance(node, ast.AnnAssign):
            text = f"{left}: {ast.unparse(node.annotation)} = 'something else'"
            hits = both(me, lambda n: bool(n.made_by))
            yield Mutation("a field's other default", target, tree.replaced(place, text), hits)
    if right is not None and isinstance(node, ast.Assign):
        annotated = tree.replaced(place, f"{left}: object = {right}")
        yield Mutation("harmless: annotated", target, annotated, none)


def _property(tree: Tree, place: Place, leaf: str, in_init: bool) -> Files:
    """A property with a setter round a hidden attribute, so that oMLX itself works."""
    holder = place.holder
    assert holder is not None
    accessor = (
        f"@property\ndef {leaf}(self):\n    return self.__dict__.get('_hidden_{leaf}')\n"
        f"@{leaf}.setter\ndef {leaf}(self, value):\n    self.__dict__['_hidden_{leaf}'] = value"
    )
    if not in_init:
        return tree.replaced(place, accessor)
    lines = tree.text(place.path).splitlines()
    at = holder.end_lineno or 0
    return {
        place.path: "\n".join([*lines[:at], textwrap.indent(accessor, "    "), *lines[at:]])
        + "\n"
    }


def of_class(tree: Tree, module: str, name: str, place: Place) -> Iterator[Mutation]:
    """All of one class."""
    target, path = f"{module}:{name}", place.path
    all_of_it = below(module, name)
    holder = place.node
    assert isinstance(holder, ast.ClassDef)
    lines = tree.text(path).splitlines()
    there = both(all_of_it, required)

    def one(kind: str, files: Files, hits: Hits) -> Mutation:
        return Mutation(kind, target, files, hits)

    def with_line(line: str) -> Files:
        at = holder.body[0].lineno - 1
        first = holder.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            at = first.end_lineno or at
        return {path: "\n".join([*lines[:at], f"    {line}", *lines[at:]]) + "\n"}

    def with_head(head: str) -> Files:
        at = holder.lineno - 1
        end = at + 1
        return {path: "\n".join([*lines[:at], head, *lines[end:]]) + "\n"}

    yield one("renamed everywhere", tree.everywhere(name, f"{name}V2"), whole_tree_rename(name))
    yield one("class removed", tree.replaced(place, "pass"), there)
    moved = f"{path.removesuffix('.py')}_moved.py"
    stem = moved.rpartition("/")[2].removesuffix(".py")
    files: Files = {moved: tree.text(path), **tree.replaced(place, "pass")}
    back = tree.appended(path, f"from .{stem} import {name}", files)
    yield one("moved, and imported back", back, all_of_it)
    import_it = f"from .{stem} import {name} as {name}"
    yield one(
        "moved, imported back above",
        tree.at_top(path, import_it, files),
        all_of_it,
    )
    yield one(
        "followed by another of its name",
        tree.appended(
            path, f"from .{stem} import {name}", {moved: tree.text(path), path: tree.text(path)}
        ),
        all_of_it,
    )
    yield one("moved, not imported back", tree.taken_elsewhere(path, stem, name, files), there)
    factory = (
        f"_{name} = {name}\ndef {name}(*args, **kwargs):\n    return _{name}(*args, **kwargs)"
    )
    yield one("made a factory", tree.appended(path, factory), all_of_it)
    wrapped = tree.appended(path, f"{name} = (lambda cls: cls)({name})")
    yield one("wrapped below", wrapped, all_of_it)
    decorated = tree.replaced(place, "@_registered\n" + _dedented(lines, place))
    decorated = tree.at_top(path, "_registered = lambda cls: cls", decorated)
    yield one("class decorated", decorated, all_of_it)
    if not holder.decorator_list and holder.lineno == holder.body[0].lineno - 1:
        bases = [ast.unparse(b) for b in holder.bases]
        head = f"class {name}({', '.join([*bases, 'metaclass=type'])}):"
        yield one("class with a metaclass", with_head(head), all_of_it)
        head = f"class {name}({', '.join([*bases, '_Mixin'])}):"
        mixed = tree.at_top(path, "class _Mixin:\n    pass", with_head(head))
        yield one(
            "class with one more base",
            mixed,
            both(named(module, name), lambda n: n.bases is not None),
        )
    slots = both(named(module, name), lambda n: n.attachable)
    yield one("class with slots", with_line('__slots__ = ("__dict__", "__weakref__")'), slots)
    yield one("harmless: a class attribute more", with_line("_omlx_new = 1"), none)


def _dedented(lines: list[str], place: Place) -> str:
    return textwrap.dedent("\n".join(lines[place.first : place.end]))


def of_module(tree: Tree, module: str) -> Iterator[Mutation]:
    """All of one module."""
    path = tree.path_of(module)
    if not (tree.root / path).is_file():
        return  # of a need that is optional
    text = tree.text(path)
    stem = path.rpartition("/")[2].removesuffix(".py")
    all_of_it: Hits = lambda need: need.module == module and required(need)  # noqa: E731

    def here(need: Need) -> bool:
        return need.module == module

    def is_there(need: Need) -> bool:
        """What has to be there, or what is there and then has to be seen."""
        return required(need) or tree.find(module, need.name.partition(".")[0]) is not None

    new = f"{path.removesuffix('.py')}_v2.py"
    rewritten = tree.imports_rewritten(stem, f"{stem}_v2")
    body = rewritten.pop(path, text)
    yield Mutation("module moved", module, {**rewritten, path: None, new: body}, all_of_it)
    yield Mutation("module removed", module, {path: None}, all_of_it)
    names = ", ".join(_top_names(tree, path))
    shim = f"from .{stem}_v2 import {names}\n"
    yield Mutation(
        "module moved, the old one passes on",
        module,
        {new: text, path: shim},
        both(here, is_there, lambda n: n.kind.name != "NAME"),
    )
    package = path.removesuffix(".py") + "/__init__.py"
    deeper = _deeper(text)
    yield Mutation(
        "module made a package that passes on",
        module,
        {
            path: None,
            package.replace("__init__", "core"): deeper,
            package: f"from .core import {names}\n",
        },
        both(here, is_there, lambda n: n.kind.name != "NAME"),
    )
    yield Mutation(
        "harmless: module made a package", module, {path: None, package: deeper}, none
    )
    yield Mutation(
        "module that cannot be parsed", module, {path: text + "\ndef (\n"}, all_of_it
    )
    yield Mutation("module with a null byte", module, {path: text + "\0"}, all_of_it)
    newer = f"{path.removesuffix('.py')}_newer.py"
    star = tree.appended(path, f"from .{stem}_newer import *", {newer: "", path: text})
    hits = both(
        here,
        is_defined,
        lambda n: n.kind.name != "NAME" and (is_there(n) if "." not in n.name else required(n)),
    )
    yield Mutation("star import at the end", module, star, hits)
    above = tree.at_top(path, f"from .{stem}_newer import *", {newer: "", path: text})
    yield Mutation("harmless: star import at the top", module, above, none)
    noted = {path: f"# A note.\n\n{text}\n# The end.\n"}
    yield Mutation("harmless: comments", module, noted, none)
    yield Mutation(
        "harmless: written anew", module, {path: ast.unparse(tree.tree(path)) + "\n"}, none
    )


def _top_names(tree: Tree, path: str) -> list[str]:
    names: list[str] = []
    for node in tree.tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
        elif (
            isinstance(node, ast.Import | ast.ImportFrom)
            and getattr(node, "module", "") != "__future__"
        ):
            names += [a.asname or a.name.partition(".")[0] for a in node.names]
    return list(dict.fromkeys(names))


def _deeper(text: str) -> str:
    """The same module one package further down."""
    lines = []
    for line in text.splitlines():
        head = line.lstrip()
        if head.startswith("from ."):
            line = line.replace("from .", "from ..", 1)
        lines.append(line)
    return "\n".join(lines) + "\n"


def of_import(tree: Tree, module: str, name: str) -> Iterator[Mutation]:
    """A name that the module has from elsewhere, under another name."""
    path = tree.path_of(module)
    new, found = f"{name}_v2", False
    changed = copy.deepcopy(tree.tree(path))
    for node in ast.walk(changed):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    alias.asname, found = new, True
        elif isinstance(node, ast.Name) and node.id == name:
            node.id = new
    if found:
        files: Files = {path: ast.unparse(changed) + "\n"}
        yield Mutation(
            "imported under another name",
            f"{module}:{name}",
            files,
            either(named(module, name), _used_as(module, name)),
        )


def of_jobs(tree: Tree, module: str, getter: str, jobs: Sequence[str]) -> Iterator[Mutation]:
    """The module has one more job for the executor, or an old one by another name."""
    path, target = tree.path_of(module), f"{module}:{getter}"
    hits: Hits = lambda n: n.module == module and n.kind is Kind.JOBS  # noqa: E731
    call = f"await loop.run_in_executor({getter}(), _fuse_once_more)"
    more = tree.appended(path, f"async def _fuse(loop):\n    {call}")
    yield Mutation("an executor's job added", target, more, hits)
    handed = re.compile(rf"({getter}\(\),\s*)\b({'|'.join(jobs)})\b")
    found = handed.search(tree.text(path))
    if found:
        job = found[2]
        renamed = {path: re.sub(rf"\b{job}\b", f"{job}_v2", tree.text(path))}
        imported = re.sub(rf"(import .*)\b{job}_v2\b", rf"\1{job} as {job}_v2", renamed[path])
        either_way = either(hits, _used_as(module, job))
        yield Mutation("an executor's job renamed", target, {path: imported}, either_way)


def _used_as(module: str, name: str) -> Hits:
    return lambda n: n.module == module and n.kind is Kind.USED and n.name == name


def of_used(tree: Tree, module: str, name: str) -> Iterator[Mutation]:
    """Nobody in the module asks for the name any more."""
    path = tree.path_of(module)
    called = re.compile(rf"(?<!def )(?<!class )\b{re.escape(name)}\b")
    changed = called.sub(f"{name}_v2", tree.text(path))
    if changed == tree.text(path):
        return
    # Imports keep their name, so that the module can be imported.
    changed = re.sub(rf"(import .*)\b{name}_v2\b", rf"\1{name} as {name}_v2", changed)
    used: Hits = lambda n: (  # noqa: E731
        n.module == module and n.kind in (Kind.USED, Kind.JOBS) and n.name == name
    )
    leaf: Hits = lambda n: (  # noqa: E731
        n.module == module
        and n.kind.name in ("VALUE", "NAME")
        and n.name.rpartition(".")[2] == name
    )
    yield Mutation(
        "asked for by nobody", f"{module}:{name}", {path: changed}, either(used, leaf)
    )


def of_release(tree: Tree) -> Iterator[Mutation]:
    """Releases that were not read, or cannot be told."""
    path = "_version.py"
    texts = {
        "0.4.9": '__version__ = "0.4.9"\n',
        "0.8.0rc1": '__version__ = "0.8.0rc1"\n',
        "1.0": '__version__ = "1.0"\n',
        "no number": '__version__ = "next"\n',
        "computed": 'from importlib.metadata import version\n__version__ = version("pip")\n',
        "joined": '__version__ = ".".join(["0", "6", "3"])\n',
        "in a comment only": '# __version__ = "0.6.3"\n"""\n__version__ = "0.6.3"\n"""\n',
        "under a condition": 'import os\nif os.name == "posix":\n    __version__ = "0.6.3"\n',
        "two of them": "import os\n__version__ = '0.6.3'\nif os.name:\n    __version__ = '9'\n",
        "not parsed": '__version__ = "0.6.3\n',
        "empty": "",
    }
    for name, text in texts.items():
        yield Mutation(f"release {name}", "omlx._version", {path: text}, none, all_refused=True)
    yield Mutation("release: no file", "omlx._version", {path: None}, none, all_refused=True)
    for version in ("0.6.4", "0.7.0.dev3", "0.7.9", "0.6.3rc2+local"):
        text = f'"""Release."""\n__version__: str = "{version}"\n'
        yield Mutation(f"harmless: release {version}", "omlx._version", {path: text}, none)


def of_natives(tree: Tree) -> Iterator[Mutation]:
    """What oMLX may come to do itself; the names are those of its 0.7 development."""
    pool = tree.find("omlx.engine_pool", "EnginePool.get_engine")
    assert pool is not None
    own = ast.unparse(pool.node)
    path = (
        "_unloading_models: set = set()\n"
        "def _acquire_loaded_engine(self, model_id, force_lm, lease, runtime_settings):\n"
        "    return None\n"
    )
    changed = tree.replaced(pool, path + own)
    yield Mutation(
        "native: resident path", "omlx.engine_pool", changed, none, native=("resident",)
    )
    half = tree.replaced(pool, path.partition("\n")[2] + own)
    yield Mutation("half of a native resident path", "omlx.engine_pool", half, none)
    settings = tree.find("omlx.settings", "SchedulerSettings")
    assert settings is not None
    assert isinstance(settings.node, ast.ClassDef)
    lines = tree.text(settings.path).splitlines()
    at = settings.node.end_lineno or 0
    key = {
        settings.path: "\n".join(
            [*lines[:at], "    serialize_engine_gpu: bool = False", *lines[at:]]
        )
        + "\n"
    }
    natives = ("gpu_setting", "gpu_turn")
    yield Mutation("native: the GPU turn's key", "omlx.settings", key, none, native=natives)
    function = "def exit_if_gpu_submissions_ignored(exc):\n    return None"
    fatal = tree.appended("utils/fatal.py", function)
    yield Mutation("native: lockout", "omlx.utils.fatal", fatal, none, native=("gpu_lockout",))
