"""What a load ends with."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def materialize_lazy_state(model: Any) -> None:
    """Evaluate all arrays of ``model``, so that any thread can use them."""
    arrays = []
    for module in model.modules():
        values = [*dict.values(module), *vars(module).values()]
        arrays += [value for value in values if isinstance(value, mx.array)]
    mx.eval(arrays)
