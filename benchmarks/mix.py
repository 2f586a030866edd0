"""Everything at once on one server: ``python -m benchmarks.soak [--omlx-src DIR]``.

oMLX runs as it is installed: its default tier, under a ceiling that dips for 0.1 to 30 s
at a time; loads on its load thread; 256 descriptors. Clients use four routes, streaming
and not, come in bursts of more than an engine takes, leave, and stop reading. An operator
loads and unloads by hand in every mode by both doors, pins, rescans the folders. Tokens
are counted, one model never loads, one never fits, the process is stopped for two seconds
and goes on.

Each client writes down what it saw, `benchmarks.outcome` judges it, and at the end
nothing may be left behind (K1 to K4, K6 to K8).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.outcome import FAILING, NEVER, NORMAL, Record, judge, overtaken
from omlx_admission.core import faults
from omlx_admission.surfaces.demo.client import LOCAL
from standin import tinymodels
from standin.server import Server

#: Bytes counted by oMLX. Under the ceiling one of A and B fits, C and D beside neither
#: or either; F fails to load, X never fits.
SIZES = {
    "a": 1_650_000_000,
    "b": 1_650_000_000,
    "c": 1_200_000_000,
    "d": 300_000_000,
    "f": 300_000_000,
    "x": 5_000_000_000,
}
_KINDS = {"f": FAILING, "x": NEVER}

#: GB: the ceiling when it does not dip, how deep it dips, and the part that is fixed.
CEILING_GB, _LOWEST_GB, _STATIC_GB = 2.7, 0.8, 4.0

_GB = 1024**3

#: Seconds a request may wait for memory.
BUDGET_S = 15.0

#: Seconds without a byte after which a client says that it was forgotten.
_FORGOTTEN_S = 90.0

#: Seconds between a decision to load and the load: other models leave meanwhile, and
#: the process may be standing still.
_DECIDED_S = 6.0

#: Most requests of a burst that may be served before an earlier one: what an engine runs
#: at once, and again what it has taken.
_BYPASS = 16

_TEXT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _TEXT,
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": _TEXT,
    "/v1/responses": {"input": "hello"},
}

#: What an operator's request may be answered, by what it is.
_RIGHT = {
    "load": {200, 503},
    "unload": {200, 202, 400, 409, 503},
    "reload": {200, 503},
    "pin": {200, 404},  # the stand-in has no settings of models
    "count": {200, 503},
}

_FIRST_TOKEN = re.compile(
    r'"(?:content|text)": ?"[^"]|content_block_delta|output_text\.delta|"error"'
)


def make_models(root: Path) -> Path:
    """A's tokens are slow enough for streams of some seconds."""
    for seed, (name, size) in enumerate(SIZES.items()):
        heavy = {"hidden": 512, "layers": 8} if name == "a" else {}
        tinymodels.make_text_model(root, name=name, counted_bytes=size, seed=seed, **heavy)
    return root


def server(models: Path, base: Path, source: Path, python: str) -> Server:
    """The server, not started."""
    base.mkdir(parents=True, exist_ok=True)
    # No key and no session is asked for on the admin's routes.
    settings = {"auth": {"skip_api_key_verification": True}}
    (base / "settings.json").write_text(json.dumps(settings))
    return Server(
        models,
        base,
        patched=True,
        source=source,
        python=python,
        ceiling_gb=CEILING_GB,
        plan={
            "load_s": 0.6,
            "failing": ["f"],
            "static_gb": _STATIC_GB,
            "metal_gb": 0,
            "descriptors": 256,
            "keepalive_s": 1.0,
        },
        environment={
            "OMLX_ADMISSION_MAX_WAIT_S": f"{BUDGET_S:g}",
            "OMLX_ADMISSION_MAX_AGE_S": "2",
            "OMLX_ADMISSION_STREAM_HOLD_S": "2",
        },
        start_s=120.0,
    )


