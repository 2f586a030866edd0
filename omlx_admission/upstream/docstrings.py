"""Edits of docstrings, which a change has made untrue or incomplete.

A docstring that is not there, or says it otherwise, is left as it is: no change fails
for the words round it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from omlx_admission.upstream.anchors import docstring_length, function, has
from omlx_admission.upstream.editing import change_function


def reword(module: cst.Module, name: str, old: str, new: str) -> cst.Module:
    """Say ``new`` where the docstring of the function ``name`` says ``old``, once."""

    def change(text: str) -> str:
        return text.replace(old, new) if text.count(old) == 1 else text

    return _change(module, name, change)


def add_raises(module: cst.Module, name: str, line: str) -> cst.Module:
    """Put ``line`` last into the section ``Raises:`` of a docstring that ends with it."""

    def change(text: str) -> str:
        found = re.search(r"\n( *)Raises:\n(?:\1 +.*\n)+ *\"{3}$", text)
        if found is None:
            return text
        end = text.rindex("\n")
        return f"{text[:end]}\n{found.group(1)}    {line}{text[end:]}"

    return _change(module, name, change)


def _change(module: cst.Module, name: str, change: Callable[[str], str]) -> cst.Module:
    if not has(module, name) or not docstring_length(function(module, name).body.body):
        return module

    def in_function(node: cst.FunctionDef) -> cst.FunctionDef:
        first = node.body.body[0]
        assert isinstance(first, cst.SimpleStatementLine)
        expression = first.body[0]
        assert isinstance(expression, cst.Expr)
        value = expression.value
        if not isinstance(value, cst.SimpleString):
            return node
        return node.with_deep_changes(value, value=change(value.value))

    return change_function(module, name, in_function)
