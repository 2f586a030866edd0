"""The reason of a refusal, remembered for the answer to the request at hand."""

from __future__ import annotations

import functools

from .. import exceptions
from .pool import errors


def refusal_of(pool, error):
    """What a pool error means for the client; None where the route's own answer is right."""
    return errors.refusal_of(exceptions, pool, error)


def remembers_refusal(get_engine):
    """Remember why the pool refused the request at hand; the error itself stays."""

    @functools.wraps(get_engine)
    async def wrapper(pool, *args, **kwargs):
        def call():
            return get_engine(pool, *args, **kwargs)

        return await errors.remembering(exceptions, pool, call)

    return wrapper
