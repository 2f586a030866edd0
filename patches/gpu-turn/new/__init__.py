"""One engine on the GPU at a time, first come first served (``serialize_engine_gpu``).

`queue` says who is next, `turn` adds the lock and the waiting, `holding` what a holder
owes the next one, and `sites` is what the engines use: decorators for their GPU work.
"""

from .holding import yield_turn
from .sites import (
    ahead,
    burst,
    clean_up,
    configure,
    enter,
    leave,
    one_turn,
    pausing,
    status,
    steps,
    vision,
)

__all__ = [
    "ahead",
    "burst",
    "clean_up",
    "configure",
    "enter",
    "leave",
    "one_turn",
    "pausing",
    "status",
    "steps",
    "vision",
    "yield_turn",
]
