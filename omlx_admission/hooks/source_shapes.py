"""Whether what a name stands for has the shape that a hook needs."""

from __future__ import annotations

import ast

from omlx_admission.hooks.needs import Kind, Need
from omlx_admission.hooks.source_names import is_dataclass, last_name, own_nodes
from omlx_admission.hooks.source_types import is_one_of

#: Decorators after which a function or class is still what it was.
_HARMLESS = frozenset({"override", "final", "deprecated"})
_HARMLESS_ON_CLASS = _HARMLESS | {"dataclass", "runtime_checkable", "total_ordering"}

#: What our own changes (`patches/`) put round functions that hooks wrap as well: they
#: keep their names, kinds and parameters.
_OF_CHANGES = frozenset(
    {
        "announced",
        "leased_for_request",
        "noticed",
        "released_by_request",
        "remembers_refusal",
        "watched",
    }
    | {f"gpu_turn.{name}" for name in ("ahead", "burst", "clean_up", "one_turn", "vision")}
)


def shape_problem(need: Need, node: ast.AST) -> str | None:
    """Why ``node`` does not meet ``need``, or None where it does."""
    if need.kind is Kind.NAME:
        return None
    if isinstance(node, ast.Import | ast.ImportFrom):
        source = getattr(node, "module", None) or "elsewhere"
        return f"{need} may come from {source}, expected a {need.kind.value} here"
    actual = {
        ast.FunctionDef: Kind.SYNC,
        ast.AsyncFunctionDef: Kind.ASYNC,
        ast.ClassDef: Kind.CLASS,
        ast.Assign: Kind.VALUE,
        ast.AnnAssign: Kind.VALUE,
    }.get(type(node))
    if actual is None:
        return f"{need} is replaced at line {getattr(node, 'lineno', '?')}"
    if actual is not need.kind:
        return f"{need} is a {actual.value}, expected a {need.kind.value}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _function_problem(need, node)
    if isinstance(node, ast.ClassDef):
        return _class_problem(need, node) or holder_problem(need, node)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return _value_problem(need, node)
    return None


