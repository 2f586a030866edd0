"""The GPU turn on a real oMLX: ``python -m benchmarks.gpu_turn --omlx-src DIR``.

Five questions, one table each server: do turns keep engines apart, are they fair, what
do they cost, does oMLX's prefill fairness stay awake, and does a long prompt keep others
from their first token. Tiny models on the CPU: the
order of things is real, the GPU is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arguments import checkout
from omlx_admission.gpu_turn.turn import GpuTurn, Span
from omlx_admission.surfaces.demo.client import Answer, Client
from standin import tinymodels
from standin.server import Server

#: Plugin features other than the one that is measured.
_QUIET = {
    "OMLX_ADMISSION_QUEUE": "0",
    "OMLX_ADMISSION_RESIDENT_PATH": "0",
    "OMLX_ADMISSION_ERRORS": "0",
}
_TURN = {**_QUIET, "OMLX_SERIALIZE_ENGINE_GPU": "1"}


class Work(NamedTuple):
    """One recorded piece of GPU work, seconds of the server's monotonic clock."""

    name: str
    site: str
    start: float
    end: float


@dataclass
class RecordedServer(Server):
    """A server that writes down its GPU work."""

    files: Path = field(default_factory=Path)

    module = "benchmarks.gpu_recorder"

    def works(self) -> list[Work]:
        """What was recorded so far, by start."""
        path = self.files / "spans"
        if not path.exists():
            return []
        return sorted(
            (Work(*json.loads(line)) for line in path.read_text().splitlines()),
            key=lambda work: work.start,
        )

    def turns(self) -> list[Span]:
        """The turns so far, as the turn tells them, by start."""
        lines = (self.files / "turns").read_text().splitlines()
        return sorted((Span(*json.loads(line)) for line in lines), key=lambda s: s.start)


@dataclass
class Bench:
    """What all measurements share."""

    source: Path
    python: str
    folder: Path
    seconds: float
    count: int = 0

    @contextmanager
    def server(
        self, variables: dict[str, str], *, patched: bool = True, record: str = ""
    ) -> Iterator[RecordedServer]:
        """A server with the models of `models`."""
        self.count += 1
        files = self.folder / f"run{self.count}"
        files.mkdir()
        recording = {name: str(files / name[4:].lower()) for name in record.split()}
        with RecordedServer(
            self.folder / "models",
            files / "base",
            patched,
            source=self.source,
            python=self.python,
            environment={**variables, **recording},
            memory_gb=None,
            files=files,
        ) as server:
            yield server


def models(root: Path) -> None:
    """Two text models of like speed, an embedder, a short chat, and two heavy prefills."""
    tinymodels.make_text_model(root, name="a", hidden=256, layers=6)
    tinymodels.make_text_model(root, name="b", hidden=256, layers=6, seed=1)
    tinymodels.make_embedder(root, name="e")
    for seed, name in enumerate(("p", "q"), 2):
        tinymodels.make_text_model(root, name=name, hidden=512, layers=8, seed=seed)


async def busy(client: Client, model: str, until: float, tokens: int = 200) -> list[Answer]:
    """Chats one after another until the clock says stop."""
    answers = []
    while time.monotonic() < until:
        answers.append(await client.chat(model, tokens=tokens))
    return answers


async def embed(client: Client, until: float) -> list[Answer]:
    """Embeddings one after another."""
    answers = []
    while time.monotonic() < until:
        body = {"model": "e", "input": ["some words to embed"] * 8}
        answers.append(await client.post("/v1/embeddings", body))
    return answers


def text_of(answer: Answer) -> str:
    """What the model said."""
    assert answer.ok, answer
    said = json.loads(answer.body)["choices"][0]["message"]["content"]
    assert isinstance(said, str)
    return said


def overlap(works: Sequence[Work]) -> tuple[float, float]:
    """Seconds with two or more at work, and with one or more."""
    edges = sorted([(w.start, 1) for w in works] + [(w.end, -1) for w in works])
    depth, last, two, one = 0, 0.0, 0.0, 0.0
    for at, step in edges:
        if depth >= 1:
            one += at - last
        if depth >= 2:
            two += at - last
        depth, last = depth + step, at
    return two, one


def within(works: Sequence[Work], start: float, end: float) -> list[Work]:
    """The works inside the stretch."""
    return [w for w in works if w.start >= start and w.end <= end]


