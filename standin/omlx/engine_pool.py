"""Loaded models under one lock.

Everything that loads or unloads holds ``EnginePool._lock`` for as long as it
takes, and so does every request for a model that is loaded already: that is the
defect omlx-admission is about, kept here on purpose, with its companions.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from .engine import BaseEngine, BatchedEngine
from .engine.embedding import EmbeddingEngine
from .engine.reranker import RerankerEngine
from .engine.sts import STSEngine
from .engine.stt import STTEngine
from .engine.tts import TTSEngine
from .engine.vlm import VLMBatchedEngine
from .engine_core import get_mlx_executor
from .exceptions import (
    InsufficientMemoryError,
    ModelBusyError,
    ModelLoadingError,
    ModelNotFoundError,
    ModelTooLargeError,
    ModelUnavailableError,
)
from .model_discovery import discover_models, discover_models_from_dirs, format_size
from .model_settings import runtime_signature
from .scheduler import SchedulerConfig
from .utils.proc_memory import get_phys_footprint

logger = logging.getLogger(__name__)

_PENDING_POLL_S = 0.1
_ROUNDS = 10
_ROUND_S = 0.5
_RECLAIM_ROUNDS = 3
_RECLAIM_S = 1.0
_TOLERANCE_BYTES = 2 * 1024**3
_TOLERANCE_SHARE = 0.05
_FAILED_LOAD_SLACK_BYTES = 2 * 1024**3


@dataclass
class EngineEntry:
    """What the pool knows about one model. Sizes in bytes, ``last_access`` in epoch s."""

    model_id: str
    model_path: str
    model_type: str
    engine_type: str
    estimated_size: int
    text_only_size: int = 0
    actual_size: int | None = None
    runtime_estimated_size: int | None = None
    config_model_type: str = ""
    model_context_length: int | None = None
    is_helper: bool = False
    engine: Any = None
    last_access: float = 0.0
    is_loading: bool = False
    loading_started_at: float | None = None
    is_pinned: bool = False
    abort_loading: bool = False
    in_use: int = 0
    abort_requested: bool = False
    pending_unload_reason: str | None = None
    pending_unload_allow_pinned: bool = False
    runtime_settings_signature: tuple[tuple[str, str], ...] | None = None
    load_failed: bool = False
    load_failure_message: str | None = None


class EnginePool:
    """Loads, hands out, evicts and unloads engines."""

    _MODEL_TYPE_TO_ENGINE: ClassVar[dict[str, str]] = {"llm": "batched"}

    def __init__(self, scheduler_config: SchedulerConfig | None = None):
        self._entries: dict[str, EngineEntry] = {}
        self._lock = asyncio.Lock()
        self._current_model_memory = 0
        self._model_dirs: list[Path] = []
        self._scheduler_config = scheduler_config or SchedulerConfig()
        # Set by the server once it runs; a pool without them admits everything.
        self._process_memory_enforcer: Any = None
        self._get_final_ceiling: Any = None
        self._get_admission_ceiling: Any = None
        self._get_admission_soft_target: Any = None
        self._settings_manager: Any = None
        self._load_seconds_per_gb_ema: float | None = None
        self._lease_release_tasks: set[asyncio.Task[None]] = set()
        self._pending_unload_tasks: dict[str, asyncio.Task[None]] = {}
        self._failed_load_reclaim_task: asyncio.Task[None] | None = None
        self._shutting_down = False

    # -- what is known ------------------------------------------------------

    @property
    def current_model_memory(self) -> int:
        return self._current_model_memory

    @property
    def model_count(self) -> int:
        return len(self._entries)

    @property
    def loaded_model_count(self) -> int:
        return len(self.get_loaded_model_ids())

    def get_model_ids(self) -> list[str]:
        return list(self._entries)

    def get_loaded_model_ids(self) -> list[str]:
        return [key for key, entry in self._entries.items() if entry.engine is not None]

    def get_entry(self, model_id: str) -> EngineEntry | None:
        return self._entries.get(model_id)

    def resolve_model_id(self, model_id_or_alias: str, settings_manager: Any) -> str:
        """The model meant by a name, alias, exposed profile or ``provider/name``.

        A name nobody knows comes back unchanged.
        """
        names = [model_id_or_alias]
        if "/" in model_id_or_alias:
            names.append(model_id_or_alias.split("/", 1)[1])
        for name in names:
            found = self._known_name(name, settings_manager)
            if found is not None:
                return found
        return model_id_or_alias

    def _known_name(self, name: str, settings_manager: Any) -> str | None:
        if name in self._entries:
            return name
        for known in self._entries:
            if known.lower() == name.lower():
                return known
        if settings_manager is None:
            return None
        source = settings_manager.get_exposed_profile_source_model_id(name)
        if source is not None:
            return str(source)
        for model_id, settings in settings_manager.get_all_settings().items():
            if settings.model_alias == name:
                return str(model_id)
        return None

    def discover_models(
        self, model_dirs: str | list[str], pinned_models: list[str] | None = None
    ) -> None:
        """Scan folders. Entries neither loaded nor loading are replaced or dropped."""
        dirs = (
            [Path(model_dirs)] if isinstance(model_dirs, str) else [Path(d) for d in model_dirs]
        )
        self._model_dirs = dirs
        found = discover_models(dirs[0]) if len(dirs) == 1 else discover_models_from_dirs(dirs)
        pinned = set(pinned_models or [])
        for model_id, model in found.items():
            old = self._entries.get(model_id)
            if old is not None and (old.engine is not None or old.is_loading):
                old.is_pinned = model_id in pinned
                continue
            self._entries[model_id] = EngineEntry(
                model_id=model_id,
                model_path=model.model_path,
                model_type=model.model_type,
                engine_type=model.engine_type,
                estimated_size=model.estimated_size,
                text_only_size=model.text_only_size,
                config_model_type=model.config_model_type,
                model_context_length=model.model_context_length,
                is_pinned=model_id in pinned,
            )
        for model_id, entry in list(self._entries.items()):
            if model_id not in found and entry.engine is None and not entry.is_loading:
                del self._entries[model_id]
        logger.info("found %d models", len(self._entries))

    def apply_settings_overrides(self, settings_manager: Any) -> None:
        """Let a model's settings say what kind of model it is."""
        for model_id, entry in self._entries.items():
            kind = settings_manager.get_settings(model_id).model_type_override
            if kind:
                entry.model_type = kind
                entry.engine_type = self._MODEL_TYPE_TO_ENGINE.get(kind, kind)

    def set_pinned(self, model_id: str, pinned: bool) -> bool:
        entry = self._entries.get(model_id)
        if entry is None:
            return False
        entry.is_pinned = pinned
        return True

    # -- numbers ------------------------------------------------------------

    @staticmethod
    def _ask(callback: Any) -> int:
        if callback is None:
            return 0
        try:
            return int(callback())
        except Exception:  # noqa: BLE001 - a broken gauge means no limit, as in oMLX
            return 0

    def _current_ceiling(self) -> int:
        """Bytes that may be in use; 0 is no limit."""
        return self._ask(self._get_final_ceiling)

    def _fallback_admission_ceiling(self) -> int:
        """The ceiling to evict for when the guard is off."""
        return self._ask(self._get_admission_ceiling)

    def _admission_soft_target(self) -> int:
        """Bytes above which idle models are evicted before a load."""
        return self._ask(self._get_admission_soft_target)

    def _usage(self) -> int:
        return max(mx.get_active_memory(), get_phys_footprint(), self._current_model_memory)

    def _entry_resident_size(self, entry: EngineEntry) -> int:
        if entry.runtime_estimated_size is not None:
            return entry.runtime_estimated_size
        return entry.estimated_size

    def _load_size(self, entry: EngineEntry, force_lm: bool) -> int:
        if entry.text_only_size and (force_lm or entry.engine_type == "batched"):
            return entry.text_only_size
        return self._entry_resident_size(entry)

    def _engine_runtime_signature(
        self, model_id: str, runtime_settings: Any = None
    ) -> tuple[tuple[str, str], ...] | None:
        settings = runtime_settings
        if settings is None and self._settings_manager is not None:
            settings = self._settings_manager.get_settings(model_id)
        return runtime_signature(settings)

    def _wake_process_memory_enforcer(self, *, active: bool = False) -> None:
        wake = getattr(self._process_memory_enforcer, "wake", None)
        if callable(wake):
            wake(active=active)

    # -- busy or not --------------------------------------------------------

    @staticmethod
    def _entry_has_active_requests(entry: EngineEntry) -> bool:
        ask = getattr(entry.engine, "has_active_requests", None)
        if not callable(ask):
            return False
        try:
            return ask() is True
        except Exception:  # noqa: BLE001 - an engine that cannot say counts as busy
            return True

    def _entry_is_busy(self, entry: EngineEntry) -> bool:
        return entry.in_use > 0 or self._entry_has_active_requests(entry)

    @staticmethod
    def _resolve_scheduler_from_engine(engine: Any) -> Any:
        scheduler = getattr(engine, "scheduler", None)
        if scheduler is not None:
            return scheduler
        core = getattr(getattr(engine, "_engine", None), "engine", None)
        return getattr(core, "scheduler", None)

    def _entry_has_scheduler_work(self, entry: EngineEntry) -> bool:
        scheduler = self._resolve_scheduler_from_engine(entry.engine)
        if scheduler is None:
            return False
        ask = getattr(scheduler, "has_requests", None)
        try:
            if callable(ask) and ask():
                return True
        except Exception:  # noqa: BLE001 - as above
            return True
        queues = ("running", "waiting", "prefilling", "requests")
        return any(getattr(scheduler, name, None) for name in queues)

    def _entry_is_quiescent(self, entry: EngineEntry) -> bool:
        return not (self._entry_is_busy(entry) or self._entry_has_scheduler_work(entry))

    def _raise_if_reload_busy(self, entry: EngineEntry, operation: str) -> None:
        if self._entry_is_busy(entry):
            raise ModelBusyError(entry.model_id, operation)

    def _validate_llm_engine_ready(self, model_id: str, engine: Any) -> None:
        if engine is None:
            raise ModelLoadingError(model_id, f"'{model_id}' gave no engine")
        if isinstance(engine, BaseEngine):
            encode = getattr(getattr(engine, "tokenizer", None), "encode", None)
            if not callable(encode):
                raise ModelLoadingError(model_id, f"'{model_id}' has no tokenizer")

    def _raise_if_model_path_missing_locked(self, model_id: str, entry: EngineEntry) -> None:
        if (Path(entry.model_path) / "config.json").exists():
            return
        if entry.engine is None:
            self._entries.pop(model_id, None)
        raise ModelNotFoundError(model_id, [key for key in self._entries if key != model_id])

    def _raise_if_load_failed(self, model_id: str, entry: EngineEntry) -> None:
        if entry.load_failed:
            raise ModelUnavailableError(
                model_id,
                f"'{model_id}' failed to load before: {entry.load_failure_message}; "
                "reload the models to try again",
            )

    @staticmethod
    def _clear_load_failure(entry: EngineEntry) -> None:
        entry.load_failed = False
        entry.load_failure_message = None

    # -- handing out --------------------------------------------------------

    async def get_engine(
        self,
        model_id: str,
        force_lm: bool = False,
        _lease: bool = False,
        runtime_settings: Any = None,
    ) -> Any:
        """The engine of a model, loaded if need be; ``_lease`` keeps it from eviction.

        Raises one of the EnginePoolError kinds. Idle models evicted on the way stay
        evicted when the answer is no.
        """
        async with self._lock:
            entry = self._entries.get(model_id)
            if entry is None:
                raise ModelNotFoundError(model_id, list(self._entries))
            if entry.pending_unload_reason:
                raise ModelBusyError(model_id, "start work while unload is pending")
            unloaded = False
            if entry.engine is not None:
                unloaded = await self._unload_other_variant(entry, force_lm, runtime_settings)
            if entry.engine is not None:
                self._validate_llm_engine_ready(model_id, entry.engine)
                if entry.runtime_settings_signature is None:
                    entry.runtime_settings_signature = self._engine_runtime_signature(
                        model_id, runtime_settings
                    )
                entry.last_access = time.time()
            else:
                self._raise_if_model_path_missing_locked(model_id, entry)
                self._raise_if_load_failed(model_id, entry)
                await self._make_room_locked(entry, self._load_size(entry, force_lm), unloaded)
                await self._load_engine(
                    model_id, force_lm=force_lm, runtime_settings=runtime_settings
                )
                entry = self._entries[model_id]
                self._validate_llm_engine_ready(model_id, entry.engine)
            if _lease:
                entry.in_use += 1
            return entry.engine

    async def _unload_other_variant(
        self, entry: EngineEntry, force_lm: bool, runtime_settings: Any
    ) -> bool:
        """Unload an engine that was loaded in another way; busy ones raise."""
        wanted = self._engine_runtime_signature(entry.model_id, runtime_settings)
        has = entry.runtime_settings_signature
        differs = (
            runtime_settings is not None
            if has is None
            else (wanted is not None and wanted != has)
        )
        if differs:
            operation = "reload runtime settings variant"
        elif force_lm and isinstance(entry.engine, VLMBatchedEngine):
            operation = "reload as LM"
        else:
            return False
        self._raise_if_reload_busy(entry, operation)
        await self._unload_engine(entry.model_id)
        return True

    async def _make_room_locked(self, entry: EngineEntry, size: int, evicted: bool) -> None:
        """Evict idle models, least recently used first, until ``size`` bytes fit.

        Starts at the soft target, refuses at the ceiling. ``evicted`` says that this
        call unloaded something already.
        """
        ceiling = self._current_ceiling()
        guard_off = ceiling <= 0
        if guard_off:
            ceiling = self._fallback_admission_ceiling()
        if ceiling <= 0:
            return
        soft = self._admission_soft_target()
        target = min(soft, ceiling) if soft > 0 else ceiling
        while True:
            in_use = self._usage()
            if in_use + size <= target:
                return
            victim = self._find_lru_victim()
            if victim is None:
                break
            logger.info("evicting %s for %s", victim, entry.model_id)
            await self._unload_engine(victim)
            evicted = True
        if in_use + size <= ceiling:
            return
        if evicted:
            # The kernel's count may still include what was just evicted.
            in_use = max(mx.get_active_memory(), self._current_model_memory)
            if in_use + size <= ceiling:
                return
        if guard_off:
            logger.warning("loading %s over the ceiling: the guard is off", entry.model_id)
            return
        if size > ceiling:
            raise ModelTooLargeError(entry.model_id, size, ceiling)
        raise InsufficientMemoryError(
            required=size,
            current=in_use,
            message=(
                f"no room for {entry.model_id}: {format_size(in_use)} in use, "
                f"{format_size(size)} needed, ceiling {format_size(ceiling)}"
            ),
        )

    def _find_lru_victim(self) -> str | None:
        """The idle, unpinned, loaded model used longest ago."""
        idle = [
            (entry.last_access, key)
            for key, entry in self._entries.items()
            if entry.engine is not None
            and not entry.is_pinned
            and entry.in_use <= 0
            and not self._entry_has_active_requests(entry)
        ]
        return min(idle)[1] if idle else None

    async def _release_engine_lease(self, model_id: str) -> None:
        async with self._lock:
            entry = self._entries.get(model_id)
            if entry is not None and entry.in_use > 0:
                entry.in_use -= 1
            await self._unload_pending_if_idle_locked(model_id)

    async def release_engine(self, model_id: str) -> None:
        """Give a lease back; goes on in its own task if the caller is cancelled."""
        task = asyncio.create_task(
            self._release_engine_lease(model_id), name=f"engine-lease-release:{model_id}"
        )
        self._lease_release_tasks.add(task)
        task.add_done_callback(self._finish_lease_release_task)
        await asyncio.shield(task)

    def _finish_lease_release_task(self, task: asyncio.Task[None]) -> None:
        self._lease_release_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("releasing a lease failed", exc_info=task.exception())

    async def _drain_lease_release_tasks(self) -> None:
        while self._lease_release_tasks:
            await asyncio.gather(*self._lease_release_tasks, return_exceptions=True)

    @asynccontextmanager
    async def acquire(self, model_id: str, force_lm: bool = False) -> AsyncIterator[Any]:
        """An engine under a lease for the length of a block."""
        engine = await self.get_engine(model_id, force_lm=force_lm, _lease=True)
        try:
            yield engine
        finally:
            await self.release_engine(model_id)

    # -- unloading ----------------------------------------------------------

    def _mark_pending_unload_locked(
        self,
        model_id: str,
        reason: str,
        *,
        abort_requested: bool = False,
        allow_pinned: bool = False,
    ) -> bool:
        """Have a model unloaded once it is idle; False when it cannot be marked."""
        entry = self._entries.get(model_id)
        if entry is None or entry.engine is None or entry.is_loading:
            return False
        if entry.is_pinned and not allow_pinned:
            return False
        entry.pending_unload_reason = reason
        entry.pending_unload_allow_pinned = allow_pinned
        entry.abort_requested = entry.abort_requested or abort_requested
        return True

    def _pending_is_ready(self, entry: EngineEntry | None) -> bool:
        return bool(
            entry is not None
            and entry.engine is not None
            and entry.pending_unload_reason
            and not entry.is_loading
            and (not entry.is_pinned or entry.pending_unload_allow_pinned)
            and self._entry_is_quiescent(entry)
        )

    def _find_pending_unload_ready_locked(self) -> str | None:
        ready = [
            (entry.last_access, key)
            for key, entry in self._entries.items()
            if self._pending_is_ready(entry)
        ]
        return min(ready)[1] if ready else None

    async def _unload_pending_if_idle_locked(self, model_id: str) -> bool:
        entry = self._entries.get(model_id)
        if entry is None or not self._pending_is_ready(entry):
            return False
        logger.warning("unloading %s: %s", model_id, entry.pending_unload_reason)
        entry.pending_unload_reason = None
        entry.pending_unload_allow_pinned = False
        entry.abort_requested = False
        await self._unload_engine(model_id)
        return True

    def _schedule_pending_unload_locked(self, model_id: str) -> None:
        current = self._pending_unload_tasks.get(model_id)
        if current is not None and not current.done():
            return
        task = asyncio.create_task(
            self._wait_for_pending_unload(model_id), name=f"engine-pending-unload:{model_id}"
        )
        self._pending_unload_tasks[model_id] = task
        task.add_done_callback(lambda done: self._finish_pending_unload_task(model_id, done))

    def _finish_pending_unload_task(self, model_id: str, task: asyncio.Task[None]) -> None:
        if self._pending_unload_tasks.get(model_id) is task:
            del self._pending_unload_tasks[model_id]
        if not task.cancelled() and task.exception() is not None:
            logger.error("unloading %s failed", model_id, exc_info=task.exception())

    async def _wait_for_pending_unload(self, model_id: str) -> None:
        while not self._shutting_down:
            async with self._lock:
                entry = self._entries.get(model_id)
                if entry is None or entry.engine is None or not entry.pending_unload_reason:
                    return
                if await self._unload_pending_if_idle_locked(model_id):
                    return
            await asyncio.sleep(_PENDING_POLL_S)

    async def request_unload(self, model_id: str, *, reason: str = "manual unload") -> bool:
        """Unload now, or abort everything and unload when it is out (returns False)."""
        async with self._lock:
            entry = self._entries.get(model_id)
            if entry is None or entry.engine is None:
                return True
            if entry.is_loading:
                raise ModelLoadingError(model_id, f"'{model_id}' is loading")
            if self._entry_is_quiescent(entry):
                await self._unload_engine(model_id)
                return True
            self._mark_pending_unload_locked(
                model_id, reason, abort_requested=True, allow_pinned=True
            )
            abort = getattr(entry.engine, "abort_all_requests", None)
            if callable(abort):
                try:
                    await abort(
                        reason=f"'{model_id}' is unloading", error_code="model_unloading"
                    )
                except TypeError:
                    await abort()
                except Exception:
                    logger.warning("aborting requests of %s failed", model_id, exc_info=True)
            if await self._unload_pending_if_idle_locked(model_id):
                return True
            self._schedule_pending_unload_locked(model_id)
            return False

    def get_abort_requested_reason(self, model_id: str | None) -> str | None:
        entry = self._entries.get(model_id) if model_id is not None else None
        if entry is None or not entry.abort_requested:
            return None
        return entry.pending_unload_reason or "request abort"

    async def unload_if_idle_unpinned(self, model_id: str) -> bool:
        """Unload a model nobody uses."""
        async with self._lock:
            entry = self._entries.get(model_id)
            if entry is None or entry.engine is None or entry.is_loading or entry.is_pinned:
                return False
            if entry.in_use > 0:
                return False
            if self._entry_has_active_requests(entry):
                entry.last_access = time.time()
                return False
            await self._unload_engine(model_id)
            return True

    def _other_entries_serving(self, model_id: str) -> bool:
        return any(
            entry.is_loading or (entry.engine is not None and self._entry_is_busy(entry))
            for key, entry in list(self._entries.items())
            if key != model_id
        )

    async def _unload_engine(self, model_id: str) -> None:
        """Stop an engine and wait for its memory.

        Until the stop has ended, the entry still shows the dying engine, and nothing
        says so: whoever asks meanwhile without the lock is handed it.
        """
        entry = self._entries.get(model_id)
        if entry is None or entry.engine is None:
            return
        size = self._entry_resident_size(entry)
        before = mx.get_active_memory()
        try:
            await entry.engine.stop()
        except Exception as error:  # noqa: BLE001 - it is dropped whatever happens
            logger.warning("stopping %s failed: %s", model_id, error)
        reset = getattr(entry.engine, "_reset_activity_tracking", None)
        if callable(reset):
            reset()
        # Readers that the stop woke up still hold the engine in their frames.
        for _ in range(5):
            await asyncio.sleep(0)
        entry.engine = None
        entry.last_access = 0.0
        entry.actual_size = None
        entry.abort_requested = False
        entry.pending_unload_reason = None
        entry.pending_unload_allow_pinned = False
        entry.runtime_settings_signature = None
        entry.runtime_estimated_size = None
        gc.collect()
        await clear_cache()
        settled = await settle(
            model_id,
            size,
            before,
            lambda: mx.get_active_memory(),
            lambda: self._other_entries_serving(model_id),
        )
        self._current_model_memory = max(0, self._current_model_memory - size)
        if not settled:
            await reclaim(model_id)
        logger.info("unloaded %s", model_id)
        self._wake_process_memory_enforcer()

    # -- loading ------------------------------------------------------------

    async def _load_engine(
        self, model_id: str, force_lm: bool = False, runtime_settings: Any = None
    ) -> None:
        """Load a model into its entry; the caller has made room."""
        entry = self._entries[model_id]
        if entry.is_loading:
            raise ModelLoadingError(model_id)
        entry.is_loading = True
        entry.loading_started_at = started = time.monotonic()
        entry.abort_loading = False
        self._wake_process_memory_enforcer(active=True)
        memory_before = max(mx.get_active_memory(), get_phys_footprint())
        size = self._load_size(entry, force_lm)
        completed = detached = False
        try:
            settings = runtime_settings
            if settings is None and self._settings_manager is not None:
                settings = self._settings_manager.get_settings(model_id)
            entry.runtime_estimated_size = size
            # Shared by all loads: engines copy it while they start.
            self._scheduler_config.model_name = model_id
            self._scheduler_config.model_path = entry.model_path
            engine = self._build_engine(entry, force_lm, settings)
            await engine.start()
            if entry.abort_loading:
                await self._drop(engine)
                raise ModelLoadingError(model_id, f"the load of '{model_id}' was aborted")
            self._validate_llm_engine_ready(model_id, engine)
            entry.engine = engine
            entry.last_access = time.time()
            self._current_model_memory += size
            completed = True
            self._clear_load_failure(entry)
            entry.runtime_settings_signature = self._engine_runtime_signature(
                model_id, settings
            )
            if self._process_memory_enforcer is not None:
                self._process_memory_enforcer._propagate_memory_limit()
            await clear_cache()
            grown = max(mx.get_active_memory(), get_phys_footprint()) - memory_before
            entry.actual_size = max(0, grown) or size
            if self._entries.get(model_id) is not entry:
                detached = True
                entry.engine = None
                self._current_model_memory = max(0, self._current_model_memory - size)
                await self._drop(engine)
                raise ModelLoadingError(model_id, f"'{model_id}' was replaced while loading")
            logger.info("loaded %s in %.2f s", model_id, time.monotonic() - started)
        except Exception as error:
            self._schedule_failed_load_reclaim(model_id, memory_before)
            if entry.abort_loading or detached:
                raise
            entry.load_failed = True
            entry.load_failure_message = str(error) or type(error).__name__
            logger.exception("loading %s failed", model_id)
            raise ModelUnavailableError(
                model_id, f"'{model_id}' failed to load: {entry.load_failure_message}"
            ) from error
        finally:
            if completed:
                self._observe_load(time.monotonic() - started, size)
            else:
                entry.runtime_estimated_size = None
            entry.is_loading = False
            entry.loading_started_at = None
            entry.abort_loading = False
            self._wake_process_memory_enforcer()

    def _build_engine(self, entry: EngineEntry, force_lm: bool, settings: Any) -> Any:
        kind = "batched" if force_lm and entry.engine_type == "vlm" else entry.engine_type
        trust = bool(getattr(settings, "trust_remote_code", False))
        if kind == "embedding":
            return EmbeddingEngine(
                model_name=entry.model_path,
                trust_remote_code=trust,
                scheduler_config=self._scheduler_config,
            )
        others = {
            "reranker": RerankerEngine,
            "audio_stt": STTEngine,
            "audio_tts": TTSEngine,
            "audio_sts": STSEngine,
        }
        if kind in others:
            return others[kind](model_name=entry.model_path)

        async def evict(request: Any) -> bool:
            return await self._evict_idle_lru_for_prefill(entry.model_id, request)

        engine_class = VLMBatchedEngine if kind == "vlm" else BatchedEngine
        return engine_class(
            model_name=entry.model_path,
            trust_remote_code=trust,
            scheduler_config=self._scheduler_config,
            model_settings=settings,
            prefill_eviction_callback=evict,
        )

    @staticmethod
    async def _drop(engine: Any) -> None:
        try:
            await engine.stop()
        except Exception:
            logger.warning("stopping an unwanted engine failed", exc_info=True)
        gc.collect()
        await clear_cache()

    def _observe_load(self, seconds: float, size: int) -> None:
        gigabytes = size / 1024**3
        if seconds <= 0 or gigabytes <= 0:
            return
        sample, old = seconds / gigabytes, self._load_seconds_per_gb_ema
        self._load_seconds_per_gb_ema = sample if old is None else old * 0.9 + sample * 0.1

    def _schedule_failed_load_reclaim(self, model_id: str, memory_before: int) -> None:
        """Clean up later: the exception on its way out still holds the weights."""

        async def _reclaim() -> None:
            for turn in range(6):
                await asyncio.sleep(1.0 if turn else 0.5)
                gc.collect()
                await clear_cache()
                current = max(mx.get_active_memory(), get_phys_footprint())
                if current <= memory_before + _FAILED_LOAD_SLACK_BYTES:
                    break
            self._wake_process_memory_enforcer()

        self._failed_load_reclaim_task = asyncio.create_task(_reclaim())

    # -- other callers of the lock ------------------------------------------

    async def _evict_idle_lru_for_prefill(
        self, exclude_model_id: str, eviction_request: Any
    ) -> bool:
        """Evict idle models until a prompt fits; True when anything was freed."""
        target = int(getattr(eviction_request, "target_cap_bytes", 0) or 0)
        predicted = int(getattr(eviction_request, "predicted_transient_bytes", 0) or 0)
        if target <= 0 or predicted <= 0:
            return False
        evicted = reclaimed = False
        async with self._lock:
            while self._usage() + predicted > target:
                victim = self._find_lru_prefill_eviction_victim(
                    exclude_model_id=exclude_model_id
                )
                if victim is not None:
                    await self._unload_engine(victim)
                    evicted = True
                elif not reclaimed:
                    reclaimed = True
                    await self._reclaim_pooled_buffers_for_prefill(exclude_model_id, "")
                else:
                    return evicted
            return evicted or reclaimed

    def _find_lru_prefill_eviction_victim(self, *, exclude_model_id: str) -> str | None:
        idle = [
            (entry.last_access, key)
            for key, entry in self._entries.items()
            if key != exclude_model_id
            and entry.engine is not None
            and not entry.is_pinned
            and not entry.is_loading
            and self._entry_is_quiescent(entry)
        ]
        return min(idle)[1] if idle else None

    async def _reclaim_pooled_buffers_for_prefill(self, model_id: str, request_id: str) -> None:
        entry = self._entries.get(model_id)
        core = getattr(getattr(entry and entry.engine, "_engine", None), "engine", None)
        executor = getattr(core, "_mlx_executor", None)
        scheduler = getattr(core, "scheduler", None)
        if executor is not None and scheduler is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(executor, scheduler._reclaim_prefill_headroom)

    async def check_ttl_expirations(
        self, settings_manager: Any, global_idle_timeout_seconds: int | None = None
    ) -> list[str]:
        """Unload models idle for longer than their time to live; returns their names."""
        now = time.time()
        expired = []
        async with self._lock:
            for model_id, entry in self._entries.items():
                if entry.engine is None or entry.is_loading or entry.is_pinned:
                    continue
                ttl = settings_manager.get_settings(model_id).ttl_seconds
                if ttl is None:
                    ttl = global_idle_timeout_seconds
                if ttl is None or now - entry.last_access < ttl:
                    continue
                if entry.engine.has_active_requests() or entry.in_use > 0:
                    entry.last_access = now
                    continue
                await self._unload_engine(model_id)
                expired.append(model_id)
        return expired

    async def preload_pinned_models(self) -> None:
        for model_id in [key for key, entry in self._entries.items() if entry.is_pinned]:
            try:
                await self.get_engine(model_id)
            except Exception:
                logger.exception("preloading %s failed", model_id)

    async def shutdown(self) -> None:
        self._shutting_down = True
        if self._pending_unload_tasks:
            await asyncio.gather(*self._pending_unload_tasks.values(), return_exceptions=True)
        await self._drain_lease_release_tasks()
        async with self._lock:
            for model_id in list(self._entries):
                try:
                    await self._unload_engine(model_id)
                except Exception:
                    logger.exception("unloading %s failed", model_id)

    def get_status(self) -> dict[str, Any]:
        return {
            "final_ceiling": self._current_ceiling(),
            "current_model_memory": self._current_model_memory,
            "model_count": self.model_count,
            "loaded_count": self.loaded_model_count,
            "load_seconds_per_gb_estimate": self._load_seconds_per_gb_ema,
            "models": [
                {
                    "id": model_id,
                    "model_path": entry.model_path,
                    "loaded": entry.engine is not None,
                    "is_loading": entry.is_loading,
                    "loading_started_at": entry.loading_started_at,
                    "estimated_size": entry.estimated_size,
                    "resident_estimated_size": self._entry_resident_size(entry),
                    "actual_size": entry.actual_size,
                    "pinned": entry.is_pinned,
                    "engine_type": entry.engine_type,
                    "model_type": entry.model_type,
                    "config_model_type": entry.config_model_type,
                    "model_context_length": entry.model_context_length,
                    "is_helper": entry.is_helper,
                    "last_access": entry.last_access or None,
                }
                for model_id, entry in sorted(self._entries.items())
            ],
        }


