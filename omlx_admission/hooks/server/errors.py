"""Right answers: 503 with ``Retry-After`` for what passes, 507 for what does not.

The middleware gives every route the same truth about a refusal, whatever the
route made of the exception: oMLX's HTTPException handler drops headers, speech
and load routes answer 500, the default-model fallback 404.
"""

from __future__ import annotations

import re
from typing import Any

from omlx_admission.core import request as requests
from omlx_admission.core.refusal import Refusal, retry_after
from omlx_admission.hooks.patching import faults
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
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

#: Words by which agents take a server's error for their own input being too long, and
#: delete their history (B27). What a broken file says of itself may well contain them.
_MISREAD = re.compile("prompt|context|token", re.IGNORECASE)

#: Seconds of a Retry-After where the queue, which could estimate it, is off.
_GUESS_S = 5.0


async def get_engine(wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
    """Remember why stock refused, for the middleware; the error itself stays stock's.

    With the queue on, its loads run outside every request and nothing is
    remembered here: the queue says itself why a request ends.
    """
    request = requests.active()
    if request is None:
        return await wrapped(*args, **kwargs)
    request.refusal = None
    try:
        return await wrapped(*args, **kwargs)
    except Exception as error:
        if request.refusal is None:
            remember(pool, error)
        raise


def remember(pool: Any, error: Exception) -> None:
    """Keep for the middleware what ``error`` means for the client of this request."""
    request = requests.active()
    if request is None:
        return
    try:
        request.refusal = refusal_of(pool, error)
    except Exception as ours:  # noqa: BLE001 - the caller gets oMLX's error, not ours
        faults.note("the reading of a refusal", ours)


def refusal_of(pool: Any, error: Exception) -> Refusal | None:
    """What a stock pool error means for the client; None where stock's own answer is right."""
    from omlx import exceptions as theirs

    text = str(error)
    if isinstance(error, theirs.ModelTooLargeError):
        if ceiling.may_fit(pool, error):
            text += " That ceiling moves with the memory that other applications use."
            return Refusal(503, "model_busy", text, retry_after(_GUESS_S))
        return Refusal(507, "model_too_large", text)
    if isinstance(
        error,
        theirs.InsufficientMemoryError | theirs.ModelBusyError | theirs.ModelLoadingError,
    ):
        return Refusal(503, "model_busy", text, retry_after(_GUESS_S))
    if isinstance(error, theirs.ModelUnavailableError):
        # A conflict (409, as stock says) or a server error without a word more would be
        # tried again by stock clients; the same load would fail in the same way (B51).
        return Refusal(500, "model_load_failed", _load_failed(error, text))
    return None


def _load_failed(error: Any, text: str) -> str:
    if _MISREAD.search(text):
        model = getattr(error, "model_id", None)
        text = f"Model '{model}' failed to load; the server's log has the cause."
    return text


def apply_pool(module: Any, ledger: Ledger) -> None:
    """Wrap ``get_engine`` innermost."""
    ledger.wrap(module, "EnginePool.get_engine", get_engine)
