"""What being watched costs: ``python -m benchmarks.surfaces``.

* One reading of status and metrics with 10,000 waiters, and one event of the
  observer, in this process.
* ``--rate`` requests a second on the stand-in, with and without 100
  scrapes a second (status and metrics in turn) by another process. Phases with and
  without alternate, and each pair is compared, so that the machine's own drift
  falls on both; "without" the other process asks itself as often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from omlx_admission import standin
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.model import ModelView, Outcome, PoolView, Target
from omlx_admission.observation.observe import Observer
from omlx_admission.observation.pool_snapshot import Facts, Registered
from omlx_admission.settings import Settings
from omlx_admission.standin import tinymodels
from omlx_admission.surfaces import metrics, status
from omlx_admission.surfaces.demo.server import Server

SCRAPES_PER_S = 100


def crowd(waiters: int, models: int) -> tuple[Facts, Observer]:
    """A queue of ``waiters`` for ``models`` models beside one that is busy."""
    observer, policy = Observer(), AdmissionPolicy()
    for i in range(waiters):
        model = f"model-{i % models}"
        waiter = policy.enqueue(
            Target(model), 6 * 1024**3, 100.0, 400.0, SimpleNamespace(request=None)
        )
        observer.enqueued(waiter, i)
    view = PoolView(
        models={"busy": ModelView("busy", 6 * 1024**3, busy=True, leases=3)},
        ceiling=10 * 1024**3,
        fixed_ceiling=10 * 1024**3,
        used=6 * 1024**3,
    )
    policy.step(view, 101.0)
    admission: Any = SimpleNamespace(
        policy=policy, now=lambda: 102.0, gated=frozenset(), broken=False, settings=Settings()
    )
    registered = [Registered(f"model-{i}", 6 * 1024**3) for i in range(models)]
    return Facts(view=view, registered=registered, admission=admission), observer


def best_ms(call: Any, rounds: int = 30) -> float:
    """Milliseconds of the median of ``rounds`` calls."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def readings() -> None:
    """Print the cost of one reading and of one event."""
    render, _kind = metrics.format_for("")
    for waiters, models in ((0, 3), (10_000, 3), (10_000, 50)):
        facts, observer = crowd(waiters, models)
        document = best_ms(lambda f=facts, o=observer: json.dumps(status.build(f, o)))
        scrape = best_ms(lambda f=facts, o=observer: render(f, o))
        print(
            f"one reading, {waiters:>6} waiters for {models:>2} models: "
            f"status {document:.2f} ms, metrics {scrape:.2f} ms"
        )
    observer, policy = Observer(), AdmissionPolicy()
    waiter = policy.enqueue(Target("m"), 1, 0.0, 1.0, SimpleNamespace(request=None))
    waiter.outcome = Outcome.GRANTED

    def events() -> None:
        for _ in range(1000):
            observer.enqueued(waiter, 1000)
            observer.left(waiter, 1.0, 1000, True)

    print(f"one waiter in and out: {best_ms(events):.2f} us")


# -- a whole server -----------------------------------------------------------


class Connection:
    """One kept-alive HTTP/1.1 connection, as little code a request as can be."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, message: bytes) -> int:
        """Send a request and read its answer. Returns the status."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(message)
        # oMLX binds its sockets itself, and asyncio then leaves Nagle's algorithm on:
        # without this, each answer on a kept connection comes 40 ms late on Linux.
        if hasattr(socket, "TCP_QUICKACK"):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(
            line.lower().split(b":", 1) for line in head.split(b"\r\n") if b":" in line
        )
        if b"content-length" in fields:
            await reader.readexactly(int(fields[b"content-length"]))
        else:
            await reader.readuntil(b"0\r\n\r\n")  # the last of the chunks
        return int(head.split(b" ", 2)[1])


