"""A part of admission failed: say so once per place, and let oMLX go on without it."""

from __future__ import annotations

import logging

logger = logging.getLogger("omlx.admission")

#: Last words of the line; such faults are found by them in a log.
SAID = "failed, oMLX goes on without it"

_noted: set[str] = set()


def note(place: str, error: BaseException) -> None:
    """Log ``error`` with its traceback the first time ``place`` fails, then be quiet.

    oMLX's own errors are no fault of admission: the pool, asked next, raises them.
    """
    if is_omlx(error) or place in _noted:
        return
    _noted.add(place)
    logger.error("admission: %s %s", place, SAID, exc_info=error)


def is_omlx(error: BaseException) -> bool:
    """Whether ``error`` is one of oMLX's own, to be raised as it is."""
    return type(error).__module__.partition(".")[0] == "omlx"
