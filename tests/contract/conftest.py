"""Runs the contract on the stand-in, and on each real oMLX named by ``--omlx-src``.

One process can import one ``omlx``, so every check runs a script of ``probes/`` in
a process of its own and looks at the JSON it prints. The plugin is off there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import standin

PROBES = Path(__file__).parent / "probes"


@dataclass
class Target:
    """One oMLX: the folder that holds the package, and a Python that can run it."""

    name: str
    source: Path
    python: str
    results: dict[str, Any] = field(default_factory=dict)

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that imports this oMLX with the plugin off."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(self.source), str(PROBES))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMLX_ADMISSION": "0",
            "OMLX_BASE_PATH": str(home / "omlx"),
            "OMLX_BONJOUR": "0",
            "HOME": str(home),
        }

    def probe(self, script: str, home: Path, **variables: str) -> dict[str, Any]:
        """What a script printed last; each script runs once."""
        if script not in self.results:
            run = subprocess.run(
                [self.python, str(PROBES / script)],
                env={**self.environment(home), **variables},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            if run.returncode != 0:
                pytest.fail(
                    f"{script} on {self.name} ended with {run.returncode}:\n{run.stderr}"
                )
            self.results[script] = json.loads(run.stdout.splitlines()[-1])
        return self.results[script]

    @property
    def version(self) -> Version:
        """As the package says it itself."""
        scope: dict[str, Any] = {}
        exec((self.source / "omlx" / "_version.py").read_text(encoding="utf-8"), scope)
        return Version(scope["__version__"])

    def since(self, version: str) -> bool:
        """Whether this oMLX is that version or later, pre-releases of it included."""
        return self.version.release >= Version(version).release


def _targets(config: pytest.Config) -> list[Target]:
    python = config.getoption("omlx_python") or sys.executable
    found = [Target("standin", standin.PATH, sys.executable)]
    for folder in config.getoption("omlx_src"):
        found.append(Target(Path(folder).name, Path(folder).resolve(), python))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run of each test for each oMLX."""
    if "target" in metafunc.fixturenames:
        targets = metafunc.config.stash.setdefault(_KEY, _targets(metafunc.config))
        metafunc.parametrize("target", targets, ids=lambda target: target.name)


_KEY: pytest.StashKey[list[Target]] = pytest.StashKey()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that no real installation shares."""
    return tmp_path_factory.mktemp("home")
