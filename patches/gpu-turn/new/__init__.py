"""One engine on the GPU at a time, first come first served (``serialize_engine_gpu``).

`queue` says who is next, `turn` adds the lock and the waiting, `holding` what a holder
owes the next one, `sites` which work takes the turn, `length` for how long; `decorators` is
what the engines use.
"""

from .decorators import (
    ahead,
    burst,
    clean_up,
    configure,
    embedding,
    one_turn,
    poll,
    progress,
    reranker,
    status,
    vision,
)
from .holding import yield_turn
from .sites import (
    DFLASH,
    DIFFUSION,
    SPEECH_TO_SPEECH,
    SPEECH_TO_TEXT,
    TEXT_TO_SPEECH,
    enter,
    leave,
    steps,
)

__all__ = [
    "DFLASH",
    "DIFFUSION",
    "SPEECH_TO_SPEECH",
    "SPEECH_TO_TEXT",
    "TEXT_TO_SPEECH",
    "ahead",
    "burst",
    "clean_up",
    "configure",
    "embedding",
    "enter",
    "leave",
    "one_turn",
    "poll",
    "progress",
    "reranker",
    "status",
    "steps",
    "vision",
    "yield_turn",
]
