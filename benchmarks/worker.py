"""How long an embedder and a reranker wait beside a load: ``python -m benchmarks.worker``.

Loads, embeddings and reranking share one thread in oMLX (``mlx-global``). A text model's
load is made to take seconds *on the thread that loads it*, which a real one does; both
other models are loaded and asked all the while, in open arrivals: one that waits delays
no other. Stock, patched, and patched with a thread of its own for loads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import standin
from benchmarks.arguments import checkout
from benchmarks.probed_server import ProbedServer, histogram, spread
from omlx_admission.surfaces.demo.client import Answer, Client
from standin import tinymodels

_EDGES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
#: Columns of the table, and the variables that make them.
SERVERS: dict[str, dict[str, str] | None] = {
    "stock": None,
    "patched": {},
    "load thread": {"OMLX_ADMISSION_LOAD_THREAD": "1"},
}


def models(root: Path) -> Path:
    """Text models that load slowly, an embedder and a reranker; all fit together."""
    for seed, name in enumerate("bc"):
        tinymodels.make_text_model(root, name=name, seed=seed)
    tinymodels.make_embedder(root, name="embedder")
    tinymodels.make_reranker(root, name="reranker")
    return root


async def embed(client: Client, delay: float = 0.0) -> Answer:
    """One embedding of two texts."""
    await asyncio.sleep(delay)
    body = {"model": "embedder", "input": ["some words", "and some more of them"]}
    return await client.post("/v1/embeddings", body)


async def rerank(client: Client, delay: float = 0.0) -> Answer:
    """Three documents against one query."""
    await asyncio.sleep(delay)
    body = {"model": "reranker", "query": "words", "documents": ["one", "two words", "x"]}
    return await client.post("/v1/rerank", body)


async def series(
    client: Client, seconds: float, count: int
) -> tuple[list[Answer], list[Answer]]:
    """``count`` calls of each kind, spread over ``seconds``."""
    step = seconds / count
    embeds = [embed(client, n * step) for n in range(count)]
    reranks = [rerank(client, (n + 0.5) * step) for n in range(count)]
    answers = await asyncio.gather(*embeds, *reranks)
    return answers[:count], answers[count:]


async def scenario(
    url: str, load_s: float, count: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each call: quiet and beside the load, by kind."""
    client = Client(url)
    for call in (embed, rerank):
        for _ in range(3):
            answer = await call(client)
            assert answer.ok, answer
    quiet = await series(client, load_s, count)
    loading = asyncio.create_task(client.chat("b"))
    await asyncio.sleep(0.3)
    beside = await series(client, load_s - 0.3, count)
    assert (await loading).ok
    assert all(a.ok for part in (*quiet, *beside) for a in part), "a call was refused"
    return {
        kind: ([a.seconds for a in quiet[n]], [a.seconds for a in beside[n]])
        for n, kind in enumerate(("embedder", "reranker"))
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=__doc__)
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--load-s", type=float, default=5.0, help="seconds of the load")
    parser.add_argument("--count", type=int, default=40, help="calls of each kind a phase")
    parser.add_argument("--only", choices=list(SERVERS), help="one server instead of all")
    options = parser.parse_args(argv)
    print(f"milliseconds: least / median / 95 % / greatest of {options.count} calls")
    with tempfile.TemporaryDirectory() as folder:
        made = models(Path(folder) / "models")
        for name, variables in SERVERS.items():
            if options.only not in (None, name):
                continue
            with ProbedServer(
                made,
                Path(folder) / name.replace(" ", "-"),
                patched=variables is not None,
                source=options.omlx_src,
                python=options.omlx_python,
                environment=variables or {},
                memory_gb=None,
                probe={"load_s": {"b": options.load_s}},
            ) as server:
                found = asyncio.run(scenario(server.url, options.load_s, options.count))
            for kind, (quiet, beside) in found.items():
                print(f"{name:<12}{kind:<10}quiet          {spread(quiet)}")
                print(f"{name:<12}{kind:<10}beside a load  {spread(beside)}")
                print(f"{'':<22}               {histogram(beside, _EDGES)}", flush=True)


if __name__ == "__main__":
    main()
