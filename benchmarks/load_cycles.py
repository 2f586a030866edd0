"""1,000 loads and uses with a thread for loads: ``python -m benchmarks.load_cycles``.

Runs in the Python that has what oMLX needs, with oMLX named by ``--omlx-src``. For each
engine kind a model is loaded, asked and unloaded over and over through oMLX's own pool,
while another model of that kind is asked all the time; where the kind itself does not use
the load thread (embedder, reranker), a text model is loaded, asked and unloaded in every
cycle as well. Every answer is compared with that of the same model without the thread.
A cycle counts when all of its answers were the same. Each hundred cycles run in a process
of their own: MLX on the CPU keeps a thread for each stream that there ever was, four a
load of a text model in stock as here. ``--why`` shows on plain MLX what may and what may
not be loaded on another thread.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import gc
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

import standin
from benchmarks.arguments import checkout
from omlx_admission import _startup
from omlx_admission.hooks import install
from omlx_admission.hooks.pool import load_thread
from omlx_admission.settings import Settings
from standin import tinymodels

MODULES = ("omlx.engine_core", "omlx.engine_pool", "omlx.engine.batched", "omlx.engine.vlm")
KINDS = ("text", "embedder", "reranker")
#: Cycles in one process.
_PIECE = 100

#: The cycled model, the one in use beside it, and the text model loaded beside both.
_PROMPTS = ("once upon a time", "a list of three words: ")


def models(root: Path) -> None:
    """Two of each kind, and a text model for the cycles of the other kinds."""
    make = {
        "text": tinymodels.make_text_model,
        "embedder": tinymodels.make_embedder,
        "reranker": tinymodels.make_reranker,
    }
    for kind, maker in make.items():
        for seed, which in enumerate(("cycled", "beside")):
            maker(root, name=f"{kind}-{which}", seed=seed)
    tinymodels.make_text_model(root, name="text-third", seed=7)


async def ask(engine: Any, kind: str) -> Any:
    """The answers of one engine, to be compared."""
    if kind == "text":
        outputs = [
            await engine.generate(prompt=text, max_tokens=12, temperature=0.0)
            for text in _PROMPTS
        ]
        return [output.text for output in outputs]
    if kind == "embedder":
        return (await engine.embed(list(_PROMPTS))).embeddings
    return (await engine.rerank("words", ["one", "two words", "none of them"])).scores


@dataclass
class Tally:
    """What happened in the cycles of one kind."""

    cycles: int = 0
    good: int = 0
    beside: int = 0
    different: int = 0
    errors: list[str] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)


class Cycles:
    """One pool and its models."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.expected: dict[str, Any] = {}

    async def use(self, name: str) -> Any:
        """Load ``name`` unless it is, ask it, and give it back."""
        engine = await self.pool.get_engine(name, _lease=True)
        try:
            return await ask(engine, name.partition("-")[0])
        finally:
            await self.pool.release_engine(name)

    async def learn(self) -> None:
        """What every model answers; nothing of the package is applied yet."""
        for name in list(self.pool._entries):
            self.expected[name] = await self.use(name)
            assert await self.use(name) == self.expected[name], f"{name} differs by itself"
            await self.pool._unload_engine(name)

    async def run(self, kind: str, count: int) -> Tally:
        """``count`` cycles of one kind."""
        tally = Tally()
        other = f"{kind}-beside"
        cycled = [f"{kind}-cycled"] + ([] if kind == "text" else ["text-third"])
        await self.use(other)
        done = asyncio.Event()

        async def beside() -> None:
            while not done.is_set():
                try:
                    same = await self.use(other) == self.expected[other]
                    tally.different += not same
                except Exception as error:  # noqa: BLE001 - it is what is looked for
                    tally.errors.append(f"{other}: {error!r}")
                tally.beside += 1

        busy = asyncio.create_task(beside())
        for _ in range(count):
            tally.cycles += 1
            try:
                answers = await asyncio.gather(*map(self.use, cycled))
                same = answers == [self.expected[name] for name in cycled]
                tally.different += not same
                tally.good += same
                await asyncio.gather(*map(self.pool._unload_engine, cycled))
            except Exception as error:  # noqa: BLE001
                tally.errors.append(repr(error))
            if tally.cycles == 1:
                # What is imported stays: do not look through it at every unload.
                gc.collect()
                gc.freeze()
            if tally.cycles % 100 == 0:
                print(f"... {kind}: {tally.cycles} cycles", file=sys.stderr, flush=True)
        done.set()
        await busy
        await self.pool._unload_engine(other)
        return tally


def count_loads(tally: dict[str, int]) -> None:
    """Count the jobs that the load thread takes, by name."""
    stock = load_thread._load

    def counted(ready: Any, function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "?")
        tally[name] = tally.get(name, 0) + 1
        return stock(ready, function, args, kwargs)

    load_thread._load = counted  # type: ignore[assignment]


