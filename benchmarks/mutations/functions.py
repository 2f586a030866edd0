"""Mutations of functions and methods."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.mutations.model import (
    Mutation,
    all_params,
    both,
    either,
    leading,
    named,
    none,
    required,
)
from benchmarks.mutations.tree import Files, Function, Place, Tree
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.gate import Kind, Need

#: Names that other code of oMLX's or of its libraries uses for other things: renamed
#: where they are defined only, so that stock breaks too.
COMMON = frozenset(
    {"__init__", "shutdown", "scheduler", "security", "from_dict", "to_dict", "model_id"}
)
_FLAG = "__name__ != '__never__'"


def distinctive(name: str) -> bool:
    """Whether ``name`` can be renamed all over the tree and mean one thing."""
    return name not in COMMON and (name.startswith("_") or len(name) >= 8)


def whole_tree_rename(name: str) -> Callable[[Need], bool]:
    """Needs that a rename of one identifier everywhere takes away."""
    return lambda need: (
        required(need)
        and name in need.name.split(".")
        # What is asked only where another name is, is not asked any more.
        and name not in need.where.partition(":")[2].split(".")
    )


def mutations(tree: Tree, module: str, name: str, place: Place) -> Iterator[Mutation]:
    """All of one function."""
    me, leaf = named(module, name), name.rpartition(".")[2]

    def one(kind: str, files: Files, hits: Callable[[Need], bool]) -> Mutation:
        return Mutation(kind, f"{module}:{name}", files, hits)

    def shaped(
        kind: str, change: Callable[[Function], ast.AST | str], hits: Callable[[Need], bool]
    ) -> Mutation:
        return one(kind, tree.reshaped(place, change), hits)

    there = both(me, required)
    if distinctive(leaf):
        yield one(
            "renamed everywhere", tree.everywhere(leaf, f"{leaf}_v2"), whole_tree_rename(leaf)
        )
    else:
        yield shaped("renamed", _renamed, there)
    yield one("removed", tree.replaced(place, "pass"), there)
    is_sync = isinstance(place.node, ast.FunctionDef)
    colour = "made async" if is_sync else "made sync"
    natives = _marked_by(module, name, Kind.ASYNC if is_sync else Kind.SYNC)
    yield replace(shaped(colour, _recoloured, me), native=natives)
    yield shaped("turned into an attribute", lambda n: f"{n.name} = staticmethod(print)", me)
    yield shaped("defined under a condition", lambda n: _under(_FLAG, ast.unparse(n)), there)
    yield shaped("other shape in another branch", _branches, me)
    yield shaped(
        "for type checkers only", lambda n: _under("TYPE_CHECKING", ast.unparse(n)), there
    )
    again = shaped("defined again below", lambda n: f"{ast.unparse(n)}\n{_recoloured(n)}", me)
    yield replace(again, native=natives)
    if _can_yield(place):
        yield shaped("made a generator", _generator, me)
    yield shaped("returns something else", _returns, both(me, lambda n: n.returns is not None))
    yield from _decorated(tree, module, name, place)
    yield from _parameters(tree, module, name, place)
    if place.holder is not None:
        at_end = tree.appended(place.path, f"{name} = {name}")
        yield one("replaced after its class", at_end, me)
        yield one(
            "replaced by setattr",
            tree.appended(place.path, f'setattr({place.holder.name}, "{leaf}", {name})'),
            me,
        )
        yield one("deleted after its class", tree.appended(place.path, f"del {name}"), there)
        kind = both(named(module, place.holder.name), lambda n: n.bases is not None)
        yield one("inherited from a new base", _inherited(tree, place), either(there, kind))
    else:
        yield one("assigned again below", tree.appended(place.path, f"{name} = {name}"), me)
    yield shaped("harmless: a line more", _logs, none)
    yield shaped("harmless: other annotations", _annotations, none)


def _renamed(node: Function) -> ast.AST:
    node.name += "_v2"
    return node


def _recoloured(node: Function) -> str:
    """The same name in the other colour; it passes the call on to what it was."""
    inner, outer = copy.deepcopy(node), copy.deepcopy(node)
    inner.name = f"_other_{node.name}"
    inner.decorator_list = []
    is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
    target = f"{node.args.args[0].arg}.{inner.name}" if is_method else inner.name
    colour = ast.FunctionDef if isinstance(node, ast.AsyncFunctionDef) else ast.AsyncFunctionDef
    call = ast.parse(f"return {target}({_call(node.args, is_method)})").body
    changed = colour(**{**vars(outer), "body": call})
    if node.decorator_list:
        inner.decorator_list = node.decorator_list
        changed.decorator_list = node.decorator_list
    return f"{ast.unparse(inner)}\n{ast.unparse(changed)}"


def _call(args: ast.arguments, is_method: bool) -> str:
    names = [a.arg for a in (*args.posonlyargs, *args.args)][is_method:]
    return ", ".join([*names, *(f"{a.arg}={a.arg}" for a in args.kwonlyargs)])


def _under(test: str, text: str) -> str:
    body = "\n".join(f"    {line}" for line in text.splitlines())
    return (
        f"if {test}:\n{body}"
        if test != "TYPE_CHECKING"
        else (f"TYPE_CHECKING = False\nif TYPE_CHECKING:\n{body}")
    )


def _branches(node: Function) -> str:
    other = _recoloured(node)
    return (
        _under(_FLAG, ast.unparse(node)) + "\nelse:\n" + _under("1", other).partition("\n")[2]
    )


def _marked_by(module: str, name: str, kind: Kind) -> tuple[str, ...]:
    """Features that oMLX has itself where this one name is of this kind."""
    return tuple(
        feature.name
        for feature in FEATURES
        if [(n.module, n.name, n.kind) for n in feature.native] == [(module, name, kind)]
    )


def _can_yield(place: Place) -> bool:
    nodes = list(ast.walk(place.node))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return False
    # A coroutine that returns a value cannot become an async generator.
    return isinstance(place.node, ast.FunctionDef) or not any(
        isinstance(node, ast.Return) and node.value is not None for node in nodes
    )


def _generator(node: Function) -> Function:
    node.body += ast.parse("if False:\n    yield").body
    return node


def _returns(node: Function) -> Function:
    node.returns = ast.parse("tuple[int, int]", mode="eval").body
    return node


def _logs(node: Function) -> Function:
    node.body.insert(0, ast.parse("_seen = 'once more'").body[0])
    return node


def _annotations(node: Function) -> Function:
    for argument in node.args.args:
        argument.annotation = ast.Name("object")
    return node


def _inherited(tree: Tree, place: Place) -> Files:
    """The method moves to a base class above; whoever calls it does not notice."""
    holder = place.holder
    assert holder is not None
    lines = tree.text(place.path).splitlines()
    moved = lines[place.first : place.end]
    base = f"_{holder.name}Base"
    bases = ", ".join([base, *(ast.unparse(b) for b in holder.bases)])
    start = min(n.lineno for n in (holder, *holder.decorator_list)) - 1
    head = [f"class {base}:", *moved, "", *lines[start : holder.lineno - 1]]
    head.append(f"class {holder.name}({bases}):")
    body = lines[holder.body[0].lineno - 1 : place.first]
    rest = lines[place.end :]
    return {place.path: "\n".join([*lines[:start], *head, *body, "    pass", *rest]) + "\n"}


def _decorated(tree: Tree, module: str, name: str, place: Place) -> Iterator[Mutation]:
    me = named(module, name)
    for decorator in ("property", "staticmethod", "classmethod", "_traced", "_cached(1)"):
        if place.holder is None and decorator in ("property", "staticmethod", "classmethod"):
            continue

        def change(node: Function, decorator: str = decorator) -> Function:
            node.decorator_list.insert(0, ast.parse(decorator, mode="eval").body)
            return node

        files = tree.reshaped(place, change)
        if decorator.startswith("_"):
            helpers = "_traced = lambda f: f\n_cached = lambda n: lambda f: f"
            files = tree.at_top(place.path, helpers, files)

        def minds(need: Need, decorator: str = decorator) -> bool:
            return me(need) and decorator not in need.decorators

        yield Mutation(f"decorated by {decorator}", f"{module}:{name}", files, minds)

    def final(node: Function) -> Function:
        node.decorator_list.append(ast.parse("typing.final", mode="eval").body)
        return node

    files = tree.at_top(place.path, "import typing", tree.reshaped(place, final))
    yield Mutation("harmless: decorated by typing.final", f"{module}:{name}", files, none)
    if place.node.decorator_list:  # type: ignore[attr-defined]

        def bare(node: Function) -> Function:
            node.decorator_list = []
            return node

        files = tree.reshaped(place, bare)
        hits = both(me, lambda n: bool(n.decorators))
        yield Mutation("its decorator removed", f"{module}:{name}", files, hits)


def _parameters(tree: Tree, module: str, name: str, place: Place) -> Iterator[Mutation]:
    me = named(module, name)
    node = place.node
    assert isinstance(node, Function)
    skip = int(place.holder is not None)
    params = node.args.args[skip:]

    def one(
        kind: str, change: Callable[[Function], ast.AST | str], hits: Callable[[Need], bool]
    ) -> Mutation:
        return Mutation(kind, f"{module}:{name}", tree.reshaped(place, change), both(me, hits))

    def checked(need: Need) -> bool:
        return need.params is not None

    def required_added(n: Function) -> Function:
        n.args.kwonlyargs.append(ast.arg("shard"))
        n.args.kw_defaults.append(None)
        return n

    def optional_added(n: Function) -> Function:
        n.args.kwonlyargs.append(ast.arg("shard"))
        n.args.kw_defaults.append(ast.Constant(None))
        return n

    yield one("a required parameter added", required_added, checked)
    yield one("an optional parameter added", optional_added, lambda n: n.exact)

    def keywords_taken(n: Function) -> Function:
        n.args.kwarg = ast.arg("further")
        return n

    if node.args.kwarg is None:
        yield one("takes any keyword", keywords_taken, lambda n: n.exact)

    def put_first(n: Function) -> Function:
        n.args.args.insert(skip, ast.arg("shard"))
        if len(n.args.defaults) == len(n.args.args) - 1 - skip:
            n.args.defaults.insert(0, ast.Constant(None))
        return n

    is_required = len(node.args.defaults) < len(params)
    yield one(
        "a parameter put first",
        put_first,
        lambda n: bool(leading(n)) or n.exact or (checked(n) and is_required),
    )
    if not params:
        return
    first, last = params[0].arg, params[-1].arg

    def first_renamed(n: Function) -> Function:
        n.args.args[skip].arg = f"{first}_v2"
        n.body.insert(0, ast.parse(f"{first} = {first}_v2").body[0])
        return n

    def last_removed(n: Function) -> Function:
        n.args.args.pop()
        n.args.defaults = n.args.defaults[:-1]
        n.body.insert(0, ast.parse(f"{last} = None").body[0])
        return n

    def by_position_only(n: Function) -> Function:
        n.args.posonlyargs, n.args.args = n.args.args[: skip + 1], n.args.args[skip + 1 :]
        return n

    def by_keyword_only(n: Function) -> Function:
        split = len(n.args.args) - len(n.args.defaults)
        defaults = [None] * (split - skip) + n.args.defaults
        n.args.kwonlyargs = n.args.args[skip:] + n.args.kwonlyargs
        n.args.kw_defaults = [*defaults, *n.args.kw_defaults]
        n.args.args, n.args.defaults = n.args.args[:skip], []
        return n

    yield one(
        "its first parameter renamed",
        first_renamed,
        lambda n: first in all_params(n) or (checked(n) and is_required),
    )
    yield one("its last parameter removed", last_removed, lambda n: last in all_params(n))
    yield one(
        "its first parameter by position only",
        by_position_only,
        lambda n: first in all_params(n),
    )
    yield one("its parameters by keyword only", by_keyword_only, lambda n: bool(leading(n)))
    if len(params) > 1:
        second = params[1].arg

        def swapped(n: Function) -> Function:
            args = n.args.args
            args[skip], args[skip + 1] = args[skip + 1], args[skip]
            return n

        yield one(
            "its first parameters swapped",
            swapped,
            lambda n: bool({first, second} & {*leading(n)}),
        )
    if node.args.defaults:

        def other_default(n: Function) -> Function:
            n.args.defaults[-1] = ast.Constant("changed")
            return n

        def no_defaults(n: Function) -> Function:
            n.args.defaults = []
            return n

        yield one("its last default changed", other_default, lambda n: _names_default(n, last))
        optional = [p.arg for p in params[-len(node.args.defaults) :]]
        yield one(
            "its defaults removed",
            no_defaults,
            either(
                lambda n: any(_names_default(n, p) for p in optional),
                lambda n: checked(n) and bool({*optional} - {*all_params(n)}),
            ),
        )


def _names_default(need: Need, param: str) -> bool:
    return any(p.startswith(f"{param}=") for p in need.params or ())
