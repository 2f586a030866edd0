"""What is read of the pool's memory ceiling."""

from __future__ import annotations

from omlx_admission.core.pool.ceiling import BREAKDOWN
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.pool import resident

_ENFORCER = "omlx.process_memory_enforcer"

NEEDS = (
    resident.ENFORCER,
    *(
        Need(
            _ENFORCER,
            f"ProcessMemoryEnforcer.{name}",
            Kind.SYNC,
            (),
            returns=("dict[str, int]",),
            optional=True,
        )
        for name in BREAKDOWN
    ),
    Need(_ENFORCER, "ProcessMemoryEnforcer._memory_guard_tier", Kind.VALUE),
)
