"""Hand-outs against evictions: ``python -m benchmarks.soak rounds [--omlx-src DIR]``.

A round hands one model to two requests, which use it some turns of the event loop
later, while something evicts it at another random turn: a swap to a model that does
not fit beside it, the sweep for expired models, the memory enforcer, an unload by hand
or one of an idle model. What may never happen (B08, B12, B26): a use of an engine that
has not started or is being torn down, an engine that starts itself outside of the
pool's books, a lease or a mark that is left.

Run as a module of its own by the interpreter of that oMLX; sizes and gauges are set so
that one of two models fits, engines and their loads are real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from omlx_admission.core import request as requests
from omlx_admission.hooks.pool_state import state_of

#: Bytes: the ceiling, the model that is handed out, the one that does not fit beside
#: it, and one that fits beside either.
CEILING, SIZE, SMALL = 1000, 600, 100

#: Most turns of the event loop between a hand-out and its use, or before an eviction.
_TURNS = 40


async def in_request(action: Callable[[], Awaitable[Any]], path: str) -> Any:
    """Run ``action`` as the handler of one HTTP request whose client stays."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "path": path, "method": "POST", "query_string": b""}
    request = requests.Request(scope, receive)
    request.task = asyncio.current_task()
    token = requests.current.set(request)
    try:
        return await action()
    finally:
        requests.current.reset(token)
        request.end()


class Rounds:
    """Rounds on one pool that knows ``model``, ``other`` and ``small``.

    Attributes:
        problems: what was broken, in words; empty is what is promised.
        evictions: how often each kind of eviction was tried.
        unloads: how many of them found the model idle or let it come to rest.
    """

    def __init__(
        self,
        pool: Any,
        use: Callable[[Any], Awaitable[None]],
        seed: int,
        model: str = "a",
        other: str = "b",
        small: str = "d",
    ) -> None:
        self.pool, self.model, self.other, self.small = pool, model, other, small
        self.problems: list[str] = []
        self.evictions: Counter[str] = Counter()
        self.unloads = 0
        self.uses = 0
        self._use = use
        self._chance = random.Random(seed)
        self._kinds: dict[str, Callable[[], Awaitable[Any]]] = {
            "swap": self._swap,
            "expired": self._expire,
            "enforcer": self._enforce,
            "by hand": self._by_hand,
            "if idle": lambda: pool.unload_if_idle_unpinned(model),
        }

    async def run(self, rounds: int) -> None:
        """Play so many rounds; then nothing may be left."""
        for number in range(rounds):
            before = self._entry.engine
            kind = self._chance.choice(sorted(self._kinds))
            self.evictions[kind] += 1
            # The load route serves every kind of model, and takes no lease.
            path = f"/v1/models/{self.model}/load"
            results = await asyncio.gather(
                in_request(self._request, path),
                in_request(self._request, path),
                self._later(self._kinds[kind]),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    self.problems.append(f"round {number}, {kind}: {result!r}")
            if before is not None and self._entry.engine is not before:
                self.unloads += 1
            self._books(f"round {number}, {kind}")
            if number % 100 == 99:
                print(f"{number + 1} rounds, {self.unloads} unloads", file=sys.stderr)
        for task in set(state_of(self.pool).admission._loads.values()):
            await task
        self._nothing_left()

    @property
    def _entry(self) -> Any:
        return self.pool._entries[self.model]

    async def _turns(self) -> None:
        for _ in range(self._chance.randrange(_TURNS)):
            await asyncio.sleep(0)

    async def _request(self) -> None:
        lease = self._chance.random() < 0.5
        await self._turns()
        engine = await self.pool.get_engine(self.model, **({"_lease": True} if lease else {}))
        try:
            self._in_service(engine, "handed out")
            await self._turns()
            self._in_service(engine, "used")
            await self._use(engine)
            self.uses += 1
        finally:
            if lease:
                await self.pool.release_engine(self.model)

    def _in_service(self, engine: Any, when: str) -> None:
        if self._entry.engine is not engine or self.model in state_of(self.pool).unloading:
            self.problems.append(f"a dying engine was {when}")

    async def _later(self, evict: Callable[[], Awaitable[Any]]) -> None:
        await self._turns()
        await evict()

    async def _swap(self) -> None:
        await self.pool.get_engine(self.other, _lease=True)
        await self.pool.release_engine(self.other)

    async def _expire(self) -> None:
        for entry in self.pool._entries.values():
            entry.last_access = min(entry.last_access, 1.0)
        settings = SimpleNamespace(ttl_seconds=1)
        await self.pool.check_ttl_expirations(SimpleNamespace(get_settings=lambda _m: settings))

    async def _enforce(self) -> None:
        """Soft pressure: an idle model leaves, if there are two."""
        await self.pool.get_engine(self.small)
        self._entry.last_access = 1.0
        enforcer = self.pool._process_memory_enforcer
        enforcer.usage = int(CEILING * 0.9)
        try:
            await enforcer._check_and_enforce()
        finally:
            enforcer.usage = 0

    async def _by_hand(self) -> None:
        async def route() -> None:
            if self._entry.engine is not None:
                await self.pool._unload_engine(self.model)

        await in_request(route, f"/v1/models/{self.model}/unload")

    def _books(self, when: str) -> None:
        entries = self.pool._entries
        known = sum(e.estimated_size for e in entries.values() if e.engine is not None)
        loading = any(e.is_loading for e in entries.values())
        if not loading and not state_of(self.pool).unloading:
            counted = self.pool._current_model_memory
            if counted != known:
                self.problems.append(f"{when}: {counted} bytes counted, {known} loaded")

    def _nothing_left(self) -> None:
        for name, entry in self.pool._entries.items():
            if entry.in_use:
                self.problems.append(f"{entry.in_use} leases of {name} left")
            if entry.pending_unload_reason:
                self.problems.append(f"{name} is marked still: {entry.pending_unload_reason}")
        state = state_of(self.pool)
        if state.unloading or state.leaving:
            self.problems.append("a teardown or a drain is left")
        if state.admission is not None and state.admission.policy.waiting:
            self.problems.append(f"{state.admission.policy.waiting} waiters left")


def make_enforcer(pool: Any) -> Any:
    """Stock's memory enforcer, not polling; its reading is its ``usage``."""
    from omlx.process_memory_enforcer import ProcessMemoryEnforcer

    class Enforcer(ProcessMemoryEnforcer):  # type: ignore[misc]
        usage = 0

        def _current_usage_bytes(self) -> int:
            return self.usage

        def _get_hard_limit_bytes(self) -> int:
            return CEILING

        def _propagate_memory_limit(self) -> None:
            pass

    enforcer = Enforcer(pool)
    pool._process_memory_enforcer = enforcer
    return enforcer


async def _embed(engine: Any) -> None:
    output = await engine.embed(["some words", "more"])
    assert len(output.embeddings) == 2


async def _rerank(engine: Any) -> None:
    output = await engine.rerank("words", ["one", "two words"])
    assert len(output.scores) == 2


async def _generate(engine: Any) -> None:
    output = await engine.generate("hello", max_tokens=3, temperature=0.0)
    assert output.completion_tokens == 3, output


USES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "text": _generate,
    "embedder": _embed,
    "reranker": _rerank,
}


