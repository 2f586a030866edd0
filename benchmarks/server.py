"""Whole servers, stock beside patched: ``python -m benchmarks.server [--omlx-src DIR]``.

Each row is measured from the client's side in one run: every figure of a loaded
moment stands beside the same figure of a quiet moment of the same server.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import standin
from benchmarks.arguments import checkout
from benchmarks.table import Row, render
from omlx_admission.surfaces.demo.client import Answer, Client
from standin import tinymodels
from standin.server import Server

#: Requests to the resident model per phase.
_REQUESTS = 20

#: Seconds of a load that outlasts five rounds of streams beside it.
_LONG_S = 12.0


def models(root: Path) -> Path:
    """A and B of 1.65 GB counted, D of 0.3 GB, X that never fits."""
    sizes = {"a": 1_650_000_000, "b": 1_650_000_000, "d": 300_000_000, "x": 5_000_000_000}
    for seed, (name, size) in enumerate(sizes.items()):
        tinymodels.make_text_model(root, name=name, counted_bytes=size, seed=seed)
    return root


def resident_beside_a_load(server: Server, load_s: float) -> list[tuple[str, str]]:
    """Latency of resident A before and during the load of B; both fit."""

    # Open arrivals: a request that stalls delays none of the others. The same series
    # without a load is what it is compared with.
    step = 0.8 * load_s / _REQUESTS

    async def series(client: Client) -> list[Answer]:
        calls = (client.chat("a", tokens=40, delay=0.3 + n * step) for n in range(_REQUESTS))
        return list(await asyncio.gather(*calls))

    async def scenario() -> tuple[list[Answer], list[Answer]]:
        client = Client(server.url)
        await client.chat("a", tokens=40)
        await series(client)  # warm
        quiet = await series(client)
        loading = asyncio.create_task(client.chat("b"))
        loaded = await series(client)
        await loading
        return quiet, loaded

    quiet, loaded = asyncio.run(scenario())
    assert all(a.ok for a in (*quiet, *loaded)), "a request of the resident was refused"
    base = [a.seconds for a in quiet]
    beside = [a.seconds for a in loaded]
    median = statistics.median(beside) / statistics.median(base)
    return [
        (
            f"resident beside a {load_s:.0f} s load, median against quiet median",
            f"{median:.2f}x ({statistics.median(base) * 1e3:.0f} ms -> "
            f"{statistics.median(beside) * 1e3:.0f} ms)",
        ),
        (
            f"resident beside a {load_s:.0f} s load, worst against quiet worst",
            f"{max(beside) / max(base):.2f}x ({max(base) * 1e3:.0f} ms -> "
            f"{max(beside) * 1e3:.0f} ms)",
        ),
    ]


def streams_beside_a_load(server: Server) -> list[tuple[str, str]]:
    """Longest silence of 20 streams of D, each step of which asks the pool for memory."""

    async def streams(client: Client) -> list[float]:
        calls = (client.chat("d", tokens=60, stream=True) for _ in range(_REQUESTS))
        answers = await asyncio.gather(*calls)
        assert all(a.ok for a in answers), "a stream of the resident was refused"
        silences = []
        for answer in answers:
            moments = [answer.started, *answer.chunks, answer.ended]
            silences.append(max(b - a for a, b in pairwise(moments)))
        return silences

    async def scenario() -> tuple[list[float], list[float]]:
        client = Client(server.url)
        await streams(client)  # warm
        quiet = [max(await streams(client)) for _ in range(5)]
        loading = asyncio.create_task(client.chat("a"))
        await asyncio.sleep(0.3)
        # Stock: the first round ends with the load.
        rounds = 5 if server.patched else 1
        beside = [max(await streams(client)) for _ in range(rounds)]
        assert not loading.done() or not server.patched, "the load was over too early"
        await loading
        return quiet, beside

    quiet, beside = asyncio.run(scenario())
    return [
        (
            f"longest silence of {_REQUESTS} streams that want memory beside a load, "
            "worst against quiet worst",
            f"{max(beside) / max(quiet):.2f}x ({max(quiet) * 1e3:.0f} ms -> "
            f"{max(beside) * 1e3:.0f} ms)",
        )
    ]


def swap_behind_a_stream(server: Server) -> list[tuple[str, str]]:
    """What a request for B pays beyond A's rest, the unload, the load and its own answer."""
    overheads = []

    async def one(client: Client) -> tuple[Answer, Answer, float]:
        await client.chat("b")
        own = statistics.median([(await client.chat("b")).seconds for _ in range(5)])
        await client.chat("a")
        stream, for_b = await asyncio.gather(
            client.chat("a", tokens=900, stream=True), client.chat("b", delay=0.2)
        )
        return stream, for_b, own

    for _ in range(5):
        stream, for_b, own = asyncio.run(one(Client(server.url)))
        if not for_b.ok:
            return [("a request for B while A streams", f"refused: {for_b.status}")]
        swap = float(re.findall(r"'b' resident after ([0-9.]+) s", server.log)[-1])
        overheads.append(for_b.ended - max(stream.ended, for_b.started) - swap - own)
    return [
        (
            "wait for B beyond A's rest + unload + load + its own answer (median of 5)",
            f"{statistics.median(overheads) * 1e3:.0f} ms "
            f"(worst {max(overheads) * 1e3:.0f} ms)",
        )
    ]


def measure(source: Path, python: str, root: Path) -> list[Row]:
    """All rows for stock and patched on one oMLX."""
    made = models(root / "models")
    found: dict[str, dict[str, str]] = {}
    for name in ("stock", "patched"):

        def server(
            label: str, gb: float, load_s: float, name: str = name, **plan: object
        ) -> Server:
            return Server(
                made,
                root / f"{label}-{name}",
                patched=name == "patched",
                source=source,
                python=python,
                plan={"load_s": load_s, **plan},
                memory_gb=gb,
            )

        with server("both", 6.0, 5.0) as running:
            figures = resident_beside_a_load(running, 5.0)
        with server("short", 2.7, 0.0, evicting=["d"], per_model={"a": _LONG_S}) as running:
            figures += streams_beside_a_load(running)
        with server("one", 2.7, 1.0) as running:
            figures += swap_behind_a_stream(running)
        for what, value in figures:
            found.setdefault(what, {})[name] = value
    return [Row(what, values, source.name) for what, values in found.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.omlx_src, arguments.omlx_python, Path(folder))
    print(render(rows))


if __name__ == "__main__":
    main()
