"""The turn of an oMLX that takes turns by itself is shown and judged as ours is."""

from __future__ import annotations

import sys
from typing import Any

from omlx_admission.gpu_turn import turn as gpu_turn

#: Made of our own turn (``patches/gpu-turn``), so it answers the same questions.
MODULE = "omlx.gpu_turn.turn"


def current() -> Any:
    """The turn of this process, ours or oMLX's own; None where engines take no turns."""
    if gpu_turn.current is not None:
        return gpu_turn.current
    return getattr(sys.modules.get(MODULE), "current", None)
