"""One module of oMLX, read once, and whether it meets what a row needs of it.

The source is parsed and never imported. One flat pass lists each binding of each name in
the order of the file: definitions, imports, assignments, the members of classes, and what
``__init__`` sets on its instance. A binding in a branch, a loop or an ``except`` may not
happen; those from the last certain one onwards are what the name may stand for once the
module has been imported, and every one of them has to fit. What this pass does not follow
(an inherited member, two classes of one name, an unknown decorator) does not fit: a
feature too few is better than one on code that is not what it seems.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from omlx_admission.hooks.patching.needs import Kind, Need

Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Decorators after which a function or a class is still what it was.
_HARMLESS = frozenset({"override", "final", "deprecated"})
_HARMLESS_ON_CLASS = _HARMLESS | {"dataclass", "runtime_checkable", "total_ordering"}

#: Packages in oMLX that our own changes (`patches/`) import their decorators from; these
#: keep a function's name, kind and parameters.
_OURS = frozenset({"admission", "gpu_turn"})


@dataclass(frozen=True)
class _Binding:
    node: ast.AST
    certain: bool


class Module:
    """The bindings of one module."""

    def __init__(self, source: bytes) -> None:
        """Read it.

        Raises:
            SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
        """
        self._tree = ast.parse(source)
        self._lines = source.splitlines()
        self._bound: dict[str, list[_Binding]] = {}
        self._read(self._tree.body, None, True)

    def node(self, name: str) -> ast.AST | None:
        """What a dotted name surely stands for; None where that is not one thing."""
        last = self._last(name)
        return last[0].node if len(last) == 1 and last[0].certain else None

    def has(self, name: str) -> bool:
        """Whether a dotted name may be there."""
        return name in self._bound

    def problem(self, need: Need) -> str | None:
        """Why ``need`` is not met, or None when it is."""
        if need.kind is Kind.USED:
            used = need.name in self._names_read
            return None if used else f"{need.module} does not use {need.name}"
        if need.kind is Kind.JOBS:
            return self._jobs_problem(need)
        owner = need.name.rpartition(".")[0]
        if owner and (problem := self._owner_problem(need, owner)) is not None:
            return problem
        last = self._last(need.name)
        if not need.optional:
            if not last:
                return f"{need} is missing"
            if not last[0].certain:
                return f"{need} is there only under a condition"
        problems = (self._shape_problem(need, binding.node) for binding in last)
        return next((text for text in problems if text is not None), None)

    # --- the pass over the statements -----------------------------------------------------

    def _read(self, body: Sequence[ast.stmt], owner: ast.ClassDef | None, sure: bool) -> None:
        prefix = f"{owner.name}." if owner is not None else ""
        for node in body:
            if isinstance(node, ast.AnnAssign) and node.value is None:
                # It binds nothing, but is a field of a dataclass.
                names = _targets(node.target) if owner and _is_dataclass(owner) else []
            else:
                names = _bound_by(node)
            for name in names:
                self._bound.setdefault(prefix + name, []).append(_Binding(node, sure))
            if isinstance(node, ast.ClassDef) and owner is None:
                self._read(node.body, node, True)
                self._read_init(node)
            elif isinstance(node, ast.If):
                known = _known(node.test)
                if known is not False:
                    self._read(node.body, owner, sure and known is True)
                if known is not True:
                    self._read(node.orelse, owner, sure and known is False)
            elif isinstance(node, ast.Try | ast.TryStar):
                self._read(node.body, owner, sure)
                for handler in node.handlers:
                    self._read(handler.body, owner, False)
                self._read([*node.orelse, *node.finalbody], owner, sure)
            elif isinstance(node, ast.With | ast.AsyncWith):
                self._read(node.body, owner, sure)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                self._read([*node.body, *node.orelse], owner, False)
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self._read(case.body, owner, False)

    def _read_init(self, owner: ast.ClassDef) -> None:
        """Attributes of an instance, where the class itself has none of that name."""
        init = self.node(f"{owner.name}.__init__")
        if not isinstance(init, ast.FunctionDef) or not init.args.args:
            return
        me, found = f"{init.args.args[0].arg}.", dict[str, list[_Binding]]()
        for node in _own_nodes(init):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for name in _bound_by(node):
                    if name.startswith(me):
                        values = found.setdefault(name.removeprefix(me), [])
                        # Whichever is the last one: each has to fit.
                        values.append(_Binding(node, certain=not values))
        for name, values in found.items():
            self._bound.setdefault(f"{owner.name}.{name}", values)

    def _last(self, name: str) -> list[_Binding]:
        """What a name may stand for in the end; the first is certain where one is."""
        bindings = self._bound.get(name, [])
        certain = [at for at, binding in enumerate(bindings) if binding.certain]
        return bindings[certain[-1] :] if certain else bindings

    # --- rows about the module's own code -------------------------------------------------

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self._tree))

    @cached_property
    def _names_read(self) -> frozenset[str]:
        return frozenset(
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in self._nodes
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
        )

    def _jobs_problem(self, need: Need) -> str | None:
        """Why the jobs for the executor that ``need.name`` gives are not all known."""
        kept = {
            name
            for node in self._nodes
            if isinstance(node, ast.Assign) and _calls(node.value, need.name)
            for name in _bound_by(node)
        }
        jobs = [
            _job_name(job)
            for node in self._nodes
            for executor, job in _handed(node)
            if _calls(executor, need.name)
            or (isinstance(executor, ast.Name) and executor.id in kept)
        ]
        unknown = [name for name in dict.fromkeys(jobs) if name not in need.jobs]
        if unknown:
            return f"{need.module} hands the unknown {', '.join(unknown)} to {need.name}"
        return None if jobs else f"{need.module} hands no job to {need.name}"

    # --- what a name stands for -----------------------------------------------------------

    def _owner_problem(self, need: Need, owner: str) -> str | None:
        """Why the class that holds a name may hold something else than its body says."""
        bindings = self._bound.get(owner, [])
        if not bindings:
            return None if need.optional else f"{need.module}:{owner} is missing"
        if len(bindings) > 1:
            return f"{need}: {owner} is bound more than once"
        if not isinstance(bindings[0].node, ast.ClassDef):
            if need.optional:
                return f"{need}: {owner} is not defined in {need.module}"
            return f"{need.module}:{owner} is missing"
        if not (bindings[0].certain or need.optional):
            return f"{need.module}:{owner} is there only under a condition"
        return _class_problem(need, bindings[0].node)

    def _shape_problem(self, need: Need, node: ast.AST) -> str | None:
        if need.kind is Kind.NAME:
            return None
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None) or "elsewhere"
            return f"{need} may come from {source}, expected a {need.kind.value} here"
        actual = self._kind(node)
        if actual is None:
            return f"{need} is replaced at line {getattr(node, 'lineno', '?')}"
        if actual is not need.kind:
            return f"{need} is a {actual.value}, expected a {need.kind.value}"
        if isinstance(node, Function):
            return self._function_problem(need, node)
        if isinstance(node, ast.ClassDef):
            return _class_problem(need, node) or _kind_problem(need, node)
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        return _value_problem(need, node)

    def _kind(self, node: ast.AST) -> Kind | None:
        if isinstance(node, ast.ClassDef):
            return Kind.CLASS
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return Kind.VALUE
        if not isinstance(node, Function):
            return None
        if any(_last_name(decorator) == "classmethod" for decorator in node.decorator_list):
            return Kind.CLASS_METHOD
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        yields = any(b"yield" in line for line in lines) and any(
            isinstance(inner, ast.Yield | ast.YieldFrom) for inner in _own_nodes(node)
        )
        if isinstance(node, ast.AsyncFunctionDef):
            return Kind.ASYNC_GENERATOR if yields else Kind.ASYNC
        return Kind.GENERATOR if yields else Kind.SYNC

    def _function_problem(self, need: Need, node: Function) -> str | None:
        for decorator in node.decorator_list:
            if need.kind is Kind.CLASS_METHOD and _last_name(decorator) == "classmethod":
                continue
            called = _called(decorator)
            if _last_name(called) not in _HARMLESS and not self._is_ours(called):
                return f"{need} is decorated by {ast.unparse(decorator)}"
        if need.returns is not None and node.returns is not None:
            text = ast.unparse(node.returns)
            if not is_one_of(text, need.returns):
                return f"{need} returns {text}, expected {' or '.join(need.returns)}"
        return None if need.params is None else _parameter_problem(need, need.params, node)

    def _is_ours(self, node: ast.expr) -> bool:
        root = ast.unparse(node).partition(".")[0]
        imports = [b.node for b in self._last(root) if isinstance(b.node, ast.ImportFrom)]
        return any(
            _OURS & {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            for node in imports
        )


# --- statements ---------------------------------------------------------------------------


def _bound_by(node: ast.stmt) -> list[str]:
    """Names that a statement binds or deletes, as it writes them: ``x`` or ``x.y``."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign | ast.Delete):
        return [name for target in node.targets for name in _targets(target)]
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        return _targets(node.target)
    if isinstance(node, ast.With | ast.AsyncWith):
        return [n for item in node.items if (t := item.optional_vars) for n in _targets(t)]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if _last_name(call.func) in ("setattr", "delattr") and len(call.args) >= 2:
            owner, name = call.args[:2]
            if isinstance(owner, ast.Name) and isinstance(name, ast.Constant):
                return [f"{owner.id}.{name.value!s}"]
    return []


