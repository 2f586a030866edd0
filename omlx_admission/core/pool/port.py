"""The engine pool as the queue sees it: views, leases, marks and loads.

Sizes and sums are the pool's own, read the way its admission reads them, so that what
the plan calls a fit is what the pool will call a fit.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from .. import route_model_kinds as kinds
from ..footprint import Reading
from ..load_work import LoadWork
from ..policy.model import ModelView, PoolView, Target
from ..policy.planner import too_large_now
from ..port import Ask, ParkedAnswer
from ..refusal import Refusal
from . import ceiling as ceilings
from .engines import lives
from .marks import DRAIN_REASON, drains_for_us
from .places import most, places

#: Victims that the load of the current task has planned; read by
#: ``_find_lru_victim``, which the pool calls from within that load.
planned_victims: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "admission_planned_victims", default=()
)


class LoadAtHand(NamedTuple):
    """A load that the queue began, while the pool carries it out in ``task``."""

    port: EnginePoolPort
    ask: Ask
    task: asyncio.Task[Any] | None

    def has_a_chance(self) -> bool:
        """Whether it would fit under the ceiling of this instant if all left that can."""
        target = self.ask.target
        return not too_large_now(target, self.ask.size, self.port.view((target,), 0))

    def read(self) -> Reading:
        """The memory of the process, and whether the load fits into the rest of it."""
        return self.port.reading(self.ask.size)


_load_at_hand: contextvars.ContextVar[LoadAtHand | None] = contextvars.ContextVar(
    "admission_load_at_hand", default=None
)


def load_at_hand() -> LoadAtHand | None:
    """The load of the queue that runs in the current task; tasks that it began are not it."""
    load = _load_at_hand.get()
    return load if load is not None and load.task is asyncio.current_task() else None


#: First members of a variant that is not just a settings signature: a vision
#: model wanted as text, and settings given by a caller of a pool without any.
_AS_TEXT = "as text"
_EXPLICIT = "explicit settings"


#: An engine whose runtime hooks are process-wide, of which only one may live: the
#: settings that ask for it, its class, and the name of that kind. The pool raises where
#: another one is busy, after it has begun to load.
_DFLASH = ("dflash_enabled", "True")
_DFLASH_ENGINE = "DFlashEngine"
_DFLASH_GROUP = "dflash"


def _signature(target: Target) -> tuple[str | None, Any]:
    """What kind of special variant ``target`` is, if any, and its settings signature."""
    variant: Any = target.variant
    if variant and isinstance(variant[0], str):
        return variant[0], variant[1]
    return None, variant


def _wants_dflash(target: Target) -> bool:
    return _DFLASH in (_signature(target)[1] or ())


def _is_dflash(engine: Any) -> bool:
    # By name: the class may not be importable.
    return type(engine).__name__ == _DFLASH_ENGINE


def _nothing() -> None:
    """A weak reference to no engine."""


class EnginePoolPort:
    """:class:`~..port.PoolPort` on one ``EnginePool``.

    ``module`` defines the pool's class, ``errors`` its errors. ``get_engine`` is the pool's
    own, which asks no queue.
    """

    def __init__(
        self, pool: Any, module: Any, errors: Any, get_engine: Callable[..., Any]
    ) -> None:
        self._pool = pool
        self._module = module
        self._errors = errors
        self._get_engine = get_engine
        self._loaded_for: dict[str, tuple[weakref.ref[Any], Target]] = {}
        #: What wanted a DFlash engine last and got another one.
        self._fell_back: dict[str, Target] = {}
        self._extras: dict[str, tuple[object, int]] = {}
        #: The last load of each model, by whomever it was asked for.
        self._works: weakref.WeakValueDictionary[str, LoadWork] = weakref.WeakValueDictionary()

    # -- questions ----------------------------------------------------------

    def target(self, model_id: str, force_lm: bool, runtime_settings: object | None) -> Target:
        """See :class:`~..port.PoolPort`."""
        pool = self._pool
        signature = pool._engine_runtime_signature(model_id, runtime_settings)
        if force_lm:
            return Target(model_id, (_AS_TEXT, signature))
        if runtime_settings is not None and pool._settings_manager is None:
            return Target(model_id, (_EXPLICIT, signature))
        return Target(model_id, signature)

    def size(self, arguments: Mapping[str, Any]) -> int:
        """See :class:`~..port.PoolPort`.

        Those are what the pool's own admission will count, once what is loaded of it has gone.
        """
        pool = self._pool
        entry = pool._entries.get(arguments["model_id"])
        if entry is None:
            return 0
        if getattr(entry, "runtime_estimated_size", None) is not None:
            # That of the engine that runs, with what its own settings add.
            entry = copy.copy(entry)
            entry.runtime_estimated_size = None
        size = self._resident_size(entry)
        if self._is_distributed(entry):
            return size
        text_only = getattr(entry, "text_only_size", None)
        if text_only and (arguments.get("force_lm") or entry.engine_type == "batched"):
            size = int(text_only)
        if not hasattr(pool, "_entry_runtime_resident_size"):
            return size
        return size + self._extra(entry, arguments.get("runtime_settings"))

    def _extra(self, entry: Any, settings: object | None) -> int:
        """Bytes that the settings of a load add to the model's own.

        The pool writes a line to the log each time it is asked, so it is asked once for
        the same settings.
        """
        pool, model = self._pool, entry.model_id
        manager = pool._settings_manager
        if settings is None and manager is not None:
            settings = manager.get_settings(model)
        values = copy.copy(getattr(settings, "__dict__", settings))
        asked = (entry.model_path, entry.estimated_size, values)
        known = self._extras.get(model)
        if known is None or known[0] != asked:
            extra = int(pool._entry_runtime_resident_size(entry, settings, base_size=0))
            known = self._extras[model] = (asked, extra)
        return known[1]

    def raise_if_unavailable(self, model_id: str) -> None:
        """See :class:`~..port.PoolPort`.

        Raises:
            ModelNotFoundError: not registered, or its folder is gone.
            ModelUnavailableError: an earlier load failed, and the pool caches that.
        """
        pool = self._pool
        entry = pool._entries.get(model_id)
        if entry is None:
            raise self.not_found(model_id)
        if entry.engine is None and not entry.is_loading:
            looked_at = pool
            if pool._lock.locked():
                # It drops what has gone from the disk, and who has the lock may be
                # going through the entries.
                looked_at = copy.copy(pool)
                looked_at._entries = dict(pool._entries)
            looked_at._raise_if_model_path_missing_locked(model_id, entry)
            pool._raise_if_load_failed(model_id, entry)

    def view(self, targets: Sequence[Target], max_models: int) -> PoolView:
        """See :class:`~..port.PoolPort`."""
        pool, module = self._pool, self._module
        unloading = self.unloading()
        models = {
            model_id: self._model_view(model_id, entry, model_id in unloading)
            for model_id, entry in list(pool._entries.items())
            if entry.engine is not None or entry.is_loading or model_id in unloading
        }
        ceiling, never_refuse = int(pool._current_ceiling()), False
        if ceiling <= 0 and hasattr(pool, "_fallback_admission_ceiling"):
            ceiling, never_refuse = int(pool._fallback_admission_ceiling()), True
        committed = self._committed()
        return PoolView(
            models=models,
            exclusive={t: _DFLASH_GROUP for t in targets if self._is_exclusive(t)},
            ready=frozenset(t for t in targets if self._is_ready(t)),
            unknown=frozenset(t for t in targets if t.model not in pool._entries),
            ceiling=ceiling,
            fixed_ceiling=ceilings.fixed(pool),
            used=max(committed, int(module.get_phys_footprint())),
            committed=committed,
            parked=self.parked_bytes(),
            never_refuse=never_refuse,
            max_models=max_models,
            helpers=frozenset(
                model
                for model in {*models, *(t.model for t in targets)}
                if kinds.is_helper(pool._entries.get(model))
            ),
        )

    def _committed(self) -> int:
        tracked = int(self._pool._current_model_memory)
        return max(int(self._module.mx.get_active_memory()), tracked)

    def reading(self, size: int) -> Reading:
        """See :class:`~..port.PoolPort`."""
        pool = self._pool
        targets = [int(pool._current_ceiling())]
        if hasattr(pool, "_admission_soft_target"):
            targets.append(int(pool._admission_soft_target()))
        most = min((target for target in targets if target > 0), default=0)
        footprint = int(self._module.get_phys_footprint())
        return Reading(footprint, self._committed(), not most or footprint + size <= most)

    def _model_view(self, model_id: str, entry: Any, unloading: bool) -> ModelView:
        work = self._works.get(model_id) if entry.is_loading else None
        self.let_go_stalled(model_id, entry)
        return ModelView(
            model=model_id,
            size=self._resident_size(entry),
            variant=entry.runtime_settings_signature,
            busy=self.is_busy(entry),
            leases=entry.in_use,
            unread=self.unread(model_id, entry),
            sessions=self.sessions(model_id, entry),
            answering=self.answering(model_id, entry) if drains_for_us(entry) else None,
            pinned=entry.is_pinned,
            loading=entry.is_loading,
            # Told to leave by others than the queue: it will, and no request may
            # plan with it until it has.
            unloading=unloading
            or bool(entry.pending_unload_reason and not drains_for_us(entry)),
            last_used=self.last_used(model_id, entry),
            places=places(entry.engine),
            most=most(entry.engine),
            # What a load will bring is not known before its end.
            group=_DFLASH_GROUP if _is_dflash(entry.engine) else None,
            # A load that waits for another one's teardown has nothing on its thread.
            resting=work.resting() if work and not self.unloading() else 0.0,
            read=max(0, self._used() - work.used) if work else 0,
        )

    def _is_exclusive(self, target: Target) -> bool:
        return _wants_dflash(target) and self._fell_back.get(target.model) != target

    def _used(self) -> int:
        module = self._module
        return max(int(module.mx.get_active_memory()), int(module.get_phys_footprint()))

    def _is_distributed(self, entry: Any) -> bool:
        distributed = getattr(self._pool, "_distributed_deployment_for_entry", None)
        return distributed is not None and distributed(entry) is not None

    def _resident_size(self, entry: Any) -> int:
        resident_size = getattr(self._pool, "_entry_resident_size", None)
        return int(resident_size(entry) if resident_size else entry.estimated_size)

    def in_use(self, model: str) -> bool:
        """See :class:`~..port.PoolPort`."""
        entry = self._pool._entries[model]
        self.let_go_stalled(model, entry)
        return bool(entry.is_loading) or self.is_busy(entry)

    def is_quiescent(self, model: str) -> bool:
        """See :class:`~..port.PoolPort`."""
        if self.in_use(model):
            return False
        entry = self._pool._entries[model]
        works = getattr(self._pool, "_entry_has_scheduler_work", None)
        return works is None or not works(entry) or not lives(entry.engine)

    def _is_ready(self, target: Target) -> bool:
        entry = self._pool._entries.get(target.model)
        if (
            entry is None
            or entry.engine is None
            or entry.is_loading
            or not lives(entry.engine)
            or target.model in self.unloading()
            or (entry.pending_unload_reason and not drains_for_us(entry))
        ):
            return False
        for_engine, for_target = self._loaded_for.get(target.model, (_nothing, None))
        if for_target == target and for_engine() is entry.engine:
            # An option that fell back at load leaves another signature behind;
            # what was loaded for this target serves it.
            return True
        kind, signature = _signature(target)
        if kind == _AS_TEXT and self.is_vision(entry.engine):
            return False
        loaded = entry.runtime_settings_signature
        if loaded is None:
            return kind != _EXPLICIT
        return signature is None or bool(loaded == signature)

    # -- leases and marks ---------------------------------------------------

    def take(self, target: Target, leases: int) -> Any:
        """See :class:`~..port.PoolPort`."""
        pool = self._pool
        entry = pool._entries[target.model]
        engine = entry.engine
        pool._validate_llm_engine_ready(target.model, engine)
        entry.last_access = time.time()
        entry.in_use += leases
        return engine

    def places(self, model: str) -> int | None:
        """See :class:`~..port.PoolPort`."""
        return places(self._pool._entries[model].engine)

    def give_back(self, model: str, engine: Any) -> None:
        """See :class:`~..port.PoolPort`."""
        entry = self._pool._entries.get(model)
        if entry is not None and entry.engine is engine and entry.in_use > 0:
            entry.in_use -= 1

    def still_serving(self, model: str, engine: Any) -> bool:
        """See :class:`~..port.PoolPort`."""
        entry = self._pool._entries.get(model)
        return (
            entry is not None
            and entry.engine is engine
            and lives(engine)
            and model not in self.unloading()
        )

    def mark(self, model: str, target: Target) -> None:
        """See :class:`~..port.PoolPort`.

        The pool's own method wants its lock held; it neither awaits nor reads
        anything that a lock holder leaves half-written, and waiting for the lock
        would put the mark behind a whole load.
        """
        self._pool._mark_pending_unload_locked(model, f"{DRAIN_REASON} for '{target.model}'")

    def unmark(self, model: str) -> None:
        """See :class:`~..port.PoolPort`."""
        entry = self._pool._entries.get(model)
        if entry is not None and drains_for_us(entry):
            entry.pending_unload_reason = None

    # -- loading ------------------------------------------------------------

    async def load(self, ask: Ask, victims: Sequence[str], max_models: int) -> None:
        """See :class:`~..port.PoolPort`."""
        model = ask.target.model
        await self.may_load()
        # The pool refuses a marked model; the gate is closed, so no request slips in.
        self.unmark(model)
        planned_victims.set(tuple(v for v in victims if v != model))
        _load_at_hand.set(LoadAtHand(self, ask, asyncio.current_task()))
        await self._make_places(ask, victims, max_models)
        engine = await self._get_engine(**ask.arguments)
        if not self.still_serving(model, engine):
            self.handed_out_dead(model)
            raise self._errors.ModelLoadingError(model, f"Model '{model}' is being unloaded")
        self._loaded_for[model] = (weakref.ref(engine), ask.target)
        if _wants_dflash(ask.target) and not _is_dflash(engine):
            self._fell_back[model] = ask.target
        elif self._fell_back.get(model) == ask.target:
            del self._fell_back[model]

    def work_of(self, model: str) -> LoadWork | None:
        """See :class:`~..port.PoolPort`."""
        if not self.sees_jobs():
            return None
        elsewhere = self._is_distributed(self._pool._entries[model])
        work = self._works[model] = LoadWork(self._used(), elsewhere=elsewhere)
        return work

    async def _make_places(self, ask: Ask, victims: Sequence[str], max_models: int) -> None:
        """The pool evicts for bytes only: first evict what has to leave for another reason.

        Those are places (``max_models``) and models of an exclusive kind.
        """
        model, pool = ask.target.model, self._pool
        for victim in victims:
            view = self.view((ask.target,), max_models)
            held = view.models.keys() - view.helpers - {model}
            full = bool(max_models) and len(held) >= max_models and victim in held
            full = full and model not in view.helpers
            group, rival = view.exclusive.get(ask.target), view.models.get(victim)
            excludes = group is not None and rival is not None and rival.group == group
            if victim == model or not (full or excludes):
                continue
            async with pool._lock:
                entry = pool._entries.get(victim)
                if entry is None or entry.engine is None:
                    continue
                if entry.is_pinned or self.is_busy(entry):
                    raise self._errors.ModelBusyError(victim, "make room")
                await pool._unload_engine(victim)

    def is_transient(self, error: Exception) -> bool:
        """See :class:`~..port.PoolPort`."""
        errors = self._errors
        if isinstance(error, errors.ModelTooLargeError):
            return ceilings.may_fit(self._pool, error)
        return isinstance(
            error,
            errors.InsufficientMemoryError | errors.ModelBusyError | errors.ModelLoadingError,
        )

    def copy_error(self, error: Exception) -> Exception:
        """See :class:`~..port.PoolPort`."""
        copy = type(error).__new__(type(error))
        copy.args = error.args
        copy.__dict__.update(error.__dict__)
        return copy

    def not_found(self, model: str) -> Exception:
        """See :class:`~..port.PoolPort`."""
        error: Exception = self._errors.ModelNotFoundError(model, list(self._pool._entries))
        return error

    def too_large(self, model: str, size: int, view: PoolView, text: str) -> Exception:
        """See :class:`~..port.PoolPort`."""
        errors, pool = self._errors, self._pool
        error: Exception
        limit = view.fixed_ceiling
        if size <= limit or limit <= 0:
            # It would fit but for what is pinned: the pool has another name for that.
            error = errors.InsufficientMemoryError(size, view.used, text)
            return error
        extra: dict[str, Any] = {}
        advise = getattr(pool, "_ceiling_binding_and_advice", None)
        if advise is not None:
            binding, advice = advise(
                ceiling=limit, current=view.used, tail="use a smaller model"
            )
            extra = {"binding": binding, "advice": advice}
        error = errors.ModelTooLargeError(model, size, limit, **extra)
        return error

    def refused(self, refusal: Refusal) -> Exception:
        """See :class:`~..port.PoolPort`."""
        error: Any = refused_class(self._errors.SchedulerQueueFullError)
        refused: Exception = error(refusal)
        return refused

    def seconds_per_byte(self) -> float | None:
        """See :class:`~..port.PoolPort`."""
        per_gb = getattr(self._pool, "_load_seconds_per_gb_ema", None)
        return None if per_gb is None else float(per_gb) / 1024**3

    def wrong_kind(self, path: str, model: str) -> Refusal | None:
        """See :class:`~..port.PoolPort`."""
        return kinds.refusal(path, self._pool._entries.get(model))

    def planned_victim(self) -> str | None:
        """The next model to leave for the load of this task; None outside of one."""
        for victim in planned_victims.get():
            entry = self._pool._entries.get(victim)
            if (
                entry is not None
                and entry.engine is not None
                and not self.is_busy(entry)
                and not entry.is_pinned
                and victim not in self.unloading()
            ):
                return victim
        return None

    # -- what a pool that is patched from outside knows better ---------------

    def unloading(self) -> Collection[str]:
        """Models whose teardown runs now."""
        found: Collection[str] = self._pool._unloading_models
        return found

    def is_busy(self, entry: Any) -> bool:
        """Whether a model is leased, or its engine works for a caller without a lease.

        A dead engine will finish nothing, whatever holds a lease of it.
        """
        engine = entry.engine
        if engine is not None and not lives(engine):
            return False
        return entry.in_use > 0 or (engine is not None and self.works(engine))

    def works(self, engine: Any) -> bool:
        """Whether an engine that nothing leases has active requests."""
        try:
            # `is True`, as the pool's own check has it.
            return engine.has_active_requests() is True
        except Exception:  # a check that cannot answer must not pin memory
            return False

    def is_vision(self, engine: Any) -> bool:
        """Whether ``engine`` is one that a forced text load replaces."""
        return isinstance(engine, self._module.VLMBatchedEngine)

    def last_used(self, model: str, entry: Any) -> float:
        """When it was handed out or given back last, by one clock for all models."""
        return float(entry.last_access)

    def unread(self, model: str, entry: Any) -> int:
        """How many of its leases are held for answers that their clients do not read."""
        return 0

    def sessions(self, model: str, entry: Any) -> int:
        """How many of its leases are held by open sockets."""
        return 0

    def answering(self, model: str, entry: Any) -> float | None:
        """Seconds for which its oldest answer runs; None where it cannot be parked."""
        return None

    def parked_bytes(self) -> int:
        """What the parked answers of all models hold."""
        return 0

    def park(self, model: str, most: int | None) -> None:
        """See :class:`~..port.PoolPort`."""

    def put_back(self, model: str, engine: Any, answers: Sequence[ParkedAnswer]) -> None:
        """See :class:`~..port.PoolPort`."""

    def let_go_stalled(self, model: str, entry: Any) -> None:
        """Take back leases that are held only for clients that do not read."""

    async def may_load(self) -> None:
        """Wait for what no load may meet, a change of the models' folders for example."""

    def handed_out_dead(self, model: str) -> None:
        """The pool handed out an engine of ``model`` that cannot serve."""

    def sees_jobs(self) -> bool:
        """Whether the jobs of a load are noted (:func:`~..load_work.note`)."""
        return True


@cache
def refused_class(base: Any) -> type[Exception]:
    """The class of refusals: the server's own queue-full error, subclassed.

    It is neither an ``EnginePoolError`` nor an ``HTTPException``, so the server passes it
    on untouched, and without the middleware it is the server's own 503.
    """

    class AdmissionRefused(base):  # type: ignore[misc]
        """The admission queue refused a request; ``refusal`` says how and why."""

        def __init__(self, refusal: Refusal) -> None:
            Exception.__init__(self, refusal.message)
            self.refusal = refusal
            self.message = refusal.message
            self.details: dict[str, Any] = {"code": refusal.code}
            self.current_depth = self.max_depth = 0

    return AdmissionRefused
