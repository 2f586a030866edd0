"""Run ``omlx serve`` with loads that take time.

Tiny models load in milliseconds; what users wait for is the loading of tens of
gigabytes. The pause stands before the engine's own start, inside oMLX's load and under
whatever locks oMLX holds there, on the thread that the load itself runs on.

Usage: ``python -m omlx_admission.surfaces.demo.launch SECONDS serve ...``
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import wrapt


def slow_down(seconds: float) -> None:
    """Make every load of a text model take that long."""
    from omlx.engine.batched import BatchedEngine

    async def start(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        if not engine._loaded:
            await on_load_thread(engine, lambda: time.sleep(seconds))
        return await wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(BatchedEngine, "start", start)


async def on_load_thread(engine: Any, work: Callable[[], None]) -> None:
    """Run ``work`` where this engine's load runs."""
    from omlx.engine_core import get_mlx_executor

    def load() -> None:
        work()

    # Loads of text models may be sent to a thread of their own; they are told by name.
    load.__module__ = type(engine).__module__
    load.__name__ = "_load_model_sync" if load.__module__.endswith("batched") else "load"
    await asyncio.get_running_loop().run_in_executor(get_mlx_executor(), load)


def serve(prepare: Callable[[], None]) -> None:
    """oMLX's command line with the arguments after the first; ``prepare`` comes before."""
    sys.argv = ["omlx", *sys.argv[2:]]
    # Where the package is on PYTHONPATH instead of installed, no .pth line has run.
    from omlx_admission import _startup

    _startup.main()
    prepare()
    from omlx.cli import main

    main()


if __name__ == "__main__":
    pause = float(sys.argv[1])
    serve(lambda: slow_down(pause))
