"""What the applied features have switched on in this process, for wrappers to look at.

One object, which `hooks.install` puts back when it undoes: no part has to undo its own.
"""

from __future__ import annotations

from omlx_admission.core.request import Handling


class Switches:
    """All off, as it is before anything is applied.

    Attributes:
        pacing: the queue is there: what has no place of an engine can wait in it.
        keeping: a hand-out without a lease is kept for the request that got it.
        parking: what a text engine runs may be taken out of it.
        marks: teardowns are marked: the resident path's unload is in place.
        vlm_engine: the class of vision engines, which a forced text load replaces.
        handling: what the middleware does for all requests.
    """

    __slots__ = ("handling", "keeping", "marks", "pacing", "parking", "vlm_engine")

    def __init__(self) -> None:
        self.handling = Handling()
        self.reset()

    def reset(self) -> None:
        """Everything off."""
        self.pacing = self.keeping = self.marks = self.parking = False
        self.vlm_engine: type | None = None
        self.handling.reset()


switches = Switches()
