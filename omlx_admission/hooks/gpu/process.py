"""What the GPU features have switched on in this process.

One object, which `hooks.install` puts back when it undoes: no part has to undo its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from omlx_admission.core import faults
from omlx_admission.gpu.watch import Watch, watch
from omlx_admission.gpu_turn import sites
from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.hooks.gpu.executors import Executors

logger = logging.getLogger("omlx.admission")

#: Turns that alternate are on for this long, then off for as long.
PERIOD_S = 3600.0


class _Listener(gpu_turn.Listener):
    """What is noted of work that holds the turn."""

    def stuck(self, text: str) -> None:
        if process.exit_on_stuck is not None:
            watch.leave()
            process.exit_on_stuck(f"the GPU turn is stuck ({text})")

    def failed(self, error: BaseException, name: str) -> None:
        watch.saw(error, name)

    def broken(self, error: BaseException) -> None:
        faults.note("the GPU turn", error)


class Process:
    """Nothing switched on, as it is before anything is applied.

    Attributes:
        executors: what the jobs of oMLX's global executor pass.
        exit_on_stuck: ends the process, given a reason, where the turn is stuck.
        stop_loads: ends the thread of the loads, where they have one.
    """

    def __init__(self) -> None:
        self.executors = Executors()
        self.exit_on_stuck: Callable[[str], object] | None = None
        self.stop_loads: Callable[[], None] | None = None
        self._turn: gpu_turn.GpuTurn | None = None
        self._alternating: threading.Event | None = None

    def take_turns(self, mode: bool | str, *, stuck_s: float, limit_s: float) -> None:
        """Make the turn of this process, before anything can ask for it; ``mode`` says when
        engines take it."""
        self._turn = gpu_turn.GpuTurn(stuck_s=stuck_s, limit_s=limit_s, listener=_Listener())
        if mode == "auto":
            watch.on_lockup = self._lockup
            return
        gpu_turn.current = self._turn
        if mode == "alternate":
            self._alternating = threading.Event()
            threading.Thread(
                target=self._alternate, args=(self._alternating,), name="gpu-turns", daemon=True
            ).start()

    def switch(self, on: bool) -> None:
        """Engines take turns from now on, or no longer do. What works on the GPU already
        ends as it has begun."""
        gpu_turn.current = self._turn if on else None
        if watch.recorder is not None:
            watch.recorder.serialised(on)

    def _lockup(self) -> None:
        watch.on_lockup = None
        self.switch(True)
        logger.warning(
            "admission: the GPU hung with two engines busy: from now on engines take turns on "
            "it (serialize_engine_gpu is auto)"
        )

    def _alternate(self, ended: threading.Event) -> None:
        on = True
        while not ended.wait(PERIOD_S):
            on = not on
            self.switch(on)
            logger.info("admission: engines take %s on the GPU", "turns" if on else "no turns")

    def reset(self) -> None:
        """Everything off. Waiters and the holder of the turn keep the object that they
        know; no new ones come."""
        if self._alternating is not None:
            self._alternating.set()
        gpu_turn.current = self._turn = self._alternating = watch.on_lockup = None
        sites.models.clear()
        self.exit_on_stuck = None
        watch.exit, watch.turn = None, Watch.turn
        self.executors.reset()
        stop, self.stop_loads = self.stop_loads, None
        if stop is not None:
            stop()


process = Process()
