"""Which settings make a loaded engine a different variant.

No counterpart in oMLX, where this is part of the pool.
"""

from __future__ import annotations

import json
from typing import Any

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
