"""The GPU turn and the exposure ledger as sections of status.

Both work without: a section says that it is off, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from omlx_admission.gpu.exposure import Record
from omlx_admission.gpu.watch import advice, watch
from omlx_admission.hooks.gpu import native as gpu_native
from omlx_admission.observation.observe import Observer, Problem


def register(observer: Observer) -> None:
    """Register both."""
    exposure = Exposure()
    turn = gpu_native.current()
    if turn is not None and getattr(turn, "observer", turn) is None:  # oMLX's has none
        turn.observer = lambda span: observer.turn(span.name, span.asked, span.start, span.end)
    observer.register_section("gpu_turn", turn_section, turn_problems)
    observer.register_section("exposure", exposure.section, refresh=exposure.refresh)


def turn_section() -> dict[str, Any]:
    """The engine that has the turn, those that wait for it, and where it is held at all."""
    # Imported here: it imports the register, which imports this.
    from omlx_admission.hooks import install

    turn = gpu_native.current()
    report = install.current()
    found = [] if report is None else report.sites
    sites = [{"name": s.name, "covered": s.covered, "note": s.note} for s in found]
    if turn is None:
        return {"on": False, "sites": sites}
    state = turn.snapshot()
    return {
        "on": True,
        "holder": state.holder,
        "site": state.site,
        "held_s": round(state.held_s, 3),
        "stuck": state.stuck is not None,
        "limit_s": turn.stuck_s if math.isfinite(turn.stuck_s) else None,
        "waiting": [
            {"engine": name, "site": site, "seconds": round(seconds, 3)}
            for name, site, seconds in state.waiting
        ],
        "engines": [
            {
                "engine": name,
                "turns": total.turns,
                "held_s": round(total.held_s, 3),
                "waited_s": round(total.waited_s, 3),
                "longest_held_s": round(total.longest_held_s, 3),
                "longest_wait_s": round(total.longest_wait_s, 3),
            }
            for name, total in sorted(state.totals.items())
        ],
        "timeouts": state.timeouts,
        "abandoned": state.abandoned,
        "lost": state.lost,
        "sites": sites,
    }


def turn_problems() -> Iterable[Problem]:
    """A turn that others wait for past its limit. The turn itself logs it, with a stack."""
    turn = gpu_native.current()
    if turn is None:
        return
    state = turn.snapshot()
    if state.stuck is not None:
        yield Problem(
            "turn",
            state.holder,
            state.stood_s,
            turn.stuck_s,
            f"'{state.holder}' ({state.site}) has held the GPU turn for {state.stood_s:.0f} s "
            f"while others wait, limit {turn.stuck_s:.0f} s",
            logged=True,
        )


class Exposure:
    """The ledger's counts. Its lock is held over disk writes: never read on the event loop."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None

    def refresh(self) -> None:
        """Read the counts; on the watching thread."""
        recorder = watch.recorder
        self._last = None if recorder is None else exposure_section(recorder.totals())

    def section(self) -> dict[str, Any] | None:
        """The counts of at most a second ago; None where none are kept."""
        return self._last


def exposure_section(record: Record) -> dict[str, Any]:
    """Counts of this process: busy seconds by how many engines, lockups, faults, replays."""
    busy = {"0": 0.0, "1": 0.0, "2": 0.0}
    serialised = 0.0
    for cell, seconds in record.seconds.items():
        busy[str(cell.busy)] += seconds
        if cell.busy == 2 and cell.serialised:
            serialised += seconds
    return {
        "busy_s": {engines: round(seconds, 3) for engines, seconds in busy.items()},
        "overlap_serialised_s": round(serialised, 3),
        "lockups": sum(record.lockups.values()),
        "advice": advice(record),
        "faults": [
            {"fault": fault, "engine": engine, "count": count}
            for (fault, engine), count in sorted(_faults(record).items())
        ],
        "last_faults": [
            {
                "at": round(f.at, 3),
                "engine": f.engine,
                "fault": f.fault.value,
                "circumstances": f.circumstances,
            }
            for f in sorted(watch.faults.copy().values(), key=lambda f: -f.at)[:10]
        ],
        "replays": {
            "count": watch.replays.count,
            "tokens": watch.replays.tokens,
            "seconds": round(watch.replays.seconds, 3),
            "failed": watch.replays.failed,
        },
    }


def _faults(record: Record) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for (fault, engine, _cell), count in record.faults.items():
        sums[fault.value, engine] = sums.get((fault.value, engine), 0) + count
    return sums
