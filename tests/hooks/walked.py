"""What the hooks have changed in oMLX, found by looking at oMLX and not into the ledger."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import wrapt

from omlx_admission.hooks import install
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import shared as gpu_shared
from omlx_admission.surfaces import applied

_OURS = "omlx_admission."


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(_OURS)


def layers(attribute: Any) -> list[str]:
    """Our wrappers in ``attribute``, inner to outer."""
    found = []
    while attribute is not None:
        wrapper = getattr(attribute, "_self_wrapper", None)
        if issubclass(type(attribute), wrapt.FunctionWrapper) and is_ours(wrapper):
            name = wrapper.__qualname__.partition(".<locals>")[0]
            found.append(f"{wrapper.__module__.removeprefix(_OURS)}.{name}")
        attribute = getattr(attribute, "__wrapped__", None)
    return found[::-1]


def wraps() -> dict[str, list[str]]:
    """Every wrapped attribute of every module and class.

    What other modules have imported by name is a copy of it, and does not count.
    """
    found = {}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, method in vars(value).items():
                    if issubclass(type(method), wrapt.FunctionWrapper) and layers(method):
                        found[f"{module.__name__}:{value.__qualname__}.{attribute}"] = layers(
                            method
                        )
            elif issubclass(type(value), wrapt.FunctionWrapper) and layers(value):
                home = sys.modules.get(value.__module__, module)
                if home is module or name not in vars(home):
                    found[f"{module.__name__}:{name}"] = layers(value)
    return found


def rest(gpu_turn: bool) -> dict[str, list[str]]:
    """What is changed otherwise, on the application and on instances."""
    import omlx.engine_core
    import omlx.server

    app = omlx.server.app
    routes = [
        route.path for route in app.router.routes if is_ours(getattr(route, "endpoint", None))
    ]
    found = {
        "omlx.server:app.user_middleware": [
            m.cls.__name__ for m in app.user_middleware if is_ours(m.cls)
        ],
        "omlx.server:app.router.routes": [", ".join(routes)] if routes else [],
    }
    if is_ours(vars(omlx.engine_core.get_mlx_executor()).get("submit")):
        found[gpu_jobs.SUBMIT] = ["hooks.gpu.executors.Executors.prepare"]
    if gpu_turn:
        found |= in_use()
    return {name: layers for name, layers in found.items() if layers}


def in_use() -> dict[str, list[str]]:
    """What each kind of job changes on its model while it runs."""
    found = {}
    for kind in gpu_jobs.JOBS.values():
        names = (*kind.site.steps, *kind.site.items)
        model = type("Model", (), dict.fromkeys(names, lambda self: ()))()
        job = gpu_jobs.Job(kind, "job", model)
        for name in gpu_shared.take_turn(job, lambda model=model: list(vars(model))) or ():
            found[f"model of {kind.site.name}: {name}"] = ["gpu_turn.sites.shared"]
    reranker = SimpleNamespace(model=print)
    seen = gpu_shared.causal_documents(lambda: reranker.model, reranker, (), {})
    found["model of reranker: model"] = [f"hooks.gpu.shared.{type(seen).__name__}"]
    return found


def main() -> None:
    answer, sys.stdout = sys.stdout, sys.stderr
    applied.apply()
    report = install.current()
    on = report is not None and report.verdict("gpu_turn").state is install.State.APPLIED
    during = {**wraps(), **rest(on)}
    install.undo()
    json.dump({"during": during, "after": {**wraps(), **rest(False)}}, answer)
