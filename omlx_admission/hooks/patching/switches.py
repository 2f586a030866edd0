"""What the applied features have switched on in this process, for wrappers to look at.

One object, which `hooks.install` puts back when it undoes: no part has to undo its own.
"""

from __future__ import annotations


class Switches:
    """All off, as it is before anything is applied.

    Attributes:
        pacing: the queue is there: what has no place of an engine can wait in it.
        keeping: a hand-out without a lease is kept for the request that got it.
        marks: teardowns are marked: the resident path's unload is in place.
        vlm_engine: the class of vision engines, which a forced text load replaces.
    """

    __slots__ = ("keeping", "marks", "pacing", "vlm_engine")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Everything off."""
        self.pacing = self.keeping = self.marks = False
        self.vlm_engine: type | None = None


switches = Switches()
