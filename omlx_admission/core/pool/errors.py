"""What the pool's errors mean for a client: 503 for what passes, 507 for what does not."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from .. import faults
from .. import request as requests
from ..refusal import Refusal, retry_after
from . import ceiling

#: Words by which agents take a server's error for their own input being too long, and
#: delete their history. What a broken file says of itself may well contain them.
_MISREAD = re.compile("prompt|context|token", re.IGNORECASE)

#: Seconds of a Retry-After where the queue, which could estimate it, is off.
_GUESS_S = 5.0


async def remembering(errors: Any, pool: Any, get_engine: Callable[[], Awaitable[Any]]) -> Any:
    """Remember why the pool refused, for the middleware; the error itself stays.

    The loads of the queue run outside every request, and nothing is remembered of them
    here: the queue says itself why a request ends.
    """
    request = requests.active()
    if request is None:
        return await get_engine()
    request.refusal = None
    try:
        return await get_engine()
    except Exception as error:
        if request.refusal is None:
            remember(errors, pool, error)
        raise


def remember(errors: Any, pool: Any, error: Exception) -> None:
    """Keep for the middleware what ``error`` means for the client of this request."""
    request = requests.active()
    if request is None:
        return
    try:
        request.refusal = refusal_of(errors, pool, error)
    except Exception as ours:  # the caller gets the pool's error, not this one
        faults.note("the reading of a refusal", ours)


def refusal_of(errors: Any, pool: Any, error: Exception) -> Refusal | None:
    """What a pool error means for the client; None where the route's own answer is right.

    ``errors`` is the module that defines the pool's errors.
    """
    text = str(error)
    if isinstance(error, errors.ModelTooLargeError):
        if ceiling.may_fit(pool, error):
            text += " That ceiling moves with the memory that other applications use."
            return Refusal(503, "model_busy", text, retry_after(_GUESS_S))
        return Refusal(507, "model_too_large", text)
    if isinstance(
        error,
        errors.InsufficientMemoryError | errors.ModelBusyError | errors.ModelLoadingError,
    ):
        return Refusal(503, "model_busy", text, retry_after(_GUESS_S))
    if isinstance(error, errors.ModelUnavailableError):
        # A conflict (409) or a server error without a word more would be
        # tried again by the usual clients; the same load would fail in the same way.
        return Refusal(500, "model_load_failed", _load_failed(error, text))
    return None


def _load_failed(error: Any, text: str) -> str:
    if _MISREAD.search(text):
        model = getattr(error, "model_id", None)
        text = f"Model '{model}' failed to load; the server's log has the cause."
    return text