def message(what: str) -> bytes:
    """One request: ``models`` (the list of models) or ``embedding`` (of a short text)."""
    if what == "models":
        return b"GET /v1/models HTTP/1.1\r\nhost: t\r\n\r\n"
    body = json.dumps({"model": "e", "input": "hello"}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def open_loop(port: int, request: bytes, per_s: float, seconds: float) -> list[float]:
    """Latencies in ms of requests that come at random moments, whatever became of others."""
    free: list[Connection] = []
    found: list[float] = []

    async def one(due: float) -> None:
        connection = free.pop() if free else Connection(port)
        code = await connection.send(request)
        assert code == 200, code
        found.append(1000 * (time.perf_counter() - due))
        free.append(connection)

    tasks = []
    began = due = time.perf_counter()
    while due - began < seconds:
        due += random.expovariate(per_s)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return found


async def scrape(port: int) -> None:
    """Scrape until the standard input closes; runs in a process of its own.

    Port 0 is the comparison: a server in this process, which costs the machine what
    the scraping itself costs, and the server under test nothing.
    """
    if port == 0:
        here = await asyncio.start_server(_answer, "127.0.0.1", 0)
        port = here.sockets[0].getsockname()[1]
    connection = Connection(port)
    paths = ("/admission/status", "/admission/metrics")
    messages = [f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode() for path in paths]
    due, count = time.perf_counter(), 0
    loop = asyncio.get_running_loop()
    closed = loop.run_in_executor(None, sys.stdin.read)
    while not closed.done():
        due += 1 / SCRAPES_PER_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        assert await connection.send(messages[count % 2]) == 200
        count += 1
    print(count, flush=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = b"x" * 10_000
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\n" + body)
    except (asyncio.CancelledError, asyncio.IncompleteReadError):
        writer.close()


def watched(server: Server, what: str, per_s: float, pairs: int, seconds: float) -> None:
    """Print the latency with and without scrapes, and the CPU time of the server."""
    process = psutil.Process(server.pid)
    if hasattr(process, "cpu_affinity") and len(cores := process.cpu_affinity()) > 1:
        # Apart from who asks: they would take turns on one core now and then.
        process.cpu_affinity(cores[:1])
        psutil.Process().cpu_affinity(cores[1:])
    cpu = {False: 0.0, True: 0.0}

    def phase(scraped: bool) -> list[float]:
        before = sum(process.cpu_times()[:2])
        found = asyncio.run(open_loop(server.port, message(what), per_s, seconds))
        cpu[scraped] += sum(process.cpu_times()[:2]) - before
        return found

    phase(False)
    cpu[False] = 0.0
    rows: list[tuple[list[float], list[float]]] = []
    scrapes = 0
    print(f"{per_s:g} {what} requests a second, {pairs} pairs of {seconds:g} s:")
    for pair in range(pairs):
        found: dict[bool, list[float]] = {}
        for scraped in (False, True) if pair % 2 else (True, False):
            helper = _scraper(server.port if scraped else 0)
            found[scraped] = phase(scraped)
            scrapes += int(helper.communicate("")[0]) * scraped
        rows.append((found[False], found[True]))
    for name, figure in (
        ("mean", statistics.fmean),
        ("median", statistics.median),
        ("p95", lambda v: statistics.quantiles(v, n=20)[-1]),
        ("p99", lambda v: statistics.quantiles(v, n=100)[-1]),
    ):
        without = [figure(a) for a, _ in rows]
        withal = [figure(b) for _, b in rows]
        ratios = [b / a - 1 for a, b in zip(without, withal, strict=True)]
        low, high = _interval(ratios)
        print(
            f"{name:>7}: {statistics.median(without):6.2f} ms without, "
            f"{statistics.median(withal):6.2f} ms with scrapes; median of pairs "
            f"{100 * statistics.median(ratios):+.1f} % (95 % interval {100 * low:+.1f} "
            f"to {100 * high:+.1f})"
        )
    print(
        f"{scrapes / (pairs * seconds):.0f} scrapes a second; the server used "
        f"{cpu[False] / (pairs * seconds):.2f} s of CPU a second without, "
        f"{cpu[True] / (pairs * seconds):.2f} with: "
        f"{1000 * (cpu[True] - cpu[False]) / max(1, scrapes):.2f} ms a scrape"
    )


def _interval(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    medians = sorted(
        statistics.median(random.choices(values, k=len(values))) for _ in range(rounds)
    )
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def _scraper(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.surfaces", "--scrape", str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--what", choices=("models", "embedding"), default="embedding")
    parser.add_argument("--scrape", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scrape is not None:
        asyncio.run(scrape(arguments.scrape))
        return
    logging.getLogger("omlx.admission").setLevel(logging.WARNING)
    readings()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tinymodels.make_embedder(root / "models", name="e")
        with Server(root / "models", root / "base", True, standin.PATH) as server:
            watched(server, arguments.what, arguments.rate, arguments.pairs, arguments.seconds)


if __name__ == "__main__":
    main()
