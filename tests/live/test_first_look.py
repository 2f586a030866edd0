"""The first look at status, metrics and the page costs the event loop nothing lasting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from omlx_admission.surfaces.demo.server import variables_for

from .conftest import Omlx

PROBE = Path(__file__).parent / "probes" / "first_look.py"


def test_nothing_is_imported_parsed_or_read_on_the_loop(
    omlx: Omlx, models: Path, tmp_path: Path
) -> None:
    variables = {**variables_for(tmp_path, omlx.source), "OMLX_BASE_PATH": str(tmp_path)}
    command = [omlx.python or sys.executable, str(PROBE), str(models)]
    run = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told.pop("sites") > 5
    assert len(told) == 4
    for path, look in told.items():
        # The Python of a real oMLX may have no prometheus_client.
        assert look["status"] in ((200, 501) if "metrics" in path else (200,)), path
        assert look["on the loop"] == [], path
