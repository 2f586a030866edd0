"""Leases for callers that take none: until their request, or the job it began, ends."""

from __future__ import annotations

import asyncio
import functools

from . import request as requests
from .pool import holding

_releases: set[asyncio.Task] = set()


def leased_for_request(get_engine):
    """Let a call without a lease take one that its request gives back.

    What a request holds already it is handed again at once, even while the model is
    to be unloaded: it is in use until this very request ends.
    """

    @functools.wraps(get_engine)
    async def wrapper(pool, model_id, force_lm=False, _lease=False, runtime_settings=None):
        if requests.current.get() is None:
            return await get_engine(pool, model_id, force_lm, _lease, runtime_settings)
        entry = pool._entries.get(model_id)
        unloading = model_id in getattr(pool, "_unloading_models", ())
        engine = holding.held_engine(entry, model_id, force_lm, runtime_settings, unloading)
        if engine is not None:
            entry.in_use += 1
        else:
            holding.let_go(model_id)
            engine = await get_engine(pool, model_id, force_lm, True, runtime_settings)
        spare = None if _lease else functools.partial(_give_back, pool, model_id)
        holding.note(engine, model_id, _lease, force_lm, runtime_settings, spare)
        return engine

    return wrapper


def released_by_request(release_engine):
    """Note that a request has given back what it had leased itself."""

    @functools.wraps(release_engine)
    async def wrapper(pool, model_id):
        holding.released_by_route(model_id)
        await release_engine(pool, model_id)

    return wrapper


def _give_back(pool, model_id: str) -> None:
    """Give the lease back in this step, so that an unload that follows finds it gone.

    A pending unload has to see the release, and waits for the pool in a task of its
    own: the end of a request does not.
    """
    if pool._release_loaded_engine(model_id):
        return
    release = pool._release_engine_lease(model_id)
    task = asyncio.get_running_loop().create_task(release)
    _releases.add(task)
    task.add_done_callback(_releases.discard)
