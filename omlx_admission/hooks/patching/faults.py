"""Our own part of a wrapper failed: say so once per place, and let stock run."""

from __future__ import annotations

import logging

logger = logging.getLogger("omlx.admission")

#: Last words of the line; whoever reads a log finds our faults by them.
SAID = "failed, oMLX runs stock there"

_noted: set[str] = set()


def note(place: str, error: BaseException) -> None:
    """Log ``error`` with its traceback the first time ``place`` fails, then be quiet.

    oMLX's own errors are no fault of ours: stock, which runs next, raises them.
    """
    if is_omlx(error) or place in _noted:
        return
    _noted.add(place)
    logger.error("admission: %s %s", place, SAID, exc_info=error)


def is_omlx(error: BaseException) -> bool:
    """Whether ``error`` is one of oMLX's own, to be raised as it is."""
    return type(error).__module__.partition(".")[0] == "omlx"
