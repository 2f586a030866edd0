"""The package on an oMLX that has the changes itself: nothing is wrapped on top."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import omlx_admission
from omlx_admission.surfaces.cli import main

#: What lies on the pool's methods once the package is active, and what it says of itself.
PROBE = """
import json
from omlx_admission import _startup
_startup.main()
import omlx.server
from omlx.engine_pool import EnginePool
from omlx_admission.hooks import install
report = install.current()
print(json.dumps({
    "states": {v.feature.name: v.state.value for v in report.verdicts},
    "wrapped": sorted(w for v in report.verdicts for w in v.wrapped),
    "middleware": [m.cls.__module__ for m in omlx.server.app.user_middleware],
}))
"""

POOL = "omlx.engine_pool:EnginePool."


def probe(checkout: Path) -> dict[str, object]:
    """Import the oMLX of ``checkout`` with the package active; what became of both."""
    package = Path(omlx_admission.__file__).parents[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OMLX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**clean, "PYTHONPATH": os.pathsep.join([str(checkout), str(package)])},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_with_all_changes_in_the_pool_is_left_alone(checkout: Path) -> None:
    assert main(["upstream", "--checkout", str(checkout), "--change", "drain-queue"]) == 0
    found = probe(checkout)
    states, wrapped = found["states"], found["wrapped"]
    assert isinstance(states, dict)
    assert isinstance(wrapped, list)
    for feature in ("resident", "queue", "errors", "leases", "requests"):
        assert states[feature] == "native", feature
    for method in ("get_engine", "release_engine", "_release_engine_lease"):
        assert POOL + method not in wrapped
    for method in ("_find_lru_victim", "_mark_pending_unload_locked", "discover_models"):
        assert POOL + method not in wrapped
    # What shows the pool's loads and unloads still looks on, and what names the engines.
    assert wrapped.count(POOL + "_load_engine") == 2
    assert wrapped.count(POOL + "_unload_engine") == 1
    assert states["surfaces"] == "applied"
    assert found["middleware"].count("omlx.admission.request") == 1  # type: ignore[attr-defined]
    assert "omlx_admission.core.request" not in str(found["middleware"])


@pytest.mark.parametrize("name", ["resident-path", "error-mapping", "leases"])
def test_with_one_of_them_in_the_others_are_ours(checkout: Path, name: str) -> None:
    assert main(["upstream", "--checkout", str(checkout), "--change", name]) == 0
    states = probe(checkout)["states"]
    assert isinstance(states, dict)
    ours = {"resident-path": "resident", "error-mapping": "errors", "leases": "leases"}
    for feature in ("resident", "queue", "errors", "leases", "requests"):
        assert states[feature] == ("native" if feature == ours[name] else "applied"), feature