def _targets(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        return [f"{target.value.id}.{target.attr}"]
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return [name for item in target.elts for name in _targets(item)]
    return []


def _known(test: ast.expr) -> bool | None:
    """What a test is when oMLX runs, where that is plain."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    return False if _last_name(test) == "TYPE_CHECKING" else None


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function's body, functions and classes in it left out."""
    todo: list[ast.AST] = list(reversed(function.body))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


def _last_name(node: ast.AST) -> str | None:
    """``c`` of ``a.b.c``; None for what is no dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _called(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


# --- jobs ---------------------------------------------------------------------------------


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == name


def _handed(call: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Executor and job of a call that hands one to the other."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        if call.func.attr == "run_in_executor" and len(call.args) >= 2:
            yield call.args[0], call.args[1]
        elif call.func.attr == "submit" and call.args:
            yield call.func.value, call.args[0]


def _job_name(node: ast.expr) -> str:
    """The name that a job goes by: its function's; of a lambda, what it calls."""
    if _calls(node, "partial") and isinstance(node, ast.Call) and node.args:
        return _job_name(node.args[0])
    if isinstance(node, ast.Lambda):
        calls = [n.func for n in ast.walk(node.body) if isinstance(n, ast.Call)]
        names = [name for func in calls if (name := _last_name(func)) is not None]
        return "clear_cache" if "clear_cache" in names else next(iter(names), "lambda")
    return _last_name(node) or ast.unparse(node)


# --- shapes -------------------------------------------------------------------------------


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(_last_name(_called(d)) == "dataclass" for d in node.decorator_list)


def _class_problem(need: Need, node: ast.ClassDef) -> str | None:
    """Why what a class holds may not be what its body says."""
    for decorator in node.decorator_list:
        if _last_name(_called(decorator)) not in _HARMLESS_ON_CLASS:
            return f"{need}: the class {node.name} is decorated by {ast.unparse(decorator)}"
    for keyword in node.keywords:
        if _last_name(keyword.value) != "ABCMeta":
            return f"{need}: the class {node.name} is made with {ast.unparse(keyword)}"
    return None


def _kind_problem(need: Need, node: ast.ClassDef) -> str | None:
    bases = tuple(_last_name(base) or ast.unparse(base) for base in node.bases)
    if need.bases not in (None, bases):
        expected = ", ".join(need.bases or ())
        return f"{need} is a kind of ({', '.join(bases)}), expected ({expected})"
    slots = any("__slots__" in _bound_by(statement) for statement in node.body)
    if slots or any("slots=True" in ast.unparse(d) for d in node.decorator_list):
        return f"{need} has slots and takes no further attribute"
    return None


def _value_problem(need: Need, node: ast.Assign | ast.AnnAssign) -> str | None:
    if need.types is None:
        return None
    written = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else "Any"
    type_ = _made(node.value) if written == "Any" else written
    if type_ is None or is_one_of(type_, need.types):
        return None
    return f"{need} is of type {type_}, expected {' or '.join(need.types)}"


def _made(value: ast.expr | None) -> str | None:
    """The type of a value that has no annotation, where its source says it."""
    if isinstance(value, ast.Constant) and value.value is not None:
        return type(value.value).__name__
    if isinstance(value, ast.Call):
        return ast.unparse(value.func)
    return "dict" if isinstance(value, ast.Dict | ast.DictComp) else None


def _parameter_problem(need: Need, params: tuple[str, ...], node: Function) -> str | None:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    plain = [None] * (len(positional) - len(arguments.defaults))
    given = dict(zip([a.arg for a in positional], [*plain, *arguments.defaults], strict=True))
    keyword = [a.arg for a in arguments.kwonlyargs]
    given |= dict(zip(keyword, arguments.kw_defaults, strict=True))
    defaults = {n: None if d is None else ast.unparse(d) for n, d in given.items()}
    leading = list(defaults)[: len(positional)]
    if "." in need.name:
        if not leading or leading[0] not in ("self", "cls"):
            return f"{need} takes no self"
        del defaults[leading.pop(0)]
    shown = [n if default is None else f"{n}={default}" for n, default in defaults.items()]
    takes = f"{need} takes ({', '.join(shown)})"

    wanted, _, named = ",".join(params).partition("*")
    in_place = [p.partition("=")[0] for p in wanted.split(",") if p]
    by_name = [p.partition("=")[0] for p in named.split(",") if p]
    only_in_place = {a.arg for a in arguments.posonlyargs}
    fits = leading[: len(in_place)] == in_place and {*in_place, *by_name} <= {*defaults}
    asked = [p.split("=", 1) for p in params if "=" in p]
    if (
        not fits
        or only_in_place & {*in_place, *by_name}
        or any(defaults.get(name) != default for name, default in asked)
    ):
        return f"{takes}, expected ({', '.join(params)})"
    further = [name for name in defaults if name not in {*in_place, *by_name}]
    if need.exact and (further or arguments.vararg or arguments.kwarg):
        return f"{takes}, expected no more than ({', '.join(params)})"
    unknown = [name for name in further if defaults[name] is None]
    return f"{need} requires the unknown ({', '.join(unknown)})" if unknown else None


# --- types --------------------------------------------------------------------------------

#: What is written before a name, and names of before Python 3.9.
_BEFORE = re.compile(r"['\"\s]|\b\w+\.(?=\w)")
_OLD = re.compile(r"\b(Dict|List|Set|Tuple|Type)\b")


def is_one_of(annotation: str, wanted: Sequence[str]) -> bool:
    """Whether ``annotation`` means one of ``wanted``, where ``X[...]`` is any kind of X."""
    actual = _alternatives(annotation)
    for text in wanted:
        kind = text.removesuffix("[...]")
        if "." in kind:  # two modules have a name like that
            if annotation == text:
                return True
            continue
        if actual == _alternatives(text):
            return True
        if kind != text and len(actual) == 1 and min(actual).partition("[")[0] == kind:
            return True
    return False


def _alternatives(text: str) -> frozenset[str]:
    """The parts of a union, by last names, however it is written."""
    text = _OLD.sub(lambda match: match[0].lower(), _BEFORE.sub("", text))
    if text.startswith("Optional[") and text.endswith("]"):
        text = f"{text[9:-1]}|None"
    separator = "|"
    if text.startswith("Union[") and text.endswith("]"):
        text, separator = text[6:-1], ","
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return frozenset(parts)
