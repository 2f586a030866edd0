"""Lag of the server's event loop: ``python -m benchmarks.loop_lag --omlx-src DIR``.

A beat is due on the loop every 5 ms (`benchmarks.loop_probe`); how late it comes is what
every other request of the process waits beside its own work. One phase each for a quiet
server, loads, and unloads: of an idle tiny model, of one in the middle of a prefill, and
of one whose scheduler takes long to shut down, as a large cache does. Stock beside
patched, and how much of the lag is garbage collection, which stays on the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import standin
from benchmarks.arguments import checkout
from benchmarks.probed_server import ProbedServer, histogram, spread
from benchmarks.worker import embed
from omlx_admission.surfaces.demo.client import Client
from standin import tinymodels

_EDGES = (0.005, 0.02, 0.05, 0.1, 0.5, 1.0)
#: Seconds that the shutdown of the slow model's scheduler takes.
FLUSH_S = 2.0


def models(root: Path) -> Path:
    """A plain tiny model, one with heavy prefills, one slow to flush, an embedder."""
    tinymodels.make_text_model(root, name="plain")
    tinymodels.make_text_model(root, name="busy", seed=1, hidden=512, layers=8)
    tinymodels.make_text_model(root, name="flush", seed=2)
    tinymodels.make_embedder(root, name="embedder")
    return root


@dataclass
class Phase:
    """What happened in one kind of moment: beats' lags, and what blocked the loop."""

    lags: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    gc_s: list[float] = field(default_factory=list)
    close_s: list[float] = field(default_factory=list)


class Watch:
    """Runs steps against one server and files its beats under a phase."""

    def __init__(self, server: ProbedServer) -> None:
        self._server = server
        self.phases: dict[str, Phase] = {}

    async def during(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Take the beats from the start of ``work`` until shortly after its end."""
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await work()
        await asyncio.sleep(0.1)
        end = time.monotonic()
        phase = self.phases.setdefault(name, Phase())
        lags = self._server.lags(start, end)
        phase.lags += lags
        phase.worst.append(max(lags))
        for kind, seconds in (("gc", phase.gc_s), ("close", phase.close_s)):
            on_loop = [
                float(took)
                for at, took, thread in self._server.lines(kind)
                if start <= float(at) <= end and thread == "MainThread"
            ]
            seconds.append(sum(on_loop))


async def scenario(server: ProbedServer, rounds: int) -> dict[str, Phase]:
    """Every phase ``rounds`` times, after one round that nothing is taken from."""
    client = Client(server.url)
    watch = Watch(server)

    async def load(model: str) -> None:
        assert (await client.chat(model, tokens=2)).ok

    async def unload(model: str) -> None:
        answer = await client.post(f"/v1/models/{model}/unload?mode=now", {})
        assert answer.status == 200, answer

    async def unload_in_a_prefill() -> None:
        text = "a long text " * 25
        body = {"model": "busy", "prompt": text, "max_tokens": 4}
        prefill = asyncio.create_task(client.post("/v1/completions", body))
        await asyncio.sleep(0.3)
        await unload("busy")
        prefill.cancel()
        await asyncio.wait({prefill})

    for turn in range(rounds + 1):
        if turn == 1:
            watch.phases.clear()
            await watch.during("quiet", lambda: asyncio.sleep(3))
        await watch.during("load, tiny text model", lambda: load("plain"))
        await watch.during("unload, tiny text model", lambda: unload("plain"))
        await watch.during("load, embedder", lambda: embed(client))
        await watch.during("unload, embedder", lambda: unload("embedder"))
        await load("busy")
        await watch.during("unload in the middle of a prefill", unload_in_a_prefill)
        await load("flush")
        await watch.during(f"unload, {FLUSH_S:g} s of flushing", lambda: unload("flush"))
    return watch.phases


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_lag", description=__doc__)
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["stock", "patched"])
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        made = models(Path(folder) / "models")
        found: dict[str, dict[str, Phase]] = {}
        for name in ("stock", "patched"):
            if options.only in (None, name):
                with ProbedServer(
                    made,
                    Path(folder) / name,
                    patched=name == "patched",
                    source=options.omlx_src,
                    python=options.omlx_python,
                    arguments=["--paged-ssd-cache-dir", str(Path(folder) / "cache" / name)]
                    if options.omlx_src != standin.PATH
                    else [],
                    memory_gb=None,
                    probe={"flush_s": {"flush": FLUSH_S}},
                ) as server:
                    found[name] = asyncio.run(scenario(server, options.rounds))
    print(
        f"lag in ms; {options.rounds} rounds; gc and close: ms on the loop, median of a round"
    )
    for what in next(iter(found.values())):
        print(what)
        for name, phases in found.items():
            phase = phases[what]
            print(
                f"  {name:<8} least/median/95 %/greatest {spread(phase.lags)}; "
                f"longest block of a round, median {statistics.median(phase.worst) * 1e3:.0f}; "
                f"gc {statistics.median(phase.gc_s) * 1e3:.0f}, "
                f"close {statistics.median(phase.close_s) * 1e3:.0f}"
            )
            print(f"  {'':<8} {histogram(phase.lags, _EDGES)}")


if __name__ == "__main__":
    main()
