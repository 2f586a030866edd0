"""Start one server, stock or patched, and play scenarios on it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omlx_admission.surfaces.demo import models
from omlx_admission.surfaces.demo.client import Client
from omlx_admission.surfaces.demo.progress import Progress
from omlx_admission.surfaces.demo.scenarios import Scenario
from omlx_admission.surfaces.demo.server import Server
from omlx_admission.surfaces.demo.stage import Measures, Played, Stage, StageError, TooShort
from omlx_admission.surfaces.demo.target import Target
from omlx_admission.surfaces.demo.watch import Watch

#: Longest wait of the demo's clients in seconds; nothing here takes half of it.
_CLIENT_S = 40.0

#: How often a scenario is played with a stream of double length, if it was too short.
_TRIES = 4


@dataclass
class Run:
    """All scenarios on one server."""

    mode: str
    measures: Measures
    played: list[Played] = field(default_factory=list)
    #: Whether the server's log shows the plugin at work.
    active: bool = False
    #: What the package itself says in the log about not being active.
    complaint: str | None = None

    def scenario(self, name: str) -> Played:
        """What was played under that name."""
        return next(p for p in self.played if p.name == name)


@dataclass(frozen=True)
class Setup:
    """What both servers have in common.

    Attributes:
        work: folder for models and servers.
        logs: folder that keeps the servers' logs.
        load_s: seconds that stand for the loading of a large model.
        port: fixed port, 0 for any.
    """

    target: Target
    work: Path
    logs: Path
    load_s: float
    port: int = 0

    def server(self, mode: str) -> Server:
        """The server of one mode, not started."""
        return Server(
            models=self.work / "models",
            base=self.work / mode,
            patched=mode == "patched",
            source=self.target.source,
            python=self.target.python,
            load_s=self.load_s,
            memory_gb=models.MEMORY_GB,
            port=self.port,
        )


def play(
    setup: Setup, mode: str, scenarios: Sequence[Scenario], tokens: int, progress: Progress
) -> Run:
    """One whole run; ``tokens`` is the length of the long stream, 0 to find it.

    Raises:
        ServerError: the server did not start.
        StageError: it started and cannot serve one model.
    """
    run = Run(mode, Measures(setup.load_s, tokens=tokens))
    progress.step(f"{mode}: starting the server")
    server = setup.server(mode)
    try:
        with server:
            asyncio.run(_play(server, run, scenarios, progress))
            run.active, run.complaint = plugin_in(server.log)
    finally:
        if server.log_path.is_file():
            shutil.copyfile(server.log_path, setup.logs / f"{mode}.log")
    return run


def plugin_in(log: str) -> tuple[bool, str | None]:
    """Whether a server's log shows the plugin at work, and its complaint if not.

    The package logs every swap, under the one name ``omlx.admission``; what
    keeps it from being active at all it says before there is a logger.
    """
    complaint = next(
        (line for line in log.splitlines() if line.startswith("omlx-admission: not active")),
        None,
    )
    return " omlx.admission - " in log, complaint


async def _play(
    server: Server, run: Run, scenarios: Sequence[Scenario], progress: Progress
) -> None:
    client = Client(server.url, timeout=_CLIENT_S)
    progress.step(f"{run.mode}: loading A, measuring it alone")
    async with Watch(server.url) as watch:
        stage = Stage(client, watch, run.measures, progress.event)
        await stage.measure()
        for scenario in scenarios:
            progress.step(f"{run.mode}: {scenario.name}: {scenario.title}")
            run.played.append(await _scenario(scenario, stage))


async def _scenario(scenario: Scenario, stage: Stage) -> Played:
    for _ in range(_TRIES):
        await stage.settle()
        stage.answers = []
        start = time.monotonic()
        first = len(stage.watch.samples) - 1
        try:
            await scenario.play(stage)
        except TooShort:
            stage.say("the stream was over too soon; again with a longer one")
            stage.measures.tokens *= 2
            continue
        await stage.watch.look()
        played = Played(
            scenario.name,
            start,
            time.monotonic(),
            sorted(stage.answers, key=lambda a: a.started),
            stage.watch.samples[first:],
            replace(stage.measures),
        )
        played.misses += scenario.check(played)
        return played
    raise StageError(f"no stream is long enough on this machine for '{scenario.name}'")
