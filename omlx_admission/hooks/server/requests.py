"""The middleware that the queue, the answers and the leases all stand on."""

from __future__ import annotations

from typing import Any

from omlx_admission.core.answer import AnswerMiddleware
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.patching.switches import switches

SERVER = "omlx.server"

NEEDS = (Need(SERVER, "app", Kind.VALUE),)


def apply(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Put the middleware into the application, whose stack is not built yet.

    Raises:
        RuntimeError: the application is running already.
    """
    app = module.app
    app.add_middleware(AnswerMiddleware, handling=switches.handling)

    def remove() -> None:
        app.user_middleware[:] = [
            m for m in app.user_middleware if m.cls is not AnswerMiddleware
        ]

    ledger.changed(f"{SERVER}:app.user_middleware", AnswerMiddleware.__name__, remove)
