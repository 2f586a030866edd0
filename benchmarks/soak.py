"""Long runs: ``python -m benchmarks.soak limit|swaps|rounds [--omlx-src DIR]``.

``limit``: five models, five requests at once, at most two models loaded or loading
at any instant. ``swaps``: room for one of three models, two clients a model, random
disconnects, one model whose load fails. ``rounds``: hand-outs against evictions for
each kind of engine, see :mod:`benchmarks.rounds`. All end with a non-zero status where
a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

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


async def swaps(server: Server, seconds: float, seed: int) -> list[str]:
    """What was broken of: only the failing model fails, and nothing is left afterwards."""
    client = Client(server.url)
    chance = random.Random(seed)
    outcomes: dict[str, Counter[str]] = {m: Counter() for m in "abc"}
    end = time.monotonic() + seconds

    async def agent(model: str) -> None:
        while time.monotonic() < end:
            leave = chance.uniform(0.05, 3.0) if chance.random() < 0.3 else None
            answer = await client.chat(
                model,
                tokens=chance.choice((1, 20, 200)),
                stream=chance.random() < 0.5,
                hang_up_after=leave,
            )
            outcome = "left" if answer.error == "hung up" else str(answer.status)
            if answer.status == 200 and not answer.ok:
                outcome = "cut"
            outcomes[model][outcome] += 1
            await asyncio.sleep(chance.uniform(0.0, 0.5))

    await asyncio.gather(*(agent(m) for m in "abc" for _ in range(2)))
    await asyncio.sleep(3.0)
    status = (await client.get("/api/status"))[1]
    code, admission = await client.get("/admission/status")
    for model, counted in outcomes.items():
        print(f"{model}: {dict(counted)}")
    print(f"swaps: {server.log.count('resident after')}, at rest: {status['loaded_models']}")
    broken = []
    for model in "ab":
        wrong = set(outcomes[model]) - {"200", "left", "503"}
        if wrong:
            broken.append(f"{model}: {', '.join(sorted(wrong))}")
    if set(outcomes["c"]) - {"409", "left", "503"}:
        broken.append(f"the failing model answered {dict(outcomes['c'])}")
    if "Traceback" in server.log.replace("the plan says", "") and "admission" in _traces(
        server
    ):
        broken.append("a traceback of ours in the log")
    if code == 200:
        broken += _leftovers(admission)
    return broken


def _traces(server: Server) -> str:
    lines = server.log.splitlines()
    return "\n".join(line for line in lines if "omlx_admission/" in line and "demo" not in line)


def _leftovers(status: Any) -> list[str]:
    """K8 as the status document tells it."""
    left = []
    if status["queue"]["waiting"]:
        left.append(f"{status['queue']['waiting']} waiters left")
    for model in status["models"]:
        if model.get("leases"):
            left.append(f"{model['leases']} leases of {model['id']} left")
    return left


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
    parser.add_argument("what", choices=("limit", "swaps", "rounds"))
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if arguments.what == "rounds":
            return _report(rounds(arguments, root))
        counted = 300_000_000 if arguments.what == "limit" else 1_650_000_000
        for seed, name in enumerate("abcde" if arguments.what == "limit" else "abc"):
            tinymodels.make_text_model(
                root / "models", name=name, counted_bytes=counted, seed=seed
            )
        environment = {"OMLX_ADMISSION_MAX_MODELS": "2"} if arguments.what == "limit" else {}
        failing = [] if arguments.what == "limit" else ["c"]
        with Server(
            root / "models",
            root / "base",
            patched=True,
            source=arguments.omlx_src,
            python=arguments.omlx_python,
            plan={"load_s": 0.02 if arguments.what == "limit" else 0.3, "failing": failing},
            environment=environment,
        ) as server:
            if arguments.what == "limit":
                broken = asyncio.run(limit(server, arguments.rounds, 2))
            else:
                broken = asyncio.run(swaps(server, arguments.seconds, arguments.seed))
    return _report(broken)


def _report(broken: list[str]) -> int:
    for line in broken[:20]:
        print(f"BROKEN: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
