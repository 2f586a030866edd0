"""What a module hands to an executor, by its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from omlx_admission.hooks.needs import Need
from omlx_admission.hooks.source_names import last_name

_CLEAR = "clear_cache"


def jobs_problem(need: Need, tree: ast.Module) -> str | None:
    """Why the module's jobs for the executor that ``need.name`` gives are not all known."""
    getter, kept, seen = need.name, set[str](), set[ast.AST]()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Assign) and _gives(node.value, getter, seen):
            kept |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    found = []
    for call in nodes:
        executor, job = _handed(call)
        if job is None or executor is None:
            continue
        is_kept = isinstance(executor, ast.Name) and executor.id in kept
        if is_kept or _gives(executor, getter, seen):
            found.append(job_name(job))
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) == getter:
            if node in seen:
                continue
            return f"{need} gives its executor away at line {node.lineno}"
    if not found:
        return f"{need.module} hands no job to {getter}"
    unknown = [name for name in dict.fromkeys(found) if name not in need.jobs]
    if unknown:
        return f"{need.module} hands the unknown {', '.join(unknown)} to {getter}"
    return None


def _gives(node: ast.AST, getter: str, seen: set[ast.AST]) -> bool:
    if isinstance(node, ast.Call) and last_name(node.func) == getter:
        seen.add(node.func)
        return True
    return False


def _handed(call: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """Executor and job of a call that hands one to the other."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None, None
    if call.func.attr == "run_in_executor" and len(call.args) >= 2:
        return call.args[0], call.args[1]
    if call.func.attr == "submit" and call.args:
        return call.func.value, call.args[0]
    return None, None


def job_name(node: ast.expr) -> str:
    """The name that a job goes by: its function's; of a lambda, what it calls."""
    if isinstance(node, ast.Call) and last_name(node.func) == "partial" and node.args:
        return job_name(node.args[0])
    if isinstance(node, ast.Lambda):
        called = list(_called(node.body))
        return _CLEAR if _CLEAR in called else next(iter(called), ast.unparse(node))
    return last_name(node) or ast.unparse(node)


def _called(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and (name := last_name(child.func)) is not None:
            yield name
