"""A server of tests and benchmarks: the demo's, with a plan, variables and a moving ceiling."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from omlx_admission.surfaces.demo import server


@dataclass
class Server(server.Server):
    """Starts :mod:`standin.launch`; use as a context manager.

    Attributes:
        plan: see :mod:`standin.launch`.
        environment: variables on top of the current ones.
        arguments: more of the command line.
        ceiling_gb: instead of ``memory_gb`` the moving part of the ceiling in oMLX's
            default tier, to begin with; see `set_ceiling`.
    """

    plan: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    ceiling_gb: float | None = None

    #: What is started, with the plan as its first argument.
    module: ClassVar[str] = "standin.launch"

    def __enter__(self) -> Server:
        if self.ceiling_gb is not None:
            self.base.mkdir(parents=True, exist_ok=True)
            self.memory_gb = None
            self.plan = {**self.plan, "ceiling_file": str(self._ceiling)}
            self.set_ceiling(self.ceiling_gb)
        super().__enter__()
        return self

    def set_ceiling(self, gb: float) -> None:
        """Move the ceiling of a server that was given ``ceiling_gb``."""
        # In one step: the server may read at any moment.
        new = self._ceiling.with_suffix(".new")
        new.write_text(f"{gb:g}")
        new.replace(self._ceiling)

    @property
    def _ceiling(self) -> Path:
        return self.base.resolve() / "ceiling"

    def _launcher(self) -> list[str]:
        return ["-m", self.module, json.dumps(self.plan)]

    def _command(self) -> list[str]:
        return [*super()._command(), *self.arguments]

    def _environment(self) -> dict[str, str]:
        return {**on_path(super()._environment()), **self.environment}


def on_path(variables: dict[str, str]) -> dict[str, str]:
    """``variables`` of an interpreter that finds this checkout too, after all else."""
    checkout = str(Path(__file__).resolve().parents[1])
    return variables | {"PYTHONPATH": variables["PYTHONPATH"] + os.pathsep + checkout}
