"""What the hooks note of work that holds the GPU turn."""

from __future__ import annotations

from omlx_admission.core import faults
from omlx_admission.gpu.watch import watch
from omlx_admission.gpu_turn import holding

__all__ = ["holding"]


class _Listener(holding.Listener):
    def failed(self, error: BaseException, name: str) -> None:
        # Seen while the turn is still held: the log says who held it and who waited.
        watch.saw(error, name)

    def broken(self, error: BaseException) -> None:
        faults.note("the GPU turn", error)


holding.listener = _Listener()
