"""An oMLX that takes turns by itself: its turn is shown, written down and not taken twice."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.gpu.watch import watch
from omlx_admission.gpu_turn import turn as gpu_turn
from omlx_admission.gpu_turn.turn import GpuTurn
from omlx_admission.hooks.gpu import native as gpu_native
from omlx_admission.hooks.gpu import watch as gpu_watch
from omlx_admission.hooks.server import surface_sections

from .gpu_rig import installed


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Any:
    """oMLX's own turn, as `patches/gpu-turn` makes it: without an observer. Ours is off."""
    inner = GpuTurn()
    turn = types.SimpleNamespace(
        acquire=inner.acquire, snapshot=inner.snapshot, stuck_s=inner.stuck_s
    )
    module = types.SimpleNamespace(current=turn)
    monkeypatch.setattr(gpu_turn, "current", None)
    monkeypatch.setitem(sys.modules, gpu_native.MODULE, module)
    return turn


def test_where_neither_takes_turns_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turn, "current", None)
    assert gpu_native.current() is None
    monkeypatch.setitem(sys.modules, gpu_native.MODULE, types.SimpleNamespace(current=None))
    assert gpu_native.current() is None


def test_ours_goes_first(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = GpuTurn()
    monkeypatch.setattr(gpu_turn, "current", ours)
    assert gpu_native.current() is ours


def test_status_shows_it(native: Any) -> None:
    hold = native.acquire("a", "decode burst")
    section = surface_sections.turn_section()
    assert (section["on"], section["holder"], section["site"]) == (True, "a", "decode burst")
    hold.release()
    observer = types.SimpleNamespace(register_section=lambda *_a, **_k: None)
    surface_sections.register(observer)  # type: ignore[arg-type]


def test_a_fault_says_who_held_it(native: Any) -> None:
    importlib.import_module("omlx.engine_core")
    hold = native.acquire("a", "decode burst")
    with installed("omlx.engine_core", exposure=True):
        assert "turn held by a (decode burst" in watch._circumstances(watch.clock())
    hold.release()
    assert "engines take no turns" in watch._circumstances(watch.clock())


def test_the_ledger_counts_its_hours_as_serialised(
    native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = types.SimpleNamespace(base_path=tmp_path)
    state = types.SimpleNamespace(global_settings=settings)
    server = types.SimpleNamespace(_server_state=state)
    monkeypatch.setitem(sys.modules, gpu_watch.SERVER, server)
    seen: list[bool] = []

    class Recorder:
        def __init__(self, *_: object, serialised: bool) -> None:
            seen.append(serialised)

        def start(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(gpu_watch, "ExposureRecorder", Recorder)
    monkeypatch.setattr(watch, "recorder", None)
    gpu_watch.begin()
    assert seen == [True]
