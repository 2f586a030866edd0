"""Settings by model, and profiles that show as models of their own.

Files in the base folder: ``model_settings.json`` holds ``{"models": {id: {...}}}``;
``model_profiles.json`` holds ``{"profiles": {id: {name: {"name", "api_name",
"expose_as_model", "settings"}}}}``. An exposed profile is asked for as
``id:api_name``.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Settings of a request: they never need a reload.
UNIVERSAL_PROFILE_FIELDS = (
    "max_context_window",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "force_sampling",
)

#: Settings of a load: a request with other values needs the model reloaded.
MODEL_SPECIFIC_PROFILE_FIELDS = (
    "turboquant_kv_enabled",
    "turboquant_kv_bits",
    "turboquant_skip_last",
    "dflash_enabled",
    "dflash_draft_model",
    "mtp_enabled",
    "vlm_mtp_enabled",
    "vlm_mtp_draft_model",
    "specprefill_enabled",
    "specprefill_draft_model",
    "index_cache_freq",
)

#: Switch, the settings that matter while it is on, and the one it cannot do without.
_FEATURES: tuple[tuple[str, tuple[tuple[str, Any], ...], str | None], ...] = (
    ("mtp_enabled", (), None),
    (
        "turboquant_kv_enabled",
        (("turboquant_kv_bits", 4), ("turboquant_skip_last", True)),
        None,
    ),
    ("specprefill_enabled", (), "specprefill_draft_model"),
    ("dflash_enabled", (), "dflash_draft_model"),
    ("vlm_mtp_enabled", (), "vlm_mtp_draft_model"),
)


@dataclass
class ModelSettings:
    """Settings of one model; None is unset."""

    max_context_window: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    force_sampling: bool = False
    model_alias: str | None = None
    model_type_override: str | None = None
    ttl_seconds: int | None = None
    index_cache_freq: int | None = None
    turboquant_kv_enabled: bool = False
    turboquant_kv_bits: float = 4
    turboquant_skip_last: bool = True
    specprefill_enabled: bool = False
    specprefill_draft_model: str | None = None
    dflash_enabled: bool = False
    dflash_draft_model: str | None = None
    mtp_enabled: bool = False
    vlm_mtp_enabled: bool = False
    vlm_mtp_draft_model: str | None = None
    is_pinned: bool = False
    is_default: bool = False
    is_hidden: bool = False
    trust_remote_code: bool = False

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSettings:
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


class ModelSettingsManager:
    """Reads and writes both files."""

    def __init__(self, base_path: Path):
        self.base_path = Path(base_path)
        self.settings_file = self.base_path / "model_settings.json"
        self.profiles_file = self.base_path / "model_profiles.json"
        self._lock = threading.Lock()
        self._settings: dict[str, ModelSettings] = {}
        self._profiles: dict[str, dict[str, dict[str, Any]]] = {}
        self.base_path.mkdir(parents=True, exist_ok=True)
        self._load()

    def _load(self) -> None:
        models = _read(self.settings_file).get("models", {})
        self._settings = {key: ModelSettings.from_dict(value) for key, value in models.items()}
        self._profiles = _read(self.profiles_file).get("profiles", {})

    def _save(self) -> None:
        models = {key: value.to_dict() for key, value in self._settings.items()}
        content = {"version": 1, "models": models}
        self.settings_file.write_text(json.dumps(content, indent=2), encoding="utf-8")

    def get_settings(self, model_id: str) -> ModelSettings:
        """A copy of a model's settings; defaults when it has none."""
        with self._lock:
            found = self._settings.get(model_id)
            return ModelSettings.from_dict(found.to_dict()) if found else ModelSettings()

    def get_all_settings(self) -> dict[str, ModelSettings]:
        return {model_id: self.get_settings(model_id) for model_id in list(self._settings)}

    def set_settings(self, model_id: str, settings: ModelSettings) -> None:
        """Store settings; only one model is the default."""
        with self._lock:
            if settings.is_default:
                for other in self._settings.values():
                    other.is_default = False
            self._settings[model_id] = settings
            self._save()

    def get_default_model_id(self) -> str | None:
        return next((key for key, s in self._settings.items() if s.is_default), None)

    def get_pinned_model_ids(self) -> list[str]:
        """Models that are loaded at start and never evicted."""
        return [key for key, settings in self._settings.items() if settings.is_pinned]

    def _find_exposed_profile(self, name: str) -> tuple[str, dict[str, Any]] | None:
        for wanted in (name, name.split("/", 1)[-1]):
            for model_id, profiles in self._profiles.items():
                alias = self.get_settings(model_id).model_alias
                for profile in profiles.values():
                    ids = {f"{base}:{_api_name(profile)}" for base in (model_id, alias) if base}
                    if profile.get("expose_as_model") and wanted in ids:
                        return model_id, profile
        return None

    def _merged(self, model_id: str, overlay: dict[str, Any]) -> ModelSettings:
        return ModelSettings.from_dict({**self.get_settings(model_id).to_dict(), **overlay})

    def get_exposed_profile_source_model_id(self, model_id: str) -> str | None:
        match = self._find_exposed_profile(model_id)
        return match[0] if match else None

    def get_exposed_profile_runtime_settings_for_request(
        self, model_id: str
    ) -> tuple[str, ModelSettings] | None:
        """The model behind an exposed profile, and the settings to load it with."""
        match = self._find_exposed_profile(model_id)
        if match is None:
            return None
        base, profile = match
        return base, self._merged(base, filter_profile_fields(profile.get("settings") or {}))

    def get_settings_for_request(
        self, model_id: str, resolved_model_id: str | None = None
    ) -> ModelSettings:
        match = self._find_exposed_profile(model_id)
        if match is None:
            return self.get_settings(resolved_model_id or model_id)
        base, profile = match
        return self._merged(base, filter_universal_fields(profile.get("settings") or {}))

    def _shown_name(self, base: str, profile: dict[str, Any]) -> str:
        return f"{self.get_settings(base).model_alias or base}:{_api_name(profile)}"

    def list_exposed_profile_models(self) -> list[dict[str, Any]]:
        """Exposed profiles with the name each is asked for by."""
        return [
            {
                **profile,
                "model_id": self._shown_name(base, profile),
                "source_model_id": base,
            }
            for base, profiles in self._profiles.items()
            for profile in profiles.values()
            if profile.get("expose_as_model")
        ]