def holder_problem(need: Need, node: ast.ClassDef) -> str | None:
    """Why what the class ``node`` holds may not be what its body says."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if last_name(called) not in _HARMLESS_ON_CLASS:
            return f"{need}: the class {node.name} is decorated by {ast.unparse(decorator)}"
    for keyword in node.keywords:
        if last_name(keyword.value) != "ABCMeta":
            return f"{need}: the class {node.name} is made with {ast.unparse(keyword)}"
    return None


def _function_problem(need: Need, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called) in _OF_CHANGES:
            continue
        if last_name(called) not in _HARMLESS | {*need.decorators}:
            return f"{need} is decorated by {ast.unparse(decorator)}"
    present = {last_name(d) for d in node.decorator_list}
    for wanted in need.decorators:
        if wanted not in present:
            return f"{need} is no {wanted}"
    yields = any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in own_nodes(node))
    if yields is not need.generator:
        return f"{need} is {'a' if yields else 'no'} generator"
    if need.returns is not None and not _is_annotated(node.returns, need.returns):
        return f"{need} returns {_text(node.returns)}, expected {' or '.join(need.returns)}"
    problem = _reads_problem(need, node)
    if problem is None and need.params is not None:
        problem = _parameter_problem(need, need.params, node)
    if problem is None and need.awaits is not None:
        problem = _await_problem(need, need.awaits, node)
    return problem


def _is_annotated(annotation: ast.expr | None, wanted: tuple[str, ...]) -> bool:
    """Whether an annotation, if there is one, means one of ``wanted``."""
    return annotation is None or is_one_of(annotation, wanted)


def _text(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation).strip("'\"") if annotation is not None else "nothing"


def _reads_problem(need: Need, node: ast.AST) -> str | None:
    if not need.without:
        return None
    for child in ast.walk(node):
        if isinstance(child, ast.Name | ast.Attribute) and last_name(child) in need.without:
            return f"{need} uses {last_name(child)}, which it has to do without"
    return None


def _await_problem(need: Need, names: tuple[str, ...], node: ast.AST) -> str | None:
    for child in ast.walk(node):
        if isinstance(child, ast.AsyncFor | ast.AsyncWith):
            return f"{need} awaits in a loop or a with statement"
        if not isinstance(child, ast.Await):
            continue
        called = child.value.func if isinstance(child.value, ast.Call) else child.value
        name = last_name(called) or ast.unparse(called)
        if name not in names:
            return f"{need} awaits {name}, expected only {', '.join(names)}"
    return None


def _parameter_problem(
    need: Need, params: tuple[str, ...], node: ast.FunctionDef | ast.AsyncFunctionDef
) -> str | None:
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    by_position_only = {a.arg for a in arguments.posonlyargs}
    plain = [None] * (len(positional) - len(arguments.defaults))
    defaults: dict[str, ast.expr | None] = dict(
        zip(positional, [*plain, *arguments.defaults], strict=True)
    )
    if "." in need.name and "staticmethod" not in need.decorators:
        if not positional or positional[0] not in ("self", "cls"):
            return f"{need} takes no self"
        positional = positional[1:]
    keyword = [a.arg for a in arguments.kwonlyargs]
    defaults |= dict(zip(keyword, arguments.kw_defaults, strict=True))
    takes = f"{need} takes ({', '.join(_shown(n, defaults) for n in (*positional, *keyword))})"

    at = params.index("*") if "*" in params else len(params)
    leading = [p.partition("=")[0] for p in params[:at]]
    named = [p.partition("=")[0] for p in params[at + 1 :]]
    if positional[: len(leading)] != leading or by_position_only & {*leading}:
        return f"{takes}, expected ({', '.join(params)})"
    if not {*named} <= {*positional, *keyword} - by_position_only:
        return f"{takes}, expected ({', '.join(params)})"
    for param in params:
        name, has_default, default = param.partition("=")
        actual = defaults.get(name)
        if has_default and (actual is None or ast.unparse(actual) != default):
            return f"{takes}, expected ({', '.join(params)})"
    given = {*leading, *named}
    further = [name for name in (*positional, *keyword) if name not in given]
    if need.exact and (further or arguments.vararg or arguments.kwarg):
        return f"{takes}, expected no more than ({', '.join(params)})"
    unknown = [name for name in further if defaults.get(name) is None]
    if unknown:
        return f"{need} requires the unknown ({', '.join(unknown)})"
    return None


def _shown(name: str, defaults: dict[str, ast.expr | None]) -> str:
    default = defaults.get(name)
    return name if default is None else f"{name}={ast.unparse(default)}"


def _class_problem(need: Need, node: ast.ClassDef) -> str | None:
    if need.bases is not None:
        actual = tuple(last_name(base) or ast.unparse(base) for base in node.bases)
        if actual != need.bases:
            return (
                f"{need} is a kind of ({', '.join(actual)}), expected ({', '.join(need.bases)})"
            )
    if need.attachable:
        slots = any(
            isinstance(s, ast.Assign | ast.AnnAssign)
            and "__slots__" in ast.unparse(s).partition("=")[0]
            for s in node.body
        )
        decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
        if slots or (is_dataclass(node) and "slots=True" in decorators):
            return f"{need} has slots and takes no further attribute"
    return None


def _value_problem(need: Need, node: ast.Assign | ast.AnnAssign) -> str | None:
    annotation = getattr(node, "annotation", None)
    if need.types is not None and not _is_annotated(annotation, need.types):
        return f"{need} is of type {_text(annotation)}, expected {' or '.join(need.types)}"
    if need.made_by is None:
        return None
    value = node.value
    made_by = "nothing"
    if isinstance(value, ast.Call):
        # `dict[str, X]()` makes a dict; whether `a.dict()` does, nobody knows.
        maker = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        made_by = ast.unparse(maker)
    elif isinstance(value, ast.Dict | ast.DictComp):
        made_by = "dict"
    elif value is not None:
        made_by = ast.unparse(value)
    if made_by in need.made_by or (not need.made_by and made_by not in ("nothing", "None")):
        return None
    expected = " or ".join(need.made_by) or "something"
    return f"{need} is made by {made_by}, expected {expected}"
