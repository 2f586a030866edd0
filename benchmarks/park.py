"""Parking beside draining: ``python -m benchmarks.park --omlx-src DIR --omlx-python PY``.

Two servers with memory for one model, one after the other: A streams an answer of many
tokens, and B is asked for while it runs. Told are B's wait, A's time and its longest
silence, ``--rounds`` times each. Then, with parking, ``--leaving`` rounds in which clients of
A, streamed and not, hang up at random moments; what is left of each in the server is told,
and answers that went on are compared with undisturbed ones. A real oMLX only: the stand-in
cannot park.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from omlx_admission.surfaces.demo.client import LOCAL, Answer, Client
from standin import tinymodels
from standin.server import Server

_CHAT = "/v1/chat/completions"
_LOAD_S = 1.0
_SAID = re.compile(r'"content": ?"((?:[^"\\]|\\.)*)"')


def _body(tokens: int, stream: bool = True, number: int = 0, prompt: int = 1) -> dict[str, Any]:
    return {
        "model": "a",
        "messages": [{"role": "user", "content": f"number {number} " + "word " * prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "frequency_penalty": 0.7,
        "stream": stream,
    }


def _server(omlx: argparse.Namespace, models: Path, base: Path, park: bool) -> Server:
    return Server(
        models,
        base,
        patched=True,
        source=Path(omlx.omlx_src),
        python=omlx.omlx_python,
        plan={"load_s": _LOAD_S},
        environment={
            "OMLX_ADMISSION_PARK": str(int(park)),
            "OMLX_ADMISSION_MAX_AGE_S": "0",
            "OMLX_SERIALIZE_ENGINE_GPU": str(int(omlx.turns)),
        },
    )


async def _warm(client: Client) -> None:
    for model in "aba":
        assert (await client.chat(model, tokens=2)).ok


async def _waits(server: Server, tokens: int, rounds: int) -> list[tuple[float, float, float]]:
    """(B's wait, A's time, A's longest silence) of each round."""
    client = Client(server.url, timeout=600)
    await _warm(client)
    found = []
    for number in range(rounds):
        for_a = asyncio.create_task(client.post(_CHAT, _body(tokens, number=number)))
        # As old as an answer is that the policy interrupts at once.
        await asyncio.sleep(3.5 * (_LOAD_S + 0.5))
        for_b = await client.chat("b", tokens=2)
        answer = await for_a
        assert for_b.ok, for_b
        assert answer.ok, answer.status
        moments = [answer.started, *answer.chunks, answer.ended]
        silence = max(b - a for a, b in pairwise(moments))
        found.append((for_b.seconds, answer.seconds, silence))
    return found


async def _leaving(server: Server, tokens: int, rounds: int, seed: int) -> dict[str, int]:
    """Clients hang up at random; counts of what happened and of what was wrong."""
    draw = random.Random(seed)
    client = Client(server.url, timeout=600)
    await _warm(client)
    whole = {
        n: _said(await client.post(_CHAT, _body(tokens, number=n, prompt=1 + 400 * (n == 2))))
        for n in range(3)
    }
    counts = {"left": 0, "went on": 0, "different": 0, "refused": 0, "not idle": 0}
    for _ in range(rounds):
        asked = [
            asyncio.create_task(
                client.post(_CHAT, _body(tokens, draw.random() < 0.6, n, 1 + 400 * (n == 2)))
            )
            for n in range(3)
        ]
        for_b = [
            asyncio.create_task(client.chat("b", tokens=4, delay=draw.uniform(0, 2)))
            for _ in range(3)
        ]
        leaving = [task for task in asked if draw.random() < 0.5]
        for task in leaving:
            asyncio.get_running_loop().call_later(draw.uniform(0.2, 8.0), task.cancel)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        counts["refused"] += sum(not a.ok for a in await asyncio.gather(*for_b))
        for number, answer in enumerate(answers):
            if isinstance(answer, Answer):
                counts["went on"] += 1
                counts["different"] += not answer.ok or _said(answer) != whole[number]
            else:
                counts["left"] += 1
        counts["not idle"] += not await _is_idle(server)
    return counts


def _said(answer: Answer) -> str:
    return "".join(_SAID.findall(answer.body))


async def _is_idle(server: Server) -> bool:
    async with httpx.AsyncClient(base_url=server.url, **LOCAL) as http:
        for _ in range(200):
            found = (await http.get("/admission/status")).json()
            leases = sum(model["leases"] for model in found["models"])
            busy = any(model["busy"] for model in found["models"])
            if not (leases or busy or found["queue"]["waiting"]):
                return found["queue"]["parked"]["bytes"] == 0
            await asyncio.sleep(0.1)
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--omlx-src", required=True)
    parser.add_argument("--omlx-python", required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leaving", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", action="store_true", help="with turns on the GPU")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="omlx-park-") as name:
        folder = Path(name)
        for seed, model in enumerate("ab"):
            heavy = {"hidden": 512, "layers": 4} if model == "a" else {}
            tinymodels.make_text_model(
                folder / "models", name=model, counted_bytes=1_650_000_000, seed=seed, **heavy
            )
        for park in (True, False) if options.rounds else ():
            with _server(options, folder / "models", folder / f"base{park}", park) as server:
                found = asyncio.run(_waits(server, options.tokens, options.rounds))
                parked = server.log.count("parked answer(s) of 'a' go on")
            b, a, silence = (statistics.median(each) for each in zip(*found, strict=True))
            print(
                f"{'parking' if park else 'draining'}: B waits {b:.1f} s "
                f"({min(f[0] for f in found):.1f} to {max(f[0] for f in found):.1f}), A takes "
                f"{a:.1f} s, its longest silence is {silence:.1f} s; parked {parked} times",
                flush=True,
            )
        if options.leaving:
            with _server(options, folder / "models", folder / "leaving", True) as server:
                counts = asyncio.run(
                    _leaving(server, options.tokens // 10, options.leaving, options.seed)
                )
                log = server.log
            counts["parked"] = len(re.findall(r"answer\(s\) of 'a' parked", log))
            counts["errors in the log"] = log.count(" - ERROR - ")
            print(", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