async def _play(kind: str, folder: str, rounds: int, seed: int) -> dict[str, Any]:
    import omlx.engine_pool as module
    from omlx import _version

    module.mx.get_active_memory = lambda: 0
    module.get_phys_footprint = lambda: 0
    pool = module.EnginePool()
    pool._get_final_ceiling = lambda: CEILING
    pool.discover_models([folder], [])
    for name, entry in pool._entries.items():
        entry.estimated_size = SMALL if name == "d" else SIZE
        entry.text_only_size = 0
    make_enforcer(pool)
    outside = _starts_outside(pool)
    play = Rounds(pool, USES[kind], seed)
    # An unload collects garbage several times; what was imported is none.
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    await play.run(rounds)
    seconds = time.perf_counter() - began
    problems = play.problems + [f"{name} started itself" for name in outside]
    loads = state_of(pool).admission.observer.swaps
    await pool.shutdown()
    return {
        "kind": kind,
        "oMLX": "stand-in" if hasattr(_version, "STANDIN") else _version.__version__,
        "rounds": rounds,
        "uses": play.uses,
        "evictions": dict(sorted(play.evictions.items())),
        "unloads": play.unloads,
        "seconds": round(seconds, 1),
        "median load s": round(statistics.median([s.load_s for s in loads] or [0.0]), 3),
        "problems": problems,
    }


def _starts_outside(pool: Any) -> list[str]:
    """Engines that loaded their weights while the pool was not loading them (B08)."""
    import wrapt
    from omlx.engine.batched import BatchedEngine

    outside: list[str] = []

    async def start(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        name = str(engine._model_name).rstrip("/").rpartition("/")[2]
        if not engine._loaded and not pool._entries[name].is_loading:
            outside.append(name)
        return await wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(BatchedEngine, "start", start)
    return outside


def main() -> None:
    """Entry point in the interpreter of that oMLX; prints one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds")
    parser.add_argument("kind", choices=list(USES))
    parser.add_argument("folder")
    parser.add_argument("rounds", type=int)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    from omlx_admission import _startup

    _startup.main()
    with contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(_play(options.kind, options.folder, options.rounds, options.seed))
    print(json.dumps(found), flush=True)
    # oMLX's threads do not all end with the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
