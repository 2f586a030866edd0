"""Ending an answer from outside, whole and in the shape of its route.

A request whose engine is taken away is cancelled, as a client's leaving would do it, so
that whatever it holds is given back in oMLX's own way. What its client gets is made
here from what is out already: nothing, the blanks that keep a plain answer alive, or a
part of a stream. oMLX's own ways to end are not enough: they break a body off, or end an
Anthropic stream as if it were complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from . import error_event
from .refusal import Refusal

logger = logging.getLogger("omlx.admission")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

#: Routes that stream, and oMLX's name of each one's protocol.
PROTOCOLS = {
    "/v1/chat/completions": "openai_chat",
    "/v1/completions": "openai_completion",
    "/v1/messages": "anthropic",
    "/v1/responses": "openai_responses",
}

#: In the last part of a stream that says by itself how it ended.
_ENDS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: error",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)


class Cut:
    """One request's answer, and how it is ended from outside.

    Attributes:
        begun: the head is out.
        whole: nothing more may be sent.
        refusal: with what it was ended.
    """

    def __init__(self, path: str) -> None:
        self.begun = self.whole = False
        self.refusal: Refusal | None = None
        self._path = path
        self._type = b""
        self._first = self._last = b""
        #: Its handler, while that may be ended.
        self._task: asyncio.Task[Any] | None = None

    def end_with(self, refusal: Refusal) -> None:
        """Take the request from its handler: the client gets ``refusal``, whole.

        An answer that is complete goes out as it is.
        """
        if self._task is not None and self.refusal is None:
            self.refusal = refusal
            self._task.cancel()

    async def run(self, handler: Awaitable[None]) -> None:
        """Await the handler of the request; returns too where it was ended.

        Raises:
            CancelledError: the task was cancelled by others as well.
            Exception: the handler's own.
        """
        task = self._task = asyncio.current_task()
        try:
            await handler
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            if self.refusal is None:
                raise
            logger.debug("admission: a request was ended: %r", error)
        finally:
            self._task = None
        if self.refusal is None:
            return
        with contextlib.suppress(asyncio.CancelledError):
            # It may have come to its end before the cancel reached it.
            await asyncio.sleep(0)
        assert task is not None
        if task.uncancel() > 0:
            raise asyncio.CancelledError

    def noting(self, send: Send) -> Send:
        """``send``, noting what is out."""

        async def noted(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self._note_head(dict(message.get("headers", ())))
            elif message["type"] == "http.response.body":
                self._note_part(message.get("body", b""))
                if not message.get("more_body", False):
                    self.whole = True
                    self._task = None

        return noted

    def _note_head(self, headers: dict[bytes, bytes]) -> None:
        self.begun = True
        self._type = headers.get(b"content-type", b"").partition(b";")[0].strip()
        if b"content-length" in headers:
            self._task = None  # all of it exists, and needs no engine any more

    def _note_part(self, body: bytes) -> None:
        if not body or body.isspace():
            return
        self._last = body
        if not self._first and b"data:" in body:
            self._first = body

    def events(self) -> error_event.Begun | None:
        """What of a stream is out; None where that is nothing but comments."""
        return error_event.Begun(self._first, self._last) if self._first else None

    def rest(self) -> bytes:
        """What makes an answer whole that has begun.

        Raises:
            ConnectionAbortedError: nothing can, of a sound or a file: its client has to
                see that the end is missing.
        """
        assert self.refusal is not None
        if self._type == b"text/event-stream":
            if any(end in self._last for end in _ENDS):
                return b""
            error = json.loads(self.refusal.body("/v1/"))["error"]
            protocol = PROTOCOLS.get(self._path, "openai_chat")
            return error_event.frames(protocol, self.refusal.status, error, begun=self.events())
        if self._type == b"application/json":
            return b"" if self._last else self.refusal.body(self._path)
        raise ConnectionAbortedError(self.refusal.message)