class Mix:
    """One run; `broken` says what was wrong, with the history of the request."""

    def __init__(self, running: Server, seed: int) -> None:
        self.broken: list[str] = []
        self.records: list[Record] = []
        self.figures: Counter[str] = Counter()
        self._server = running
        self._seed = seed
        self._bursts: list[list[Record]] = []
        self._events: list[tuple[float, float, str]] = []
        self._cuts: list[tuple[float, float, str]] = []
        self._ceilings = [(0.0, CEILING_GB)]
        self._resident = ["a"]
        self._most = 0
        self._end = 0.0
        self._http: httpx.AsyncClient

    async def run(self, seconds: float) -> None:
        """Play it."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        began = time.monotonic()
        self._end = began + seconds
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=_FORGOTTEN_S, limits=limits, **LOCAL
        ) as self._http:
            sampler = asyncio.create_task(self._sample())
            await asyncio.gather(
                *(self._agent(f"client {n}") for n in range(6)),
                self._crowd(),
                self._stalled(),
                self._operator("operator 1"),
                self._operator("operator 2"),
                self._pressure(),
                self._standstill(),
            )
            await self._settle()
            sampler.cancel()
        self._judge(began)

    # --- who takes part ---------------------------------------------------------------

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    async def _agent(self, name: str) -> None:
        chance = self._chance(name)
        while time.monotonic() < self._end:
            model = chance.choices("abcdfx", weights=(30, 30, 15, 15, 5, 2))[0]
            leave = chance.uniform(0.05, 4.0) if chance.random() < 0.2 else None
            await self._ask(
                name,
                chance.choice(list(_BODIES)),
                model,
                stream=chance.random() < 0.5,
                tokens=chance.choice((1, 8, 60)),
                leave=leave,
            )
            await asyncio.sleep(chance.choice((0.0, 0.2, 1.0)))

    async def _crowd(self) -> None:
        """Bursts of more requests than an engine takes."""
        chance = self._chance("crowd")
        for pause in self._every(chance, 25.0, 40.0):
            await asyncio.sleep(pause)
            model, path = chance.choice("abd"), chance.choice(list(_BODIES))
            calls = []
            for n in range(44):
                call = self._ask(f"crowd {n}", path, model, stream=n % 2 == 0, tokens=8)
                calls.append(asyncio.create_task(call))
                # Sent in this order, and as good as at once.
                await asyncio.sleep(0.005)
            self._bursts.append(await asyncio.gather(*calls))

    async def _stalled(self) -> None:
        """Clients that ask for a long stream and stop reading it."""
        chance = self._chance("stalled")
        for pause in self._every(chance, 20.0, 40.0):
            await asyncio.sleep(pause)
            record = self._begin("stalled", "/v1/chat/completions", chance.choice("abd"), True)
            body = json.dumps(
                {"model": record.model, "stream": True, "max_tokens": 3000, **_TEXT}
            )
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(small, ("127.0.0.1", self._server.port))
            head = f"POST {record.path} HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(small, (head + body).encode())
            try:
                async with asyncio.timeout(BUDGET_S):
                    await loop.sock_recv(small, 1024)
            except (TimeoutError, OSError):
                pass
            await asyncio.sleep(chance.uniform(2.0, 20.0))
            small.close()
            record.left, record.ended = "stopped reading", time.monotonic()

    async def _operator(self, name: str) -> None:
        chance = self._chance(name)
        for pause in self._every(chance, 0.5, 5.0):
            await asyncio.sleep(pause)
            # Mostly one that is there: of the others there is nothing to unload.
            model = chance.choice(self._resident if chance.random() < 0.8 else "abcd")
            what = chance.choices(
                ("load", "unload", "reload", "pin", "count"), weights=(30, 40, 5, 15, 30)
            )[0]
            door = chance.choice(("/v1/models", "/admin/api/models"))
            method, path = "POST", f"{door}/{model}/{what}"
            body: dict[str, Any] | None = None
            match what:
                case "unload":
                    mode = chance.choice(("", "?mode=drain", "?mode=now", "?mode=if-idle"))
                    path += mode
                case "reload":
                    path = "/admin/api/reload"
                case "pin":
                    method, path = "PUT", "/admin/api/models/d/settings"
                    body = {"is_pinned": chance.random() < 0.5}
                case "count":
                    path, body = "/v1/messages/count_tokens", {"model": model, **_TEXT}
            await self._operate(what, method, path, body, model)

    async def _operate(self, what: str, method: str, path: str, body: Any, model: str) -> None:
        began = time.monotonic()
        if "mode=now" in path:
            # It may cut from the moment on that it is sent.
            self._cuts.append((began, float("inf"), model))
            cut = len(self._cuts) - 1
        try:
            answer = await self._http.request(method, path, json=body)
            status, text = answer.status_code, answer.text
        except httpx.HTTPError as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        if "mode=now" in path:
            self._cuts[cut] = (began, ended, model)
        if what == "reload" and ended > began + BUDGET_S:
            # At the end of its budget it ends what still runs: it cannot go on without.
            self._cuts += [(began + BUDGET_S, ended, each) for each in "abcd"]
        self._events.append((began, ended, f"{method} {path} {body or ''} -> {status}"))
        self.figures[f"{what}: {status}"] += 1
        if status not in _RIGHT[what]:
            self.broken.append(f"{method} {path}: {status} {text[:300]}")

    async def _pressure(self) -> None:
        """Dips of the ceiling, some longer than a request waits."""
        chance = self._chance("pressure")
        for pause in self._every(chance, 4.0, 20.0):
            await asyncio.sleep(pause)
            gb = chance.uniform(_LOWEST_GB, CEILING_GB)
            began = self._set_ceiling(gb)
            await asyncio.sleep(10 ** chance.uniform(-1.0, 1.5))
            self._events.append((began, self._set_ceiling(CEILING_GB), f"ceiling {gb:.2f} GB"))
            self.figures["dips"] += 1

    async def _standstill(self) -> None:
        chance = self._chance("standstill")
        for pause in self._every(chance, 30.0, 70.0):
            await asyncio.sleep(pause)
            began = time.monotonic()
            os.kill(self._server.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(2.0)
            finally:
                os.kill(self._server.pid, signal.SIGCONT)
            self._events.append((began, time.monotonic(), "the process stood still"))
            self.figures["standstills"] += 1

    def _every(self, chance: random.Random, least: float, most: float) -> Iterator[float]:
        """Pauses between the deeds of one part, as long as there is time for one more."""
        while time.monotonic() < self._end - (pause := chance.uniform(least, most)):
            yield pause

    def _set_ceiling(self, gb: float) -> float:
        self._server.set_ceiling(gb)
        self._ceilings.append((now := time.monotonic(), gb))
        return now

    # --- one request ------------------------------------------------------------------

    def _begin(self, sender: str, path: str, model: str, stream: bool, n: int = 0) -> Record:
        now = time.monotonic()
        record = Record(len(self.records), sender, path, model, stream, n, now)
        self.records.append(record)
        return record

    async def _ask(
        self,
        sender: str,
        path: str,
        model: str,
        *,
        stream: bool,
        tokens: int,
        leave: float | None = None,
    ) -> Record:
        record = self._begin(sender, path, model, stream, tokens)
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {"model": model, "stream": stream, limit: tokens, **_BODIES[path]}
        try:
            async with asyncio.timeout(leave):
                await self._read(record, {**body, "temperature": 0.0})
        except TimeoutError:
            record.left = "left"
        except httpx.HTTPError as error:
            record.broken = f"{type(error).__name__}: {error}"
        record.ended = time.monotonic()
        return record

    async def _read(self, record: Record, body: dict[str, Any]) -> None:
        async with self._http.stream("POST", record.path, json=body) as response:
            record.status = response.status_code
            record.headers = dict(response.headers)
            async for text in response.aiter_text():
                now = time.monotonic()
                record.first = record.first or now
                record.body += text
                if record.stream and record.content is None and _FIRST_TOKEN.search(text):
                    record.content = None if '"error"' in text else now
            if not record.stream:
                record.content = time.monotonic()

    # --- what is looked at meanwhile and afterwards -----------------------------------

    async def _sample(self) -> None:
        """K3: what is in memory, comes or goes is never more than the ceiling."""
        loading: set[str] = set()
        told = ""
        then = time.monotonic()
        while True:
            try:
                status = (await self._http.get("/admission/status")).json()
            except httpx.HTTPError as error:
                self.broken.append(f"the status: {type(error).__name__}: {error}")
                return
            now = time.monotonic()
            held = [m for m in status["models"] if m["state"] not in ("absent", "queued")]
            total = sum(m["bytes"] for m in held)
            self._most = max(self._most, total)
            self.figures["samples"] += 1
            what = ", ".join(f"{m['model']} {m['state']}" for m in held)
            # Said once: it may last for many looks.
            if total > CEILING_GB * _GB and what != told:
                told = what
                self.broken.append(f"{total / _GB:.2f} GB at once: {what}")
            new = {m["model"] for m in held if m["state"] == "loading"}
            ceiling = self._ceiling_since(then - _DECIDED_S) * _GB
            if new - loading and total > ceiling:
                self.broken.append(
                    f"a load to {total / _GB:.2f} GB under {ceiling / _GB:.2f} GB: {what}"
                )
            resident = [m["model"] for m in held if m["state"] == "resident"]
            self._resident = resident or self._resident
            loading, then = new, now
            await asyncio.sleep(0.1)

    def _ceiling_since(self, then: float) -> float:
        """The highest ceiling since ``then``."""
        before = [gb for at, gb in self._ceilings if at <= then][-1:]
        return max(before + [gb for at, gb in self._ceilings if at > then])

    async def _settle(self) -> None:
        """K6, K8: nothing is left, and every model can be loaded."""
        path = "/admin/api/models/d/settings"
        await self._operate("pin", "PUT", path, {"is_pinned": False}, "d")
        left = ["nothing was looked at"]
        deadline = time.monotonic() + 60.0
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            left = left_behind((await self._http.get("/admission/status")).json())
        self.broken += [f"left at the end: {thing}" for thing in left]
        for model in "abcd":
            record = await self._ask(
                "the end", "/v1/chat/completions", model, stream=False, tokens=2
            )
            if record.status != 200:
                self.broken.append(f"'{model}' is not served at the end")

    def _judge(self, began: float) -> None:
        outcomes: dict[tuple[str, str], Counter[str]] = {}
        for record in self.records:
            cut = any(
                model == record.model and start <= record.ended + 1.0 and end >= record.started
                for start, end, model in self._cuts
            )
            outcome, wrong = judge(record, _KINDS.get(record.model, NORMAL), cut)
            form = "stream" if record.stream else "plain"
            outcomes.setdefault((record.path, form), Counter())[outcome] += 1
            if wrong is not None:
                self.broken.append(f"{wrong}\n{self._history(record, began)}")
        for burst in self._bursts:
            # A stream's first token and a plain answer's end are different moments.
            for stream in (True, False):
                if (passed := overtaken([r for r in burst if r.stream is stream])) > _BYPASS:
                    self.broken.append(
                        f"{passed} of a burst for '{burst[0].model}' at "
                        f"{burst[0].started - began:.1f} s were served before an earlier one"
                    )
        log = self._server.log
        if faults.SAID in log:
            line = next(line for line in log.splitlines() if faults.SAID in line)
            self.broken.append(f"the log: {line}")
        self._print(outcomes, log)

    def _history(self, record: Record, began: float) -> str:
        """One request's life, and what happened meanwhile."""
        form = "stream" if record.stream else "plain"
        head = f"  {record.sender}: {record.path} {record.model} {form} {record.tokens} tokens"
        lines = [
            f"{head}, {record.started - began:.2f} to {record.ended - began:.2f} s, "
            f"status {record.status}, first byte "
            f"{'never' if record.first is None else f'{record.first - began:.2f} s'}",
            f"  ends with: {record.body[-300:]!r}",
        ]
        for start, end, text in sorted(self._events):
            if start <= record.ended and end >= record.started - 1.0:
                lines.append(f"  {start - began:.2f} to {end - began:.2f} s: {text}")
        return "\n".join(lines)

    def _print(self, outcomes: dict[tuple[str, str], Counter[str]], log: str) -> None:
        for (path, form), counted in sorted(outcomes.items()):
            told = ", ".join(f"{k} {n}" for k, n in sorted(counted.items()))
            print(f"{path} {form}: {told}")
        waits = [r.content - r.started for r in self.records if r.content and r.status == 200]
        if len(waits) > 1:
            cuts = statistics.quantiles(waits, n=100)
            print(
                f"seconds to the first token or the whole plain answer: median {cuts[49]:.2f}, "
                f"95th of 100 {cuts[94]:.2f}, longest {max(waits):.2f}"
            )
        print(", ".join(f"{k} {n}" for k, n in sorted(self.figures.items())))
        print(f"loads {log.count(' resident after')}, bursts {len(self._bursts)}")
        print(f"most at once {self._most / _GB:.2f} GB of {CEILING_GB:g} GB")
        print(f"requests {len(self.records)}, broken promises {len(self.broken)}", flush=True)


def left_behind(status: Any) -> list[str]:
    """K8 as the status document tells it."""
    left = []
    if status["queue"]["waiting"]:
        left.append(f"{status['queue']['waiting']} waiters")
    if status["swap"] or status["beside"]:
        left.append(f"a swap: {status['swap'] or status['beside']}")
    if not status["health"]["ok"]:
        left.append(f"health: {status['health']['problems']}")
    for model in status["models"]:
        if model["leases"] or model["busy"]:
            left.append(f"{model['leases']} leases of '{model['model']}'")
        if model["state"] not in ("absent", "resident"):
            left.append(f"'{model['model']}' is {model['state']}")
    return left