async def measure(root: Path, kinds: Sequence[str], count: int) -> bool:
    """Print a line a kind; whether all was as it should be."""
    import omlx.engine.batched
    import omlx.engine.vlm
    import omlx.engine_core
    import omlx.engine_pool

    pool = omlx.engine_pool.EnginePool()
    pool.discover_models([str(root)], [])
    cycles = Cycles(pool)
    await cycles.learn()
    installer = install.Installer(install.decide(settings=Settings(load_thread=True)))
    for name in MODULES:
        installer.on_import(sys.modules[name])
    verdict = installer.report.verdict("load_thread")
    if verdict.state is not install.State.APPLIED:
        raise SystemExit(f"the load thread is {verdict.state.value}: {verdict.reasons}")
    loads: dict[str, int] = {}
    count_loads(loads)
    fine = True
    for kind in kinds:
        loads.clear()
        before, start = mx.get_active_memory(), time.monotonic()
        tally = await cycles.run(kind, count)
        took = time.monotonic() - start
        grown = mx.get_active_memory() - before
        good = tally.good == tally.cycles and not tally.different and not tally.errors
        fine = fine and good
        print(
            f"{kind}: {tally.good} of {tally.cycles} cycles with the answers of stock, "
            f"{tally.beside} uses of the other model meanwhile, {tally.different} different "
            f"answers, {len(tally.errors)} errors {tally.errors[:2] or ''}; jobs on the load "
            f"thread {dict(sorted(loads.items()))}; memory {grown:+,} bytes; {took:.0f} s",
            flush=True,
        )
    await pool.shutdown()
    return fine


def why() -> None:
    """The minimal programs: what another thread may be given, and what not."""
    loader, user = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))

    def on(thread: Any, call: Callable[[], Any]) -> Any:
        try:
            return thread.submit(call).result()
        except RuntimeError as error:
            return f"RuntimeError: {error}"

    print("made on one thread, used on another:")
    lazy = on(loader, lambda: mx.ones((2,)) * 2)
    print("  not evaluated          ", on(user, lambda: (lazy + 1).tolist()))
    ready = on(loader, lambda: mx.ones((2,)) * 2)
    on(loader, lambda: mx.eval(ready))
    print("  evaluated where made   ", on(user, lambda: (ready + 1).tolist()))
    stream = on(loader, lambda: mx.new_stream(mx.default_device()))
    print("  a stream               ", on(user, lambda: _on_stream(stream)))
    local = on(loader, lambda: mx.new_thread_local_stream(mx.default_device()))
    print("  a thread-local stream  ", on(user, lambda: _on_stream(local)))
    print("a compiled forward, traced on one thread, used and dropped on another:")
    for place in (loader, user):
        at_start = mx.get_active_memory()
        forward = [on(place, _compiled) for _ in range(10)]
        for each in forward:
            on(user, lambda each=each: mx.eval(each(mx.ones((1, 500)))))
        del each
        on(user, forward.clear)
        kept = mx.get_active_memory() - at_start
        name = "another" if place is loader else "the same"
        print(f"  traced on {name:<9} thread: {kept:,} bytes of weights are kept")


def _on_stream(stream: Any) -> Any:
    with mx.stream(stream):
        return (mx.ones((2,)) + 2).tolist()


def _compiled() -> Any:
    weights = mx.random.normal((500, 500))
    mx.eval(weights)
    forward = mx.compile(lambda x: x @ weights)
    forward(mx.ones((1, 500)))
    return forward


def in_pieces(source: Path, kinds: Sequence[str], count: int) -> bool:
    """Each kind in processes of no more than ``_PIECE`` cycles; whether all was well."""
    fine = True
    for kind in kinds:
        for done in range(0, count, _PIECE):
            piece = str(min(_PIECE, count - done))
            command = [sys.executable, "-m", "benchmarks.load_cycles", "--kind", kind]
            command += ["--omlx-src", str(source), "--cycles", piece]
            fine = subprocess.run(command, check=False).returncode == 0 and fine
    return fine


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends with status 1 where an answer differed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_cycles", description=__doc__
    )
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--why", action="store_true", help="plain MLX, no oMLX")
    options = parser.parse_args(argv)
    fine = True
    if options.why:
        why()
    elif options.cycles > _PIECE or len(options.kind or KINDS) > 1:
        fine = in_pieces(options.omlx_src, options.kind or KINDS, options.cycles)
    else:
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _startup.OmlxFinder)]
        sys.path.insert(0, str(options.omlx_src))
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HOME"] = os.environ["OMLX_BASE_PATH"] = folder
            models(Path(folder) / "models")
            fine = asyncio.run(
                measure(Path(folder) / "models", options.kind or KINDS, options.cycles)
            )
    sys.stdout.flush()
    # Threads with compiled functions in their cache must not be joined: MLX aborts there.
    os._exit(not fine)


if __name__ == "__main__":
    main()
