"""Models loaded on a thread of their own answer as ever: a few of the benchmark's cycles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .conftest import Omlx

_REPOSITORY = Path(__file__).resolve().parents[2]


def test_loads_and_uses_of_every_kind(omlx: Omlx, tmp_path: Path) -> None:
    command = [omlx.python or sys.executable, "-m", "benchmarks.load_cycles"]
    done = subprocess.run(
        [*command, "--omlx-src", str(omlx.source), "--cycles", "2"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), str(omlx.source)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMLX_ADMISSION": "0",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["text", "embedder", "reranker"]
    for line in lines:
        assert "2 of 2 cycles with the answers of stock" in line
        # The thread did take the loads: else this would show nothing.
        assert "'_load_model_sync': " in line
        assert "'materialize_lazy_state': " in line
