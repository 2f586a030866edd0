"""Our own modules as modules of oMLX's, rewritten by rule: they follow ours and cannot drift.

A recipe says what is left out and what is called otherwise there. A rule that
matches nothing any more is an error: ours has changed, and the recipe must too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import libcst as cst

import omlx_admission
from omlx_admission.upstream import style
from omlx_admission.upstream.anchors import docstring_length, find
from omlx_admission.upstream.imports import tidy_imports
from omlx_admission.upstream.package import LICENSE
from omlx_admission.upstream.rewriting import (
    Recipe,
    Rename,
    Rewriter,
    StaleRecipe,
    is_import,
    name_of,
)

__all__ = ["LICENSE", "Recipe", "StaleRecipe", "as_decorator", "as_method", "transplant"]

_ROOT = Path(omlx_admission.__file__).parent

_RELATIVE = re.compile(r"^(?P<indent> *)from (?P<dots>\.+)(?P<module>[\w.]*) ", re.MULTILINE)


def source(name: str) -> cst.Module:
    """One of our modules (``core.policy.planner``), parsed, not imported.

    Its relative imports are spelled out.
    """
    text = _ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")
    package = ("omlx_admission." + name).split(".")

    def whole(found: re.Match[str]) -> str:
        above = ".".join(package[: -len(found["dots"])])
        return (
            f"{found['indent']}from {above}{'.' if found['module'] else ''}{found['module']} "
        )

    return cst.parse_module(_RELATIVE.sub(whole, text))


def transplant(recipe: Recipe, modules: Mapping[str, str]) -> str:
    """The text of the new module.

    Args:
        modules: our modules to their names in the new package, for imports. An import
            of ours that is not among them must be unused after the rewriting.

    Raises:
        StaleRecipe: a rule matches nothing.
    """
    module = source(recipe.source)
    if recipe.append is not None:
        extra = find(source(recipe.append[0]), recipe.append[1])
        module = module.with_changes(body=[*module.body, extra])
    if recipe.keep:
        module = _keep(module, recipe.keep)
    rewriter = Rewriter(recipe)
    module = module.visit(rewriter)
    rewriter.check()
    own = {name_of(s) for s in cst.parse_module(recipe.prepend).body}
    module = module.with_changes(body=tidy_imports(module, modules, recipe.imports, own))
    text = _for_others(module.code)
    for old, new in recipe.text.items():
        if old not in text:
            raise StaleRecipe(f"{recipe.source}: no {old!r} in it")
        text = text.replace(old, new)
    for ours, theirs in sorted(modules.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"omlx_admission.{ours}", f"omlx.admission.{theirs}")
    if recipe.prepend:
        text = _behind_imports(text, recipe.prepend)
    return style.file(LICENSE + text)


def _for_others(code: str) -> str:
    """Without what only this project reads: numbers of its cases, its linter's exceptions."""
    code = re.sub(r"\s*\(B\d\d(?:, B\d\d)*\)", "", code)
    return re.sub(r"  # noqa: .*$", "", code, flags=re.MULTILINE)


def as_method(
    name: str,
    definition: str,
    *,
    signature: str,
    rewrite: Mapping[str, str | None],
    doc: str | None = None,
) -> str:
    """One of our functions on a pool as the code of a method of the pool.

    Args:
        signature: the method's ``def`` without its colon; ``pool`` becomes ``self``.
        rewrite: as in :class:`Recipe`.
        doc: the docstring, where it has to say something else.

    Raises:
        StaleRecipe: a rule matches nothing.
    """
    node = find(source(name), definition)
    rewriter = Rewriter(Recipe(name, rewrite=rewrite))
    module = cst.Module([node]).visit(rewriter)
    rewriter.check()
    (node,) = module.visit(Rename("pool", "self")).body  # type: ignore[assignment]
    shell = cst.parse_statement(f"{signature}: pass")
    assert isinstance(node, cst.FunctionDef)
    assert isinstance(shell, cst.FunctionDef)
    body = list(node.body.body)
    if doc is not None:
        body[: docstring_length(body)] = style.statements(f'"""{doc}"""', 1)
    return cst.Module([shell.with_changes(body=node.body.with_changes(body=body))]).code


def as_decorator(name: str, definition: str, *, called: str, doc: str) -> str:
    """One of our wrappers as a decorator of a coroutine method of the pool."""
    node = find(source(name), definition)
    rules = {"wrapped(*args, **kwargs)": "method(pool, *args, **kwargs)"}
    rewriter = Rewriter(Recipe(name, rewrite=rules))
    (node,) = cst.Module([node]).visit(rewriter).body  # type: ignore[assignment]
    rewriter.check()
    shell = cst.parse_module(
        f"def {called}(method):\n"
        f'    """{doc}"""\n\n'
        "    @functools.wraps(method)\n"
        "    async def wrapper(pool, *args, **kwargs):\n"
        "        pass\n\n"
        "    return wrapper\n"
    )
    body = list(node.body.body)
    inner = find(shell, f"{called}.wrapper")
    filled = inner.body.with_changes(body=body[docstring_length(body) :])
    whole = shell.deep_replace(inner.body, filled)
    assert isinstance(whole, cst.Module)
    return whole.code


def _keep(module: cst.Module, names: Sequence[str]) -> cst.Module:
    body = [
        s
        for index, s in enumerate(module.body)
        if is_import(s) or name_of(s) in names or (index == 0 and name_of(s) is None)
    ]
    missing = set(names) - {name_of(s) for s in body}
    if missing:
        raise StaleRecipe(f"nothing named {', '.join(sorted(missing))} to keep")
    return module.with_changes(body=body)


def _behind_imports(text: str, code: str) -> str:
    module = cst.parse_module(text)
    body = list(module.body)
    at = max((i for i, s in enumerate(body) if is_import(s)), default=-1) + 1
    new = style.statements(code, 0)
    new[0] = new[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return module.with_changes(body=[*body[:at], *new, *body[at:]]).code
