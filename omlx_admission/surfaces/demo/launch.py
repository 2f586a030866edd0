"""Run ``omlx serve`` with loads that take time, for the demo and the live tests.

Tiny models load in milliseconds; what users wait for is the loading of tens of
gigabytes. The pause stands before the engine's own start, inside oMLX's load
and under whatever locks oMLX holds there.

Usage: ``python -m omlx_admission.surfaces.demo.launch PLAN serve ...`` where
PLAN is JSON: ``{"load_s": 3.0, "per_model": {"b": 5.0}, "failing": ["c"],
"keepalive_s": 0.5}`` (seconds; model names are folder names; the last one is the
interval of oMLX's keep-alives on streams, which no option of oMLX's sets).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from typing import Any

import wrapt


def slow_down(plan: dict[str, Any]) -> None:
    """Make every text and embedding load take the seconds that ``plan`` gives."""
    from omlx.engine.batched import BatchedEngine

    seconds = float(plan.get("load_s", 0.0))
    per_model: dict[str, float] = plan.get("per_model", {})
    failing = frozenset(plan.get("failing", ()))

    async def start(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        name = os.path.basename(str(engine._model_name).rstrip("/"))
        if not engine._loaded:
            await asyncio.sleep(per_model.get(name, seconds))
            if name in failing:
                raise RuntimeError(f"the plan says that loading {name} fails")
        return await wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(BatchedEngine, "start", start)
    if "keepalive_s" in plan:
        wrapt.register_post_import_hook(
            lambda server: hurry(server._with_sse_keepalive, float(plan["keepalive_s"])),
            "omlx.server",
        )


def hurry(keepalive: Any, seconds: float) -> None:
    """Make ``seconds`` the default of the parameter ``interval``."""
    names = [
        p.name
        for p in inspect.signature(keepalive).parameters.values()
        if p.default is not p.empty
    ]
    defaults = list(keepalive.__defaults__)
    defaults[names.index("interval")] = seconds
    keepalive.__defaults__ = tuple(defaults)


def main() -> None:
    """Entry point; see the module's text."""
    plan = json.loads(sys.argv[1])
    sys.argv = ["omlx", *sys.argv[2:]]
    # Where the package is on PYTHONPATH instead of installed, no .pth line has run.
    from omlx_admission import _startup

    _startup.main()
    slow_down(plan)
    from omlx.cli import main as serve

    serve()


if __name__ == "__main__":
    main()
