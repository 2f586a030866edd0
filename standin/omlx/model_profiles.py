"""Which settings a profile may carry."""

from __future__ import annotations

from typing import Any

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


def filter_universal_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The set request-time values of ``data``."""
    return {
        k: v for k, v in data.items() if k in UNIVERSAL_PROFILE_FIELDS and v not in (None, "")
    }


def filter_profile_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The set request-time and load-time values of ``data``."""
    allowed = UNIVERSAL_PROFILE_FIELDS + MODEL_SPECIFIC_PROFILE_FIELDS
    return {k: v for k, v in data.items() if k in allowed and v not in (None, "")}
