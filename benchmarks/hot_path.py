"""``get_engine`` for a loaded model, patched against stock, in one process.

``python -m benchmarks.hot_path [--omlx-src DIR]``. Nothing else runs in the process and
nobody holds the pool's lock: the case that costs stock least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import standin
from benchmarks.arguments import checkout
from omlx_admission import _startup
from omlx_admission.hooks import install
from omlx_admission.settings import Settings

#: Requests that run on the model meanwhile.
_OTHERS = 7


class _Running:
    """A task that has not ended."""

    def done(self) -> bool:
        return False


def _core() -> Any:
    """What the checks of a text engine read: a loop that runs, a scheduler with room."""
    config = SimpleNamespace(max_num_seqs=256)
    return SimpleNamespace(
        _task=_Running(), _closed=False, scheduler=SimpleNamespace(config=config)
    )


class _Engine:
    """A loaded text engine, ready for the pool's own checks."""

    scheduler = None

    def __init__(self) -> None:
        self._loaded = True
        self._engine = SimpleNamespace(engine=_core())

    def has_active_requests(self) -> bool:
        return False


def _pool(module: Any, root: Path) -> Any:
    folder = root / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    pool = module.EnginePool()
    pool.discover_models([str(root)], [])
    pool._validate_llm_engine_ready = lambda *_args: None
    # As a server makes it: with the settings of all models.
    from omlx.model_settings import ModelSettingsManager

    (root / "settings").mkdir()
    manager = ModelSettingsManager(root / "settings")
    pool._settings_manager = manager
    pool._entries["a"].engine = _Engine()
    signature = pool._engine_runtime_signature("a", None)
    pool._entries["a"].runtime_settings_signature = signature
    return pool


async def _seconds(pool: Any, calls: int) -> float:
    """Seconds per leased ``get_engine`` of the loaded model.

    The lease ends before the next one is taken, by hand: stock's release starts a task,
    which is not what is measured.
    """
    entry = pool._entries["a"]
    start = time.perf_counter()
    for _ in range(calls):
        entry.in_use = _OTHERS
        await pool.get_engine("a", _lease=True)
    return (time.perf_counter() - start) / calls


def measure(rounds: int = 15, calls: int = 4000) -> dict[str, float]:
    """Median seconds per call, and the median of the ratios of neighbouring rounds.

    Expects ``omlx`` to be importable.
    """
    import omlx.engine_pool as module

    stock: list[float] = []
    patched: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        pool = _pool(module, Path(folder))
        asyncio.run(_seconds(pool, calls))  # warm
        for _ in range(rounds):
            stock.append(asyncio.run(_seconds(pool, calls)))
            report = install.decide(settings=Settings())
            installer = install.Installer(report)
            installer.on_import(module)
            if not report.verdict("resident").wrapped:
                raise SystemExit(f"benchmarks.hot_path: {report.verdict('resident').reasons}")
            patched.append(asyncio.run(_seconds(pool, calls)))
            installer.undo()
    return {
        "stock": statistics.median(stock),
        "patched": statistics.median(patched),
        "ratio": statistics.median(p / s for p, s in zip(patched, stock, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """One JSON object on the standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hot_path", description=__doc__)
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    # Installed into this Python, the plugin would patch oMLX before stock is measured.
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _startup.OmlxFinder)]
    sys.path.insert(0, str(options.omlx_src))
    print(json.dumps(measure(options.rounds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
