"""Starting a server process, stand-in or real, and stopping it for certain."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import PATH

#: Seconds a server gets to end by itself after SIGTERM.
_STOP_S = 20.0


@dataclass
class Server:
    """A running server: its address, its process, and the file it prints to."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(
    models: Path,
    *,
    base: Path,
    source: Path = PATH,
    python: str = sys.executable,
    paths: Sequence[Path] = (),
    guard_gb: float | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 90.0,
) -> Iterator[Server]:
    """``omlx serve`` on a free port, for the length of a block.

    ``source`` holds the ``omlx`` package and goes first on ``PYTHONPATH``, ``paths``
    after it; nothing of the caller's own ``PYTHONPATH`` is kept. ``guard_gb`` is the
    memory ceiling (1024**3 bytes). ``base`` receives settings and logs and stands in
    for the home folder. ``environment`` is added to the caller's.
    """
    base.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [python, "-m", "omlx.cli", "serve", "--model-dir", str(models)]
    command += ["--base-path", str(base), "--port", str(port), *options]
    if guard_gb is not None:
        command += ["--memory-guard-gb", str(guard_gb)]
    variables = {
        **os.environ,
        "HOME": str(base),
        "PYTHONPATH": os.pathsep.join(str(path) for path in (source, *paths)),
        "OMLX_BONJOUR": "0",
        **(environment or {}),
    }
    log = base / "console.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, cwd=base
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_up(server, timeout_s)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except urllib.error.HTTPError as answer:
            # 503 while pinned models load: the server is there.
            answer.close()
            return
        except OSError:
            time.sleep(0.05)
    printed = server.log.read_text(encoding="utf-8", errors="replace")[-4000:]
    raise RuntimeError(f"the server did not come up:\n{printed}")
