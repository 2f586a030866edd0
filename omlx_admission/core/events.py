"""What the queue says of itself while it works; without a listener, nothing.

A listener returns at once and raises nothing. Nothing that the queue decides, and
nothing that a client is told, depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .policy.model import Waiter
from .request import Request


class Events:
    """The silent listener; another one overrides what it wants to know.

    Times are seconds of the queue's clock, called on the event loop's thread.
    """

    def enqueued(self, waiter: Waiter, waiting: int) -> None:
        """``waiter`` has joined the queue of ``waiting`` requests."""

    def left(self, waiter: Waiter, now: float, waiting: int, queued: bool) -> None:
        """``waiter`` has ended; without ``queued`` in the step in which it came."""

    def refused(
        self, model: str, code: str, text: str, waited: float, request: Request | None
    ) -> None:
        """A request was refused after ``waited`` seconds; ``text`` is what it is told."""

    def drain_began(self, models: Sequence[str], target: str) -> None:
        """``models`` take no new requests until they are idle, for ``target``."""

    def parked(self, model: str, answers: int) -> None:
        """``answers`` of ``model`` were taken out, and wait for its return."""

    def parked_ended(self, waiter: Waiter, now: float) -> None:
        """A parked answer goes on, or has ended."""

    def drain_withdrawn(self, models: Sequence[str]) -> None:
        """``models`` serve on."""

    def swap_began(
        self,
        target: str,
        victims: Sequence[str],
        reason: str,
        drain_s: float,
        estimate_s: float,
    ) -> None:
        """The load of ``target`` begins, with the eviction of ``victims``.

        ``drain_s`` is what they took to become idle, ``estimate_s`` what eviction and
        load are expected to take.
        """

    def swap_ended(self, target: str, result: str, served: int = 0) -> None:
        """``result``: loaded, failed, no room, or cancelled."""


#: No listener.
SILENT = Events()