async def clear_cache() -> None:
    """Drain and clear on the global thread: behind whatever that thread is doing."""
    await asyncio.get_running_loop().run_in_executor(
        get_mlx_executor(), lambda: (mx.synchronize(), mx.clear_cache())
    )


async def settle(
    model_id: str,
    size: int,
    active_before: int,
    active_memory: Callable[[], int],
    others_serving: Callable[[], bool],
) -> bool:
    """Wait for ``size`` bytes to come back; False when they did not in time.

    Gives up at once when another model is at work: what comes back cannot be told
    from what the other one takes. ``active_memory`` reads the gauge, and
    ``active_before`` is what it read before the stop.
    """
    wanted = max(0, size - max(_TOLERANCE_BYTES, int(size * _TOLERANCE_SHARE)))
    for _ in range(_ROUNDS):
        if active_before - active_memory() >= wanted:
            return True
        if others_serving():
            logger.info("cannot tell whether %s is out: other models are at work", model_id)
            return True
        await asyncio.sleep(_ROUND_S)
        gc.collect()
        await clear_cache()
    return False


async def reclaim(model_id: str) -> None:
    """A few more tries after a settle that gave up waiting."""
    logger.warning("memory of %s did not come back in time", model_id)
    for _ in range(_RECLAIM_ROUNDS):
        gc.collect()
        await clear_cache()
        await asyncio.sleep(_RECLAIM_S)
