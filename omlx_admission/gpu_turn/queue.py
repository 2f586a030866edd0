"""The holder of the GPU turn and its successor: strict first come, first served, with re-entry.

Pure: no threads, no clock. The one rule that matters is that the *releaser* names
the next holder, in the same step in which it lets go. A newcomer never finds the
turn free while another thread waits, so none overtakes and no wake-up can be lost
between two steps. `turn` adds the lock, the waiting and the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Ticket = TypeVar("Ticket")


class TurnError(Exception):
    """A step that cannot be right: a stranger's release, a ticket used twice."""


class TurnQueue(Generic[Ticket]):
    """The holder and the waiters. Tickets are told apart by identity; one use each."""

    def __init__(self) -> None:
        self._holder: Ticket | None = None
        # A dict keeps the order and takes a waiter out of the middle in one step.
        self._waiting: dict[int, Ticket] = {}

    @property
    def holder(self) -> Ticket | None:
        """Whose turn it is."""
        return self._holder

    @property
    def waiting(self) -> Iterator[Ticket]:
        """The waiters, first come first."""
        return iter(self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def request(self, ticket: Ticket) -> bool:
        """``ticket`` wants the turn. True: it has it; False: it waits.

        Raises:
            TurnError: it has or awaits the turn already.
        """
        if ticket is self._holder or id(ticket) in self._waiting:
            raise TurnError("this ticket is in use")
        if self._holder is None:
            # No ticket waits either: release() leaves no holder only where none does.
            self._holder = ticket
            return True
        self._waiting[id(ticket)] = ticket
        return False

    def release(self, ticket: Ticket) -> Ticket | None:
        """``ticket`` lets go. Returns the next holder, to be woken; None: no ticket waits.

        Raises:
            TurnError: it is not its turn.
        """
        if ticket is not self._holder:
            raise TurnError("only the holder can release")
        following = next(iter(self._waiting), None)
        self._holder = None if following is None else self._waiting.pop(following)
        return self._holder

    def withdraw(self, ticket: Ticket) -> bool:
        """``ticket`` waits no longer. False: it did not wait (perhaps it holds by now,
        and must release)."""
        return self._waiting.pop(id(ticket), None) is not None
