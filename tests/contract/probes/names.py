"""Prints the shape of everything the plugin's hooks hold on to.

``{"omlx.module:Name.attribute": {"kind": ..., "parameters": [...]}}``, where a
parameter is its name, with ``=`` when it may be left out and ``*`` before
keyword-only ones.
"""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

SHAPES = Path(__file__).parent.parent / "shapes.txt"


def names():
    module = ""
    for line in SHAPES.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif "|" in line and not line.startswith("#"):
            yield f"{module}:{line.split('|')[0].strip()}"


def parameters(value):
    found, keyword_only = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            found.append("*")
        default = "" if parameter.default is parameter.empty else "="
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        found.append(star.get(parameter.kind, "") + parameter.name + default)
        keyword_only = keyword_only or parameter.kind is parameter.VAR_POSITIONAL
    return found


def describe(value):
    if dataclasses.is_dataclass(value):
        return {
            "kind": "dataclass",
            "fields": [field.name for field in dataclasses.fields(value)],
        }
    if inspect.isclass(value):
        return {"kind": "class", "bases": [base.__name__ for base in value.__mro__[1:]]}
    if inspect.iscoroutinefunction(value):
        return {"kind": "coroutine", "parameters": parameters(value)}
    if inspect.isasyncgenfunction(value):
        return {"kind": "generator", "parameters": parameters(value)}
    if inspect.isroutine(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": type(value).__name__, "value": repr(value)}


def main():
    found = {}
    for name in names():
        module, _, path = name.partition(":")
        try:
            value = importlib.import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            continue
        found[name] = describe(value)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
