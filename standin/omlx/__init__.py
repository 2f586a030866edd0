"""A small server shaped like oMLX 0.6.3rc2, with its module paths and its defects.

It exists so that omlx-admission can be tested and shown where oMLX is not
installed. It is own code; where oMLX is known to misbehave, so does this, and
``tests/contract`` compares the two. Importing the package is cheap: submodules
are loaded on first use of a name.
"""

from importlib import import_module
from typing import Any

from omlx._version import __version__

_LAZY = {
    "AsyncEngineCore": "omlx.engine_core",
    "EngineConfig": "omlx.engine_core",
    "EngineCore": "omlx.engine_core",
    "Request": "omlx.request",
    "RequestOutput": "omlx.request",
    "RequestStatus": "omlx.request",
    "SamplingParams": "omlx.request",
    "Scheduler": "omlx.scheduler",
    "SchedulerConfig": "omlx.scheduler",
    "SchedulerOutput": "omlx.scheduler",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
