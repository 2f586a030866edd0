"""The order of the turn, as a state machine over the pure part."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omlx_admission.gpu_turn.queue import TurnError, TurnQueue


class Ticket:
    """Equal to every other one, so that only identity can tell them apart."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ticket)

    def __hash__(self) -> int:
        return 0


class TurnQueueMachine(RuleBasedStateMachine):
    """Any order of wishes, releases and withdrawals."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: TurnQueue[Ticket] = TurnQueue()
        self.holder: Ticket | None = None
        self.waiting: deque[Ticket] = deque()

    @rule()
    def request(self) -> None:
        ticket = Ticket()
        if self.holder is None:
            assert self.queue.request(ticket)
            self.holder = ticket
        else:
            assert not self.queue.request(ticket)
            self.waiting.append(ticket)

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release(self) -> None:
        assert self.holder is not None
        following = self.waiting.popleft() if self.waiting else None
        assert self.queue.release(self.holder) is following
        self.holder = following

    @precondition(lambda self: bool(self.waiting))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.waiting) - 1))
        ticket = self.waiting[at]
        del self.waiting[at]
        assert self.queue.withdraw(ticket)
        assert not self.queue.withdraw(ticket)

    @precondition(lambda self: self.holder is not None)
    @rule()
    def holders_and_strangers_do_not_withdraw(self) -> None:
        assert self.holder is not None
        assert not self.queue.withdraw(self.holder)
        assert not self.queue.withdraw(Ticket())
        with pytest.raises(TurnError):
            self.queue.release(Ticket())
        with pytest.raises(TurnError):
            self.queue.request(self.holder)

    @precondition(lambda self: bool(self.waiting))
    @rule()
    def nobody_asks_twice(self) -> None:
        with pytest.raises(TurnError):
            self.queue.request(self.waiting[0])

    @invariant()
    def as_the_model_says(self) -> None:
        assert self.queue.holder is self.holder
        assert [id(t) for t in self.queue.waiting] == [id(t) for t in self.waiting]
        assert len(self.queue) == len(self.waiting)
        if self.waiting:
            assert self.queue.holder is not None, "free while somebody waits"


TestTurnQueue = TurnQueueMachine.TestCase
