"""Long runs: ``python -m benchmarks.soak [mix|limit|rounds] [--omlx-src DIR]``.

``mix``, the default: everything at once on a server, see :mod:`benchmarks.mix`.
``limit``: five models, five requests at once, at most two models loaded or loading at any
instant. ``rounds``: hand-outs against evictions for each kind of engine, see
:mod:`benchmarks.rounds`. All end with a non-zero status where a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks import mix
from benchmarks.arguments import checkout
from omlx_admission import standin
from omlx_admission.standin import tinymodels
from omlx_admission.surfaces.demo.client import Client
from omlx_admission.surfaces.demo.server import Server, variables_for

_REPOSITORY = Path(__file__).resolve().parent.parent

#: Kinds of engines that run without a GPU, and what makes a tiny model of each.
MAKERS = {
    "text": tinymodels.make_text_model,
    "embedder": tinymodels.make_embedder,
    "reranker": tinymodels.make_reranker,
}

#: Seconds between two looks at what is loaded.
_SAMPLE_S = 0.01


async def limit(server: Server, rounds: int, most: int) -> list[str]:
    """What was broken of: never more than ``most``, settled at rest, every request 200."""
    client = Client(server.url)
    seen: Counter[int] = Counter()
    done = asyncio.Event()

    async def sample() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while not done.is_set():
                status = (await http.get(f"{server.url}/v1/models/status")).json()
                # A model whose load is about to end is both; it counts once.
                held = [m for m in status["models"] if m["loaded"] or m["is_loading"]]
                seen[len(held)] += 1
                await asyncio.sleep(_SAMPLE_S)

    sampler = asyncio.create_task(sample())
    statuses: Counter[int] = Counter()
    for _ in range(rounds):
        answers = await asyncio.gather(*(client.chat(m, tokens=2) for m in "abcde"))
        statuses.update(a.status if a.ok else -a.status for a in answers)
    done.set()
    await sampler
    rest = (await client.get("/api/status"))[1]
    print(f"rounds {rounds}, answers {dict(statuses)}")
    print(f"samples by models loaded or loading: {dict(sorted(seen.items()))}")
    print(f"at rest: {rest['models_loaded']} loaded, {rest['models_loading']} loading")
    broken = []
    if max(seen) > most:
        broken.append(f"{max(seen)} models loaded or loading, the limit is {most}")
    if rest["models_loaded"] > most or rest["models_loading"]:
        broken.append("the count does not settle")
    if set(statuses) != {200}:
        broken.append(f"not every request was served: {dict(statuses)}")
    return broken


def rounds(options: argparse.Namespace, root: Path) -> list[str]:
    """What was broken of the rounds of each kind of engine, in a process of its own each."""
    broken = []
    for kind, make in MAKERS.items():
        folder = root / kind
        make(folder, name="a", seed=1)
        for seed, name in enumerate("bd", start=2):
            tinymodels.make_text_model(folder, name=name, seed=seed)
        variables = variables_for(root, options.omlx_src)
        variables["PYTHONPATH"] += os.pathsep + str(_REPOSITORY)
        # Every eviction that is possible happens: nobody has to wait to be old enough.
        variables |= {"OMLX_ADMISSION_MAX_AGE_S": "0", "OMLX_ADMISSION_LINGER_S": "0"}
        command = [options.omlx_python, "-m", "benchmarks.rounds", kind, str(folder)]
        command += [str(options.rounds), str(options.seed)]
        log = root / f"{kind}.log"
        with log.open("wb") as output:
            run = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, stderr=output, check=False
            )
        if run.returncode:
            tail = log.read_text("utf-8", "replace").splitlines()[-1:]
            broken.append(f"{kind}: exit status {run.returncode}: {' '.join(tail)}")
            continue
        found = json.loads(run.stdout)
        problems = found.pop("problems")
        print(", ".join(f"{k}: {v}" for k, v in found.items()), flush=True)
        broken += [f"{kind}: {problem}" for problem in problems]
        if "admission: " in (text := log.read_text("utf-8", "replace")):
            broken += [f"{kind}: {line}" for line in text.splitlines() if " failed" in line]
    return broken


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 1 where something was broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("mix", "limit", "rounds"), default="mix")
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--minutes", type=float, default=20.0, help="of mix")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where the server's log is to be kept")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        match arguments.what:
            case "rounds":
                return _report(rounds(arguments, root))
            case "limit":
                return _report(_limited(arguments, root))
        models = mix.make_models(root / "models")
        with mix.server(
            models, root / "base", arguments.omlx_src, arguments.omlx_python
        ) as server:
            run = mix.Mix(server, arguments.seed)
            try:
                asyncio.run(run.run(60.0 * arguments.minutes))
            finally:
                if arguments.log:
                    arguments.log.write_text(server.log)
    return _report(run.broken)


def _limited(options: argparse.Namespace, root: Path) -> list[str]:
    for seed, name in enumerate("abcde"):
        tinymodels.make_text_model(
            root / "models", name=name, counted_bytes=300_000_000, seed=seed
        )
    with Server(
        root / "models",
        root / "base",
        patched=True,
        source=options.omlx_src,
        python=options.omlx_python,
        plan={"load_s": 0.02},
        environment={"OMLX_ADMISSION_MAX_MODELS": "2"},
    ) as server:
        return asyncio.run(limit(server, options.rounds, 2))


def _report(broken: list[str]) -> int:
    for line in broken[:20]:
        print(f"BROKEN: {line}")
    if len(broken) > 20:
        print(f"and {len(broken) - 20} more")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
