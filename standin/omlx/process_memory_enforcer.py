"""Watching the process's memory and acting when it passes the watermarks.

Soft: new requests join no running batch, idle models go while more than one is
loaded. Hard: the last idle model goes too, then requests of a busy one are ended,
then loads are told to stop. Emergency: the busy one is also marked for unload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import mlx.core as mx
import psutil

from .settings import get_system_memory
from .utils.proc_memory import get_phys_footprint

logger = logging.getLogger(__name__)

_GB = 1024**3
_STATIC_RESERVE = {
    "safe": 8 * _GB,
    "balanced": 6 * _GB,
    "aggressive": 4 * _GB,
    "custom": 2 * _GB,
}
_SMALL_SYSTEM = 24 * _GB
_SMALL_RESERVE = 4 * _GB
_SOFT_BY_TIER = {"safe": 0.85, "balanced": 0.90, "aggressive": 0.925, "custom": 0.85}
#: A saved value of this means the tier's own default.
_UNSET_SOFT = 0.85
_EMERGENCY_MARGIN_BYTES = 2 * _GB
_EMERGENCY_POLLS = 2


class ProcessMemoryEnforcer:
    """One task that polls, and the ceilings it works with (bytes)."""

    def __init__(
        self,
        engine_pool: Any,
        memory_guard_tier: str = "balanced",
        memory_guard_custom_ceiling_gb: float = 0.0,
        poll_interval: float = 1.0,
        settings_manager: Any = None,
        prefill_memory_guard: bool = True,
        global_settings: Any = None,
        soft_threshold: float | None = None,
        hard_threshold: float = 0.95,
    ):
        self._engine_pool = engine_pool
        self._memory_guard_tier = memory_guard_tier
        self._memory_guard_custom_ceiling_bytes = int(memory_guard_custom_ceiling_gb * _GB)
        self._active_poll_interval = poll_interval
        self._loaded_idle_poll_interval = 10.0
        self._unloaded_idle_poll_interval = 30.0
        self._settings_manager = settings_manager
        self._prefill_memory_guard = prefill_memory_guard
        self._global_settings = global_settings
        unset = soft_threshold is None or soft_threshold == _UNSET_SOFT
        self._soft_threshold = _SOFT_BY_TIER[memory_guard_tier] if unset else soft_threshold
        self._hard_threshold = hard_threshold
        self._pressure_level = "ok"
        self._over_ceiling_polls = 0
        self._activity_hint_until = 0.0
        self._running = False
        self._task: asyncio.Task[None] | None = None
        self._wake_event: asyncio.Event | None = None

    # -- ceilings -----------------------------------------------------------

    @property
    def memory_guard_tier(self) -> str:
        return self._memory_guard_tier

    def _get_static_ceiling(self) -> int:
        total = get_system_memory()
        if self._memory_guard_tier != "custom" and total < _SMALL_SYSTEM:
            return max(0, total - _SMALL_RESERVE)
        return max(0, total - _STATIC_RESERVE[self._memory_guard_tier])

    def _get_dynamic_ceiling(self) -> int:
        if self._memory_guard_tier == "custom":
            return max(0, self._memory_guard_custom_ceiling_bytes)
        return get_phys_footprint() + int(psutil.virtual_memory().available)

    def _get_effective_metal_cap_bytes(self) -> int:
        return int(mx.device_info().get("max_recommended_working_set_size", 0))

    def get_ceiling_breakdown(self) -> dict[str, int]:
        """The parts of the ceiling; all 0 when the guard is off."""
        if not self._prefill_memory_guard:
            return {"static": 0, "dynamic": 0, "metal_cap": 0, "hard_limit": 0}
        static, dynamic = self._get_static_ceiling(), self._get_dynamic_ceiling()
        metal = self._get_effective_metal_cap_bytes()
        parts = [static, dynamic, *([metal] if metal > 0 else [])]
        return {
            "static": static,
            "dynamic": dynamic,
            "metal_cap": metal,
            "hard_limit": min(parts),
        }

    def _get_hard_limit_bytes(self) -> int:
        return self.get_ceiling_breakdown()["hard_limit"]

    def get_final_ceiling(self) -> int:
        """What the pool admits against; 0 when the guard is off."""
        return self._get_hard_limit_bytes()

    def get_admission_ceiling(self) -> int:
        """What the pool evicts for even when the guard is off."""
        if self._prefill_memory_guard:
            return self._get_hard_limit_bytes()
        return self._get_static_ceiling()

    def get_admission_soft_target(self) -> int:
        """Where eviction before a load starts."""
        return int(self.get_admission_ceiling() * self._soft_threshold)

    def _current_usage_bytes(self) -> int:
        return max(mx.get_active_memory(), get_phys_footprint())

    def get_pressure_level(self) -> str:
        """``ok``, ``soft`` or ``hard``; ``ok`` while not running."""
        return self._pressure_level if self._running else "ok"

    # -- the task -----------------------------------------------------------

    def start(self) -> None:
        if not self._running:
            self._running = True
            self._propagate_memory_limit()
            self._task = asyncio.create_task(self._enforcement_loop())

    async def stop(self) -> None:
        self._running = False
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def wake(self, *, active: bool = False) -> None:
        """Poll now; ``active`` also polls fast for the next two seconds."""
        if active:
            self._activity_hint_until = time.monotonic() + max(
                2.0, self._active_poll_interval * 2
            )
        if self._wake_event is not None:
            self._wake_event.set()

    async def _enforcement_loop(self) -> None:
        self._wake_event = asyncio.Event()
        while self._running:
            self._wake_event.clear()
            try:
                await self._check_and_enforce()
                await self._check_ttl()
            except asyncio.CancelledError:
                break
            except Exception:
                logger.exception("the memory enforcer failed")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake_event.wait(), self._select_poll_interval())

    def _select_poll_interval(self) -> float:
        entries = self._engine_pool._entries.values()
        busy = any(
            entry.is_loading
            or (
                entry.engine is not None and self._engine_pool._entry_has_active_requests(entry)
            )
            for entry in entries
        )
        hinted = time.monotonic() < self._activity_hint_until
        if busy or hinted or self._pressure_level != "ok":
            return self._active_poll_interval
        if any(entry.engine is not None for entry in entries):
            return self._loaded_idle_poll_interval
        return self._unloaded_idle_poll_interval

    async def _check_ttl(self) -> None:
        if self._settings_manager is None:
            return
        timeout = None
        if self._global_settings is not None:
            timeout = self._global_settings.idle_timeout.idle_timeout_seconds
        await self._engine_pool.check_ttl_expirations(
            self._settings_manager, global_idle_timeout_seconds=timeout
        )

    def _level(self, usage: int, ceiling: int) -> str:
        if ceiling <= 0 or usage < int(ceiling * self._soft_threshold):
            return "ok"
        return "soft" if usage < int(ceiling * self._hard_threshold) else "hard"

    def _is_emergency_pressure(self, usage: int, ceiling: int) -> bool:
        if ceiling <= 0 or usage < ceiling:
            self._over_ceiling_polls = 0
            return False
        self._over_ceiling_polls += 1
        far = usage >= ceiling + _EMERGENCY_MARGIN_BYTES
        return far or self._over_ceiling_polls >= _EMERGENCY_POLLS

    def _set_level(self, level: str) -> None:
        if level != self._pressure_level:
            logger.info("memory pressure: %s, was %s", level, self._pressure_level)
            self._pressure_level = level
        self._propagate_memory_limit()

    async def _check_and_enforce(self) -> None:
        """One poll. The level is pushed to the schedulers before the lock is taken."""
        ceiling = self._get_hard_limit_bytes()
        usage = self._current_usage_bytes()
        level = self._level(usage, ceiling)
        emergency = self._is_emergency_pressure(usage, ceiling)
        self._set_level(level)
        if level == "ok":
            return
        async with self._engine_pool._lock:
            while self._current_usage_bytes() > int(ceiling * self._soft_threshold):
                if not await self._relieve_locked(level, emergency):
                    break
        self._set_level(self._level(self._current_usage_bytes(), self._get_hard_limit_bytes()))

    async def _relieve_locked(self, level: str, emergency: bool) -> bool:
        """One act of relief; False when there is nothing more to do."""
        pool = self._engine_pool
        pending = pool._find_pending_unload_ready_locked()
        if pending is not None:
            return bool(await pool._unload_pending_if_idle_locked(pending))
        victim = pool._find_lru_victim()
        if victim is not None:
            loaded = [e for e in pool._entries.values() if e.engine and not e.is_pinned]
            if level != "hard" and len(loaded) <= 1:
                return False
            await self._abort_requests(pool._entries[victim])
            await pool._unload_engine(victim)
            return True
        if level != "hard":
            return False
        busy = self._find_lru_busy_non_pinned_victim_locked()
        if busy is not None:
            await self._abort_requests(pool._entries[busy])
            if emergency:
                pool._mark_pending_unload_locked(
                    busy, "hard memory pressure", abort_requested=True
                )
                await pool._unload_pending_if_idle_locked(busy)
            return False
        loading = [entry for entry in pool._entries.values() if entry.is_loading]
        for entry in loading:
            entry.abort_loading = True
        if not loading and emergency:
            for entry in pool._entries.values():
                await self._abort_requests(entry)
        return False

    def _find_lru_busy_non_pinned_victim_locked(self) -> str | None:
        busy = [
            (entry.last_access, key)
            for key, entry in self._engine_pool._entries.items()
            if entry.engine is not None
            and not entry.is_pinned
            and self._engine_pool._entry_is_busy(entry)
        ]
        return min(busy)[1] if busy else None

    @staticmethod
    async def _abort_requests(entry: Any) -> None:
        abort = getattr(entry.engine, "abort_all_requests", None)
        if callable(abort):
            await abort()

    @staticmethod
    def _resolve_scheduler(entry: Any) -> Any:
        engine = entry.engine
        scheduler = getattr(engine, "scheduler", None)
        if scheduler is not None:
            return scheduler
        core = getattr(getattr(engine, "_engine", None), "engine", None)
        return getattr(core, "scheduler", None) or getattr(engine, "_prefill_guard", None)

    def _propagate_memory_limit(self) -> None:
        ceiling = self._get_hard_limit_bytes()
        for entry in self._engine_pool._entries.values():
            scheduler = self._resolve_scheduler(entry)
            if scheduler is None:
                continue
            scheduler._memory_limit_bytes = int(ceiling * self._soft_threshold)
            scheduler._memory_hard_limit_bytes = ceiling
            scheduler._memory_hard_watermark_bytes = int(ceiling * self._hard_threshold)
            scheduler._prefill_memory_guard = self._prefill_memory_guard
            scheduler._admission_paused = self._pressure_level != "ok"

    def get_status(self) -> dict[str, Any]:
        ceiling = self._get_hard_limit_bytes()
        return {
            "enabled": self._running,
            "memory_guard_tier": self._memory_guard_tier,
            "ceiling_bytes": ceiling,
            "soft_bytes": int(ceiling * self._soft_threshold),
            "hard_bytes": int(ceiling * self._hard_threshold),
            "current_bytes": self._current_usage_bytes(),
            "pressure_level": self._pressure_level,
        }