def apart(bench: Bench) -> None:
    """Two text engines decoding at once: overlap, equal turns, the same answers."""
    print(f"\nTwo text engines decoding at once for {bench.seconds:.0f} s")
    solo: dict[str, str] = {}
    with bench.server(_QUIET, record="GPU_SPANS") as server:

        async def alone() -> None:
            client = Client(server.url)
            for name in "ab":
                solo[name] = text_of(await client.chat(name, tokens=200))

        asyncio.run(alone())
    for label, variables in (("stock", _QUIET), ("turns", _TURN)):
        with bench.server(variables, patched=label == "turns", record="GPU_SPANS") as server:

            async def both() -> tuple[float, float, list[list[Answer]]]:
                client = Client(server.url)
                for name in "ab":
                    await client.chat(name, tokens=8)
                start = time.monotonic()
                end = start + bench.seconds
                answers = await asyncio.gather(*(busy(client, n, end) for n in "ab"))
                return start + 1.0, end - 0.5, answers

            start, end, answers = asyncio.run(both())
            works = within(server.works(), start, end)
        two, one = overlap(works)
        turns = {n: sum(w.name == n for w in works) for n in "ab"}
        same = all(
            text_of(a) == solo[n] for n, group in zip("ab", answers, strict=True) for a in group
        )
        print(
            f"  {label}: overlap {100 * two / one:.2f} % of {one:.1f} busy s; turns a "
            f"{turns['a']}, b {turns['b']} ({100 * abs(1 - turns['a'] / turns['b']):.1f} % "
            f"apart); {sum(map(len, answers))} answers, all as alone: {same}"
        )


def contenders(bench: Bench) -> None:
    """Two text engines and an embedder: no overlap, bounded gaps, chat latency."""
    print(f"\nTwo text engines and an embedder in a loop, {bench.seconds:.0f} s")
    with bench.server(_TURN, record="GPU_SPANS GPU_TURNS") as server:

        async def scenario() -> tuple[float, float, list[float], list[float]]:
            client = Client(server.url)
            for name in "ab":
                await client.chat(name, tokens=8)
            await embed(client, time.monotonic() + 0.1)
            quiet = [(await client.chat("a", tokens=40)).seconds for _ in range(10)]
            start = time.monotonic()
            end = start + bench.seconds
            chats, _, _ = await asyncio.gather(
                busy(client, "a", end, tokens=40), busy(client, "b", end), embed(client, end)
            )
            return start + 1.0, end - 0.5, quiet, [c.seconds for c in chats]

        start, end, quiet, loaded = asyncio.run(scenario())
        works = within(server.works(), start, end)
        turns = [t for t in server.turns() if t.asked >= start and t.end <= end]
    two, one = overlap(works)
    longest = {n: max(t.end - t.start for t in turns if t.name == n) for n in "abe"}
    print(f"  overlap {100 * two / one:.2f} % of {one:.1f} busy s")
    for name in "abe":
        own = [t for t in turns if t.name == name]
        passed = [
            [o.name for o in turns if t.asked <= o.start < t.start and o.name != name]
            for t in own
        ]
        worst = max(names.count(n) for names in passed for n in "abe")
        # Those who held the turn when it was asked for, and those who asked before.
        bound = sum(longest[n] for n in "abe" if n != name)
        wait = max(t.start - t.asked for t in own)
        usual = statistics.median(t.end - t.start for t in own)
        print(
            f"  {name}: {len(own)} turns of {usual * 1e3:.0f}"
            f" ms; turns that one other began while it waited: at most "
            f"{worst}; longest wait {wait * 1e3:.0f} ms (one turn of each other: "
            f"{bound * 1e3:.0f} ms)"
        )
    print(
        f"  chat of 40 tokens on a: median {statistics.median(quiet) * 1e3:.0f} ms alone, "
        f"{statistics.median(loaded) * 1e3:.0f} ms beside both "
        f"({statistics.median(loaded) / statistics.median(quiet):.2f}x; "
        f"worst {max(loaded) / statistics.median(quiet):.2f}x)"
    )


def cost(bench: Bench, rounds: int) -> None:
    """Wall time with turns and without, for one busy engine and for two."""
    print("\nCost: tokens per second of wall time, interleaved rounds")
    rates: dict[tuple[str, str], list[float]] = {}
    tokens = 400
    for _ in range(rounds):
        for label, variables, patched in (
            ("stock", _QUIET, False),
            ("turns off", _QUIET, True),
            ("turns", _TURN, True),
        ):
            with bench.server(variables, patched=patched) as server:

                async def scenario() -> tuple[float, float]:
                    client = Client(server.url)
                    for name in "ab":
                        await client.chat(name, tokens=50)
                    start = time.monotonic()
                    assert (await client.chat("a", tokens=tokens)).ok
                    middle = time.monotonic()
                    both = await asyncio.gather(*(client.chat(n, tokens=tokens) for n in "ab"))
                    assert all(a.ok for a in both)
                    return middle - start, time.monotonic() - middle

                one, two = asyncio.run(scenario())
            rates.setdefault(("one busy", label), []).append(tokens / one)
            rates.setdefault(("two busy", label), []).append(2 * tokens / two)
    for what in ("one busy", "two busy"):
        base = statistics.median(rates[what, "stock"])
        for label in ("stock", "turns off", "turns"):
            values = rates[what, label]
            middle = statistics.median(values)
            print(
                f"  {what}, {label}: {middle:.1f} tokens/s ({100 * (base / middle - 1):+.2f} % "
                f"time; range {min(values):.1f} to {max(values):.1f})"
            )


