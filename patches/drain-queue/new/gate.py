"""The admission queue as the engine pool sees it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any

from ..exceptions import EnginePoolError
from . import kinds, load_work
from . import request as requests
from .footprint import settled
from .own import own
from .places import places
from .pool import EnginePoolPort, is_busy, load_at_hand, planned_victims
from .port import Ask
from .queue import Admission, QueueBroken
from .settings import Settings, load

if TYPE_CHECKING:
    from ..engine_pool import EnginePool

logger = logging.getLogger("omlx.admission")


class PoolAdmission(Admission):
    """The queue of one pool; ``enabled`` is what ``OMLX_ADMISSION_QUEUE`` says."""

    def __init__(self, pool: EnginePool, settings: Settings | None = None) -> None:
        if settings is None:
            settings, problems = load()
            for problem in problems:
                logger.warning("admission: %s", problem)
        self._pool = pool
        module = sys.modules[type(pool).__module__]
        super().__init__(EnginePoolPort(pool, module, pool._get_engine_past_teardown), settings)
        self.enabled = settings.queue
        requests.queueing = settings.queue

    async def get_engine(
        self,
        model_id: str,
        force_lm: bool,
        lease: bool,
        runtime_settings: object | None,
    ) -> Any:
        """Wait for the engine of a model that could not be handed out at once.

        The queue takes a lease for everybody: without one, an engine could go
        between the hand-out and its first use. Who wants none gives it back.
        """
        request = requests.active()
        started = self.now()
        try:
            ask = self._ask(model_id, force_lm, runtime_settings, lease)
            if request is not None:
                self._refuse_wrong_kind(request, model_id)
            engine = await self.acquire(ask)
        except QueueBroken:
            return await self._pool._get_engine_past_teardown(
                model_id, force_lm, lease, runtime_settings
            )
        if request is not None:
            request.waited_s += self.now() - started
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
        limit = places(entry.engine) if entry is not None else None
        return limit is not None and entry.in_use >= limit

    def _ask(
        self,
        model_id: str,
        force_lm: bool,
        runtime_settings: object | None,
        lease: bool,
    ) -> Ask:
        try:
            self.port.raise_if_unavailable(model_id)
            arguments = {
                "model_id": model_id,
                "force_lm": force_lm,
                "lease": False,
                "runtime_settings": runtime_settings,
            }
            return Ask(
                self.port.target(model_id, force_lm, runtime_settings),
                self.port.size(arguments),
                arguments,
                own(model_id),
                unpaced=not lease,
            )
        except EnginePoolError:
            raise
        except Exception:
            logger.exception("admission: no question to the queue; the pool decides")
            raise QueueBroken from None

    def _refuse_wrong_kind(self, request: requests.Request, model_id: str) -> None:
        """Load nothing, and evict nobody, for a route that this kind cannot serve."""
        refusal = kinds.refusal(request.path, self._pool._entries.get(model_id))
        if refusal is not None:
            request.refusal = refusal
            raise self.port.refused(refusal)

    def has_a_chance(self) -> bool:
        """Whether the load of this task, if it is one of the queue's, would fit by now.

        The ceiling may have fallen since it was decided; nothing is evicted in vain.
        """
        load = load_at_hand()
        return load is None or load.has_a_chance()

    def planned_victim(self) -> str | None:
        """The next model to leave for the load of this task; None outside of one."""
        for victim in planned_victims.get():
            entry = self._pool._entries.get(victim)
            if (
                entry is not None
                and entry.engine is not None
                and not is_busy(entry)
                and not entry.is_pinned
                and victim not in self._pool._unloading_models
            ):
                return victim
        return None


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
