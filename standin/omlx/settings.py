"""The server's settings file, ``<base path>/settings.json``.

Command line beats environment beats file. Saving rewrites the whole file from
the known fields, so a key nobody declared here is lost at the first save.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .scheduler import SchedulerConfig

VALID_MEMORY_GUARD_TIERS = {"safe", "balanced", "aggressive", "custom"}


def get_system_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Section:
    """Fields of one part of the file."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


@dataclass
class ServerSettings(_Section):
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    cors_origins: list[str] = field(default_factory=lambda: ["*"])
    sse_keepalive_mode: str = "chunk"


@dataclass
class ModelDirSettings(_Section):
    """Where models are, and what to do with an unknown name."""

    model_dirs: list[str] = field(default_factory=list)
    model_dir: str | None = None
    model_fallback: bool = False


@dataclass
class MemorySettings(_Section):
    """The memory guard; thresholds are fractions of the ceiling."""

    prefill_memory_guard: bool = True
    memory_guard_tier: str = "balanced"
    memory_guard_custom_ceiling_gb: float = 0.0
    soft_threshold: float = 0.85
    hard_threshold: float = 0.95


@dataclass
class SchedulerSettings(_Section):
    """Limits of each engine."""

    max_concurrent_requests: int = 8
    embedding_batch_size: int = 32
    chunked_prefill: bool = False
    decode_fairness: bool = True

    # Of their own, not inherited: oMLX defines both on this class.
    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SchedulerSettings:
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


@dataclass
class AuthSettings(_Section):
    """Keys. ``sub_keys`` may use the API but not the admin routes."""

    api_key: str | None = None
    secret_key: str | None = None
    skip_api_key_verification: bool = False
    sub_keys: list[Any] = field(default_factory=list)


@dataclass
class SamplingSettings(_Section):
    """Defaults of a request."""

    max_context_window: int = 131072
    max_tokens: int = 32768
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass
class IdleTimeoutSettings(_Section):
    """Seconds of idleness after which a model goes; None is never."""

    idle_timeout_seconds: int | None = None


_SECTIONS: dict[str, Any] = {
    "server": ServerSettings,
    "model": ModelDirSettings,
    "memory": MemorySettings,
    "scheduler": SchedulerSettings,
    "auth": AuthSettings,
    "sampling": SamplingSettings,
    "idle_timeout": IdleTimeoutSettings,
}


@dataclass
class GlobalSettings:
    """All sections."""

    base_path: Path = field(default_factory=lambda: resolve_default_base_path())
    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelDirSettings = field(default_factory=ModelDirSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    idle_timeout: IdleTimeoutSettings = field(default_factory=IdleTimeoutSettings)

    @classmethod
    def load(cls, base_path: str | Path | None = None, cli_args: Any = None) -> GlobalSettings:
        base = Path(base_path).expanduser() if base_path else resolve_default_base_path()
        settings = cls(base_path=base.resolve())
        path = settings.base_path / "settings.json"
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, section in _SECTIONS.items():
                if isinstance(content.get(name), dict):
                    setattr(settings, name, section.from_dict(content[name]))
        for name in ("host", "port", "log_level"):
            value = os.environ.get(f"OMLX_{name.upper()}")
            if value:
                setattr(settings.server, name, int(value) if name == "port" else value)
        settings.auth.api_key = os.environ.get("OMLX_API_KEY") or settings.auth.api_key
        if cli_args is not None:
            settings._apply_cli_overrides(cli_args)
        return settings

    def _apply_cli_overrides(self, args: Any) -> None:
        def given(name: str) -> Any:
            return getattr(args, name, None)

        for name in ("host", "port", "log_level", "sse_keepalive_mode"):
            if given(name) is not None:
                setattr(self.server, name, given(name))
        for name in ("max_concurrent_requests", "embedding_batch_size"):
            if given(name) is not None:
                setattr(self.scheduler, name, given(name))
        if given("model_dir"):
            dirs = [part.strip() for part in given("model_dir").split(",") if part.strip()]
            self.model.model_dirs, self.model.model_dir = dirs, dirs[0]
        if given("api_key"):
            self.auth.api_key = given("api_key")
        if given("memory_guard") == "off":
            self.memory.prefill_memory_guard = False
        elif given("memory_guard"):
            self.memory.prefill_memory_guard = True
            self.memory.memory_guard_tier = given("memory_guard")
        if given("memory_guard_gb") is not None:
            self.memory.prefill_memory_guard = True
            self.memory.memory_guard_tier = "custom"
            self.memory.memory_guard_custom_ceiling_gb = given("memory_guard_gb")

    def get_effective_model_dirs(self) -> list[Path]:
        dirs = self.model.model_dirs or [self.model.model_dir or str(self.base_path / "models")]
        return [Path(folder).expanduser().resolve() for folder in dirs]

    def ensure_directories(self) -> None:
        for folder in (
            self.base_path,
            self.base_path / "logs",
            *self.get_effective_model_dirs(),
        ):
            folder.mkdir(parents=True, exist_ok=True)

    def validate(self) -> list[str]:
        """What is wrong with the values; empty when nothing is."""
        errors = []
        if not 0 < self.server.port < 65536:
            errors.append(f"port {self.server.port} is not between 1 and 65535")
        if self.memory.memory_guard_tier not in VALID_MEMORY_GUARD_TIERS:
            errors.append(f"no memory guard tier named {self.memory.memory_guard_tier}")
        return errors

    def save(self) -> None:
        self.base_path.mkdir(parents=True, exist_ok=True)
        path = self.base_path / "settings.json"
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")
        temporary.replace(path)

    def save_cli_overrides(self, args: Any) -> None:
        """Keep what the command line asked for; here everything in force is kept."""
        self.save()

    def to_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).to_dict() for name in _SECTIONS}
        return {"version": "1.0", **parts}

    def to_scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.scheduler.max_concurrent_requests,
            embedding_batch_size=self.scheduler.embedding_batch_size,
            chunked_prefill=self.scheduler.chunked_prefill,
            decode_fairness=self.scheduler.decode_fairness,
        )


def resolve_default_base_path() -> Path:
    return Path(os.environ.get("OMLX_BASE_PATH") or Path.home() / ".omlx")


_global_settings: GlobalSettings | None = None


def init_settings(
    base_path: str | Path | None = None, cli_args: Any | None = None
) -> GlobalSettings:
    """Load the settings of this process."""
    global _global_settings
    _global_settings = GlobalSettings.load(base_path=base_path, cli_args=cli_args)
    return _global_settings


def get_settings() -> GlobalSettings:
    return _global_settings or init_settings()
