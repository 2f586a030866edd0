"""All mutations of one checkout, and the verdicts on them."""

from __future__ import annotations

import ast
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.mutations import functions, others
from benchmarks.mutations.model import Mutation, Outcome, is_defined
from benchmarks.mutations.tree import Function, Tree
from omlx_admission.hooks import gate, install
from omlx_admission.hooks.features import FEATURES, MODULES
from omlx_admission.hooks.gate import Kind, Need
from omlx_admission.hooks.source_search import Search
from omlx_admission.settings import Settings

#: Everything is wanted, so that everything has to be judged.
_OFF: dict[str, Any] = {f.field: True for f in FEATURES if not getattr(Settings(), f.field)}
#: No step of a story waits for long; a busy machine may take its time for a swap.
SETTINGS = Settings(**_OFF, max_wait_s=30.0)


def all_needs() -> list[Need]:
    """Every need of every feature, once."""
    return list(dict.fromkeys(need for feature in FEATURES for need in feature.needs))


def generate(root: Path) -> list[Mutation]:
    """Every kind of change on every name that a feature needs."""
    tree = Tree(root)
    found = [m for m in _all(tree) if _changes(tree, m)]
    # Two needs may name one thing; the change is one.
    return list({m.name: m for m in found}.values())


def _all(tree: Tree) -> Iterator[Mutation]:
    needs = all_needs()
    named = [(n.module, n.name) for n in needs if is_defined(n)]
    # What holds a needed name is needed itself.
    named += [(module, name.partition(".")[0]) for module, name in named]
    for module, name in dict.fromkeys(named):
        place = tree.find(module, name)
        if place is None:
            if any(n.kind is Kind.NAME and (n.module, n.name) == (module, name) for n in needs):
                yield from others.of_import(tree, module, name)
            continue  # else optional
        if isinstance(place.node, Function):
            yield from functions.mutations(tree, module, name, place)
        elif isinstance(place.node, ast.ClassDef):
            yield from others.of_class(tree, module, name, place)
        else:
            yield from others.of_value(tree, module, name, place)
    for need in needs:
        if not is_defined(need):
            yield from others.of_used(tree, need.module, need.name)
        if need.kind is Kind.JOBS:
            yield from others.of_jobs(tree, need.module, need.name, need.jobs)
    for module in dict.fromkeys(need.module for need in needs):
        yield from others.of_module(tree, module)
    yield from others.of_release(tree)
    yield from others.of_natives(tree)


def _changes(tree: Tree, mutation: Mutation) -> bool:
    return any(
        text is None or not (tree.root / path).is_file() or tree.text(path) != text
        for path, text in mutation.files.items()
    )


def sample(mutations: Sequence[Mutation], count: int) -> list[Mutation]:
    """``count`` of them, the same ones each time.

    First of each module that something is applied to: a class under another name, and a
    change that leaves everything to be applied. Then as many kinds as there can be.
    """
    order = sorted(mutations, key=lambda m: hashlib.sha256(m.name.encode()).digest())
    of_each_kind = {m.kind: m for m in reversed(order)}
    classes = {m.target for m in order if m.kind == "class removed"}
    renamed = [m for m in order if m.kind == "renamed everywhere" and m.target in classes]
    ranked = []
    for group in (renamed, [m for m in order if m.kind.startswith("harmless")]):
        of_each_module = {m.target.partition(":")[0]: m for m in reversed(group)}
        ranked += [of_each_module[name].name for name in MODULES if name in of_each_module]
    ranked += [m.name for m in order if m is of_each_kind[m.kind]]
    ranked += [m.name for m in order]
    ranked = list(dict.fromkeys(ranked))
    chosen = {*ranked[:count]}
    return [m for m in mutations if m.name in chosen]


class Checkout:
    """A copy of a checkout by links, in which one mutation at a time is made."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.original = root
        self.source = folder
        self.root = folder / "omlx"
        # Folders are real, files are links: a changed file takes its link's place.
        for path in root.rglob("*"):
            below = path.relative_to(root)
            if "__pycache__" in below.parts:
                continue
            if path.is_dir():
                (self.root / below).mkdir(parents=True, exist_ok=True)
            else:
                (self.root / below).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(path, self.root / below)

    @contextmanager
    def changed(self, mutation: Mutation) -> Iterator[Path]:
        """The checkout with the mutation in it; its folder."""
        for path, text in mutation.files.items():
            place = self.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            if text is not None:
                place.write_bytes(text.encode())
        try:
            yield self.source
        finally:
            for path in mutation.files:
                place, original = self.root / path, self.original / path
                place.unlink(missing_ok=True)
                if original.exists():
                    os.symlink(original, place)
                elif place.parent != self.root and not any(place.parent.iterdir()):
                    place.parent.rmdir()


@contextmanager
def checkout(root: Path) -> Iterator[Checkout]:
    """A checkout to mutate, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="omlx-mutated-") as folder:
        yield Checkout(root, Path(folder))


@contextmanager
def quick_judging() -> Iterator[None]:
    """Judge what no mutation touches once, not once for each mutation."""
    judge, tree_of = gate.Source._judge, gate.Source._tree
    known: dict[Need, str | None] = {}
    trees: dict[str, ast.Module | str] = {}
    defined_in = Search._defined_in
    definitions: dict[Path, list[tuple[str, str]]] = {}

    def is_touched(source: gate.Source, module: str) -> bool:
        return not source._found.module_path(module).is_symlink()

    def tree_once(source: gate.Source, module: str) -> ast.Module | str:
        if is_touched(source, module):
            return tree_of(source, module)
        if module not in trees:
            trees[module] = tree_of(source, module)
        return trees[module]

    def judge_once(source: gate.Source, need: Need) -> str | None:
        where = need.where.partition(":")[0]
        if is_touched(source, need.module) or (where and is_touched(source, where)):
            return judge(source, need)
        if need not in known:
            known[need] = judge(source, need)
        return known[need]

    def defined_once(module: str, path: Path) -> list[tuple[str, str]]:
        if not path.is_symlink():
            return defined_in(module, path)
        if path not in definitions:
            definitions[path] = defined_in(module, path)
        return definitions[path]

    with (
        mock.patch.object(Search, "_defined_in", staticmethod(defined_once)),
        mock.patch.object(gate.Source, "_judge", judge_once),
        mock.patch.object(gate.Source, "_tree", tree_once),
    ):
        yield


def judge(source: Path, mutation: Mutation) -> tuple[Outcome, install.Report]:
    """The gate's verdicts beside the expected ones."""
    report = install.decide(source, SETTINGS)
    expected = mutation.expected()
    outcome = Outcome(mutation)
    for verdict in report.verdicts:
        name = verdict.feature.name
        if verdict.state.value != expected[name]:
            reasons = f" ({'; '.join(verdict.reasons)})" if verdict.reasons else ""
            outcome.wrong.append(
                f"{name} is {verdict.state.value}, has to be {expected[name]}{reasons}"
            )
    outcome.refused = sum(state == "refused" for state in expected.values())
    return outcome, report
