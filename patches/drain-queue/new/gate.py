"""The admission queue as the engine pool sees it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from .. import exceptions
from . import load_work, variables
from .config import Config
from .footprint import settled
from .pool.admission import PoolAdmission
from .pool.places import is_full
from .pool.port import EnginePoolPort, load_at_hand, refused_class
from .queue import QueueBroken
from .request import Handling

if TYPE_CHECKING:
    from ..engine_pool import EnginePool

logger = logging.getLogger("omlx.admission")

#: What the middleware of this server does for all requests.
handling = Handling()

AdmissionRefused = refused_class(exceptions.SchedulerQueueFullError)


class EngineQueue(PoolAdmission):
    """The queue of one pool; ``enabled`` is what ``OMLX_ADMISSION_QUEUE`` says."""

    def __init__(self, pool: EnginePool, config: Config | None = None) -> None:
        if config is None:
            config, problems = variables.load(os.environ)
            for problem in problems:
                logger.warning("admission: %s", problem)
        self._pool = pool
        module = sys.modules[type(pool).__module__]
        port = EnginePoolPort(pool, module, exceptions, pool._get_engine_past_teardown)
        super().__init__(port, config)
        self.enabled = config.queue
        handling.counts_waits = config.queue

    async def get_engine(
        self,
        model_id: str,
        force_lm: bool,
        lease: bool,
        runtime_settings: object | None,
    ) -> Any:
        """Wait for the engine of a model that could not be handed out at once."""
        try:
            engine = await super().get_engine(model_id, force_lm, lease, runtime_settings)
        except QueueBroken:
            return await self._pool._get_engine_past_teardown(
                model_id, force_lm, lease, runtime_settings
            )
        if not lease and not self._pool._release_loaded_engine(model_id):
            await asyncio.shield(self._pool._release_engine_lease(model_id))
        return engine

    def is_taken(self, model_id: str) -> bool:
        """Whether a newcomer for a loaded model has to queue for a place of its engine."""
        if not self.enabled or self.broken:
            return False
        if model_id in self.paced:
            return True
        entry = self._pool._entries.get(model_id)
        return entry is not None and is_full(entry)

    def has_a_chance(self) -> bool:
        """Whether the load of this task, if it is one of the queue's, would fit by now.

        The ceiling may have fallen since it was decided; nothing is evicted in vain.
        """
        load = load_at_hand()
        return load is None or load.has_a_chance()


def noticed(method):
    """Wait after an eviction for a load of the queue until the footprint shows it."""

    @functools.wraps(method)
    async def wrapper(pool, *args, **kwargs):
        load = load_at_hand()
        if load is None:
            return await method(pool, *args, **kwargs)
        before = load.read()
        answer = await method(pool, *args, **kwargs)
        if not await settled(before, load.read):
            logger.info("the footprint of the process still counts what has left")
        return answer

    return wrapper


def announced(method):
    """Tell the queue when a method of the pool has ended that may let somebody go on."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def wrapper(pool, *args, **kwargs):
            try:
                return await method(pool, *args, **kwargs)
            finally:
                pool._admission.changed()

    else:

        @functools.wraps(method)
        def wrapper(pool, *args, **kwargs):
            try:
                return method(pool, *args, **kwargs)
            finally:
                pool._admission.changed()

    return wrapper


def watched(load):
    """Note what a load has on its thread, and tell the queue when it has ended."""

    @functools.wraps(load)
    @announced
    async def wrapper(pool, model_id, *args, **kwargs):
        from ..engine_core import get_mlx_executor

        _note_jobs(get_mlx_executor())
        with pool._admission.port.work_of(model_id):
            return await load(pool, model_id, *args, **kwargs)

    return wrapper


def _note_jobs(executor):
    if "submit" in vars(executor):
        return
    submit = executor.submit

    def noted(fn, /, *args, **kwargs):
        job = submit(fn, *args, **kwargs)
        load_work.note(job)
        return job

    executor.submit = noted
