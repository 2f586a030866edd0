"""Finding models on disk and sizing them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_EMBEDDING_TYPES = {"bert", "xlm-roberta", "xlm_roberta", "modernbert"}
_AUDIO_TYPES = {"whisper": "audio_stt", "kokoro": "audio_tts", "deepfilternet": "audio_sts"}
_ENGINES = {"llm": "batched"}

#: Room for runtime buffers on top of the weights.
_OVERHEAD = 1.05


@dataclass
class DiscoveredModel:
    """One model folder."""

    model_id: str
    model_path: str
    model_type: str
    engine_type: str
    estimated_size: int
    text_only_size: int = 0
    config_model_type: str = ""
    model_context_length: int | None = None


def format_size(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 1024 or unit == "TB":
            break
        value /= 1024
    return f"{value:.2f}{unit}"


def estimate_model_size(model_path: Path) -> int:
    """Bytes a model is counted as: its weight files and a twentieth on top."""
    total = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    if total == 0:
        raise ValueError(f"{model_path} holds no weights")
    return int(total * _OVERHEAD)


def discover_models(model_dir: Path) -> dict[str, DiscoveredModel]:
    """Models right under ``model_dir``, or one folder deeper (``owner/name``)."""
    found: dict[str, DiscoveredModel] = {}
    if not model_dir.is_dir():
        return found
    for folder in sorted(path for path in model_dir.iterdir() if path.is_dir()):
        inner = [folder] if (folder / "config.json").exists() else sorted(folder.iterdir())
        for candidate in inner:
            if not (candidate / "config.json").exists():
                continue
            try:
                model = _describe(candidate)
            except (OSError, ValueError) as error:
                logger.warning("skipping %s: %s", candidate, error)
                continue
            found.setdefault(model.model_id, model)
    return found


def discover_models_from_dirs(model_dirs: list[Path]) -> dict[str, DiscoveredModel]:
    """Models of several folders; the first one to name a model wins."""
    found: dict[str, DiscoveredModel] = {}
    for model_dir in model_dirs:
        for model_id, model in discover_models(model_dir).items():
            found.setdefault(model_id, model)
    return found


def _describe(folder: Path) -> DiscoveredModel:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config_type = str(config.get("model_type") or "")
    architectures = " ".join(config.get("architectures") or [])
    if "ForSequenceClassification" in architectures:
        model_type = "reranker"
    elif config_type in _EMBEDDING_TYPES:
        model_type = "embedding"
    elif config_type in _AUDIO_TYPES:
        model_type = _AUDIO_TYPES[config_type]
    elif "vision_config" in config:
        model_type = "vlm"
    else:
        model_type = "llm"
    return DiscoveredModel(
        model_id=folder.name,
        model_path=str(folder),
        model_type=model_type,
        engine_type=_ENGINES.get(model_type, model_type),
        estimated_size=estimate_model_size(folder),
        config_model_type=config_type,
        model_context_length=config.get("max_position_embeddings"),
    )
