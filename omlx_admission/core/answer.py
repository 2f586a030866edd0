"""Answers that their handler does not have to itself.

The middleware of :mod:`.request` with two more ways: a stream is kept alive before its
handler answers (:mod:`.stream_hold`), and an answer is ended from outside, whole
(:mod:`.cut`). What was ended says nothing more; what is kept alive has its head out.
"""

from __future__ import annotations

from .cut import Cut
from .request import Message, Request, RequestMiddleware, Scope, Send, respond


class AnswerMiddleware(RequestMiddleware):
    """Pure ASGI middleware; see the module's text."""

    async def answer(self, request: Request, scope: Scope, send: Send) -> None:
        """See :meth:`RequestMiddleware.answer`."""
        cut = request.cut = Cut(request.path)
        send = cut.noting(send)
        make_hold = self.handling.hold_for
        hold = request.hold = None if make_hold is None else make_hold(request, send)
        mapped = self.mapping(request, scope, send)

        async def answered(message: Message) -> None:
            if cut.refusal is not None:
                return
            if hold is not None and hold.began:
                await hold.forward(message, request.refusal)
                return
            if message["type"] == "http.response.start":
                if hold is not None:
                    hold.wait_ended()
                await mapped(message)
            elif not request.replaced:
                # A stream has very many parts: no layer more for each.
                await send(message)

        answer = cut.run(self.app(scope, request.receive, answered))
        if hold is None:
            await answer
        else:
            await hold.run(answer, lambda: cut.refusal or request.refusal)
        if cut.refusal is None:
            return
        if not cut.begun:
            await respond(cut.refusal, request.path, scope, send)
        elif not cut.whole:
            await send({"type": "http.response.body", "body": cut.rest()})