def _api_name(profile: dict[str, Any]) -> str:
    return str(profile.get("api_name") or profile.get("name") or "profile")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        logger.error("%s is not JSON: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def filter_universal_fields(data: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v for k, v in data.items() if k in UNIVERSAL_PROFILE_FIELDS and v not in (None, "")
    }


def filter_profile_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The set request-time and load-time values of ``data``."""
    allowed = UNIVERSAL_PROFILE_FIELDS + MODEL_SPECIFIC_PROFILE_FIELDS
    return {k: v for k, v in data.items() if k in allowed and v not in (None, "")}


def runtime_signature(settings: Any) -> tuple[tuple[str, str], ...] | None:
    """Load-time settings as comparable text; None when there are no settings."""
    if settings is None:
        return None
    to_dict = getattr(settings, "to_dict", None)
    data: dict[str, Any] = to_dict() if callable(to_dict) else {}
    signature = [("trust_remote_code", _text(bool(data.get("trust_remote_code"))))]
    signature.append(("index_cache_freq", _text(_index_cache_freq(data))))
    for switch, details, needs in _FEATURES:
        active = bool(data.get(switch)) and (needs is None or bool(data.get(needs)))
        signature.append((switch, _text(active)))
        if active:
            signature += [(name, _text(data.get(name, default))) for name, default in details]
            if needs is not None:
                signature.append((needs, _text(data[needs])))
    return tuple(signature)


def _index_cache_freq(data: dict[str, Any]) -> int | None:
    try:
        value = int(data.get("index_cache_freq") or 0)
    except (TypeError, ValueError):
        return None
    return value if value >= 2 else None


def _text(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return repr(value)
