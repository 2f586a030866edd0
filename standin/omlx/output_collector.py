"""The mailbox between an engine's loop and one reader.

A slow reader gets several tokens merged into one output, never a growing queue.
"""

from __future__ import annotations

import asyncio

from .request import RequestOutput


class RequestOutputCollector:
    """Holds at most one pending output; later ones are merged into it."""

    def __init__(self, aggregate: bool = True):
        self.output: RequestOutput | None = None
        self.ready = asyncio.Event()
        self.aggregate = aggregate

    def put(self, output: RequestOutput) -> None:
        """Add an output; called on the event loop only."""
        held = self.output
        if held is not None and self.aggregate:
            output.new_token_ids = held.new_token_ids + output.new_token_ids
            output.new_text = held.new_text + output.new_text
            output.generated_at = held.generated_at or output.generated_at
        self.output = output
        self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """The pending output, or None."""
        output, self.output = self.output, None
        self.ready.clear()
        return output

    async def get(self) -> RequestOutput:
        """The next output."""
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def clear(self) -> None:
        """Forget what is pending."""
        self.output = None
        self.ready.clear()
