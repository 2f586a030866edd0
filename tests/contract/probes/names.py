"""Prints what the names in ``OMLX_NAMES`` are in the imported oMLX.

``[["omlx.module", "Class.member"], ...]`` in, ``{"omlx.module:Class.member": {"kind": ...}}``
out, in the words of `hooks.patching.needs`; a class has its bases, a function its
parameters, those by keyword only after a ``*``. What is missing is left out.
"""

import importlib
import inspect
import json
import os


def parameters(value):
    found = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            found.append(parameter.name)
    return found


def describe(value):
    if inspect.isclass(value):
        return {"kind": "class", "bases": [base.__name__ for base in value.__bases__]}
    if not inspect.isroutine(value):
        return {"kind": "module or class attribute"}
    kind = "class method" if inspect.isclass(getattr(value, "__self__", None)) else "function"
    if inspect.iscoroutinefunction(value):
        kind = "coroutine function"
    elif inspect.isasyncgenfunction(value):
        kind = "asynchronous generator function"
    elif inspect.isgeneratorfunction(value):
        kind = "generator function"
    return {"kind": kind, "parameters": parameters(value)}


def main():
    found = {}
    for module, path in json.loads(os.environ["OMLX_NAMES"]):
        try:
            value = importlib.import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            continue
        found[f"{module}:{path}"] = describe(value)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
