"""An event loop whose clock stands still until a test moves it. For tests only."""

from __future__ import annotations

import asyncio


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers are due by :attr:`now`; nothing ever sleeps."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def turn(self, times: int = 12) -> None:
        """Run what is ready, and what that makes ready, without waiting for a timer."""
        for _ in range(times):
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        """Move the clock in steps, so that timers fire in order and near their time."""
        end = self.now + seconds
        while self.now < end:
            pending = [h.when() for h in self._scheduled if not h.cancelled()]  # type: ignore[attr-defined]
            following = min((w for w in pending if w > self.now), default=end)
            self.now = min(end, following)
            self.turn()
