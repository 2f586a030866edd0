"""Right answers: 503 with ``Retry-After`` for what passes, 507 for what does not.

The middleware gives every route the same truth about a refusal, whatever the
route made of the exception: oMLX's HTTPException handler drops headers, speech
and load routes answer 500, the default-model fallback 404.
"""

from __future__ import annotations

from typing import Any

from omlx_admission.core.pool import errors
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.pool import ceiling, exceptions, resident
from omlx_admission.hooks.server import requests as requests_hook

#: Present where oMLX does this itself.
NATIVE = (
    Need("omlx.admission.errors", "refusal_of", Kind.SYNC),
    Need("omlx.admission.request", "RequestMiddleware", Kind.CLASS),
    Need(resident.POOL, "remembers_refusal", Kind.NAME),
    Need(requests_hook.SERVER, "RequestMiddleware", Kind.NAME),
)

NEEDS = (
    *requests_hook.NEEDS,
    # Wrapped with whatever it takes: all of it is passed on.
    Need(resident.POOL, "EnginePool.get_engine", Kind.ASYNC),
    *exceptions.TOLD_APART,
    *ceiling.NEEDS,
    Need("omlx.server", "get_engine", Kind.USED),
)


async def get_engine(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Remember why stock refused, for the middleware; the error itself stays stock's."""
    from omlx import exceptions as theirs

    return await errors.remembering(theirs, pool, lambda: wrapped(*args, **kwargs))


def remember(pool: Any, error: Exception) -> None:
    """Keep for the middleware what ``error`` means for the client of this request."""
    from omlx import exceptions as theirs

    errors.remember(theirs, pool, error)


def apply_pool(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap ``get_engine`` innermost."""
    ledger.wrap(module, "EnginePool.get_engine", get_engine)