def hand_over() -> None:
    """Lock and wake alone, between threads that do nothing else."""
    import threading

    print("\nHand-over: lock and wake alone")
    for threads in (2, 3):
        turn, count = GpuTurn(), 5000
        go = threading.Barrier(threads + 1)

        def work(turn: GpuTurn = turn, count: int = count, go: Any = go) -> None:
            go.wait()
            for _ in range(count):
                turn.acquire(threading.current_thread().name, "bench").release()

        crowd = [threading.Thread(target=work) for _ in range(threads)]
        for thread in crowd:
            thread.start()
        go.wait()
        start = time.perf_counter()
        for thread in crowd:
            thread.join()
        took = time.perf_counter() - start
        print(f"  {threads} threads: {took / (threads * count) * 1e6:.1f} us")


def fairness(bench: Bench) -> None:
    """Two prefills of many chunks beside a decode: chunk sizes, and the decode's signs."""
    print("\nTwo prefills of many chunks beside a decode (p, q beside a)")
    for label, variables, patched in (("stock", _QUIET, False), ("turns", _TURN, True)):
        with bench.server(variables, patched=patched, record="GPU_CHUNKS") as server:

            async def scenario() -> None:
                client = Client(server.url)
                for name in "apq":
                    await client.chat(name, tokens=4)
                decode = asyncio.create_task(
                    busy(client, "a", time.monotonic() + 600.0, tokens=4000)
                )
                await asyncio.sleep(1.0)
                prompt = "word " * 400
                bodies = [
                    {
                        "model": name,
                        "messages": [{"role": "user", "content": name + prompt}],
                        "max_tokens": 2,
                        "temperature": 0.0,
                    }
                    for name in "pq"
                ]
                done = await asyncio.gather(
                    *(client.post("/v1/chat/completions", body) for body in bodies)
                )
                assert all(a.ok for a in done), done
                decode.cancel()

            asyncio.run(scenario())
            lines = [json.loads(x) for x in (server.files / "chunks").read_text().splitlines()]
        chunks = [x[1] for x in lines if x[0] != "asked" and x[1] > 64]
        asked = [x for x in lines if x[0] == "asked"]
        ages = [x[2] for x in asked if x[2] is not None]
        size = f"{max(chunks)} at most, {statistics.median(chunks):.0f} in the middle"
        print(f"  {label}: {len(chunks)} chunks of {size}")
        if asked:
            print(
                f"    asked {len(asked)} times whether others decode, yes "
                f"{sum(x[1] for x in asked)} times; "
                f"oldest sign {max(ages, default=0.0):.2f} s (expires after 2.5 s)"
            )


def prompt(bench: Bench, rounds: int) -> None:
    """First tokens of a long prompt, and of a short one that comes in the middle of it."""
    print("\nA prompt of 2,000 tokens on b in chunks of 256, a chat on a in the middle of it")
    long = {
        "model": "b",
        "messages": [{"role": "user", "content": "word " * 400}],
        "max_tokens": 1,
        "temperature": 0.0,
    }
    firsts: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for label, variables in (("turns off", _QUIET), ("turns", _TURN)):
            with bench.server({**variables, "GPU_STEP": "256"}) as server:

                async def scenario() -> tuple[float, float, float]:
                    client = Client(server.url)
                    for name in "ab":
                        assert (await client.chat(name, tokens=4)).ok
                    body = {
                        **long,
                        "messages": [{"role": "user", "content": "other " + "word " * 400}],
                    }
                    # oMLX's fairness forgets a decode after 2.5 s; until then it splits a
                    # prompt into steps by itself.
                    await asyncio.sleep(3.0)
                    alone = await client.post("/v1/chat/completions", body)
                    await asyncio.sleep(3.0)
                    for_p = asyncio.create_task(client.post("/v1/chat/completions", long))
                    await asyncio.sleep(0.5)
                    a = await client.chat("a", tokens=1)
                    p = await for_p
                    assert a.ok, a
                    assert p.ok, p
                    one, two, three = alone.seconds, p.seconds, a.seconds
                    return one, two, three

                firsts.setdefault(label, []).append(asyncio.run(scenario()))
    for label, seen in firsts.items():
        alone, long_one, short = (statistics.median(x) for x in zip(*seen, strict=True))
        print(
            f"  {label}: first token of a after {short:.2f} s, of b after {long_one:.2f} s "
            f"(b alone: {alone:.2f} s)"
        )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--omlx-src", type=checkout, required=True, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "what",
        nargs="*",
        default=["apart", "contenders", "fairness", "prompt", "cost", "hand-over"],
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(arguments.omlx_src, arguments.omlx_python, Path(name), arguments.seconds)
        models(bench.folder / "models")
        for what in arguments.what:
            if what == "apart":
                apart(bench)
            elif what == "contenders":
                contenders(bench)
            elif what == "fairness":
                fairness(bench)
            elif what == "prompt":
                prompt(bench, arguments.rounds)
            elif what == "cost":
                cost(bench, arguments.rounds)
            elif what == "hand-over":
                hand_over()
            else:
                parser.error(f"no measurement named {what}")


if __name__ == "__main__":
    main()
