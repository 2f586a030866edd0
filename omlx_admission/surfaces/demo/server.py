"""A server process of the demo: real oMLX or the stand-in, stock or patched."""

from __future__ import annotations

import os
import site
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

import omlx_admission
from omlx_admission.surfaces.demo.client import LOCAL


class ServerError(Exception):
    """The server did not start or did not end; the text says why, in one line."""


@dataclass
class Server:
    """Starts ``omlx serve`` in its own process group of files; use as a context manager.

    Attributes:
        source: folder with the package ``omlx``; None takes this Python's own.
        python: interpreter that has what that oMLX needs.
        load_s: what every load takes, in seconds.
        memory_gb: a ceiling that does not move.
        start_s: longest wait in seconds for the server to answer.
    """

    models: Path
    base: Path
    patched: bool
    source: Path | None = None
    python: str = sys.executable
    load_s: float = 0.0
    memory_gb: float | None = 2.7
    port: int = 0
    start_s: float = 60.0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        """Where the server's output goes."""
        return self.base / "server.log"

    @property
    def log(self) -> str:
        """The server's output so far."""
        return self.log_path.read_text("utf-8", "replace")

    def __enter__(self) -> Server:
        self.base.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        self._log = self.log_path.open("wb")
        try:
            self._process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=self.base,
            )
            self._wait_until_up()
        except OSError as error:
            self.__exit__()
            raise ServerError(f"cannot run {self.python}: {error.strerror or error}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def _launcher(self) -> list[str]:
        return ["-m", "omlx_admission.surfaces.demo.launch", f"{self.load_s:g}"]

    def _command(self) -> list[str]:
        command = [self.python, *self._launcher(), "serve"]
        command += ["--model-dir", str(self.models.resolve())]
        command += ["--base-path", str(self.base.resolve())]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        if self.memory_gb is not None:
            command += ["--memory-guard-gb", f"{self.memory_gb:g}"]
        return command

    def _environment(self) -> dict[str, str]:
        variables = variables_for(self.base, self.source)
        variables["OMLX_ADMISSION"] = str(int(self.patched))
        return variables

    def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server ended at once (status {self._process.returncode}): "
                    f"{self._last_line()}"
                )
            try:
                if httpx.get(f"{self.url}/health", timeout=2, **LOCAL).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise ServerError(
            f"the server gave no answer within {self.start_s:.0f} s: {self._last_line()}"
        )

    def _last_line(self) -> str:
        return last_line(self.log)


def last_line(text: str) -> str:
    """The last line that says something, which is where Python puts the error."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def variables_for(base: Path, source: Path | None) -> dict[str, str]:
    """Variables for an interpreter that shall find this package and ``source`` first.

    The user's own ``OMLX_*`` settings stay out, and so does the user's home:
    oMLX writes to ``~/.omlx`` whatever its base path is, and lists the models
    of the Hugging Face cache.
    """
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMLX_", "PYTEST_", "HF_"))
    }
    path = [str(p.resolve()) for p in (source, _package_alone(base)) if p is not None]
    if variables.get("PYTHONPATH"):
        path.append(variables["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(path)
    variables["PYTHONUSERBASE"] = site.getuserbase()
    variables["HOME"] = str(base.resolve())
    variables["HF_HUB_OFFLINE"] = "1"
    return variables


def _package_alone(base: Path) -> Path:
    """A folder below ``base`` that holds this package and nothing else.

    The folder that the package lies in may be a whole ``site-packages``: put on
    the path, it would shadow what another interpreter has.
    """
    folder = base / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "omlx_admission"
    if not link.is_symlink():
        link.symlink_to(Path(omlx_admission.__file__).parent.resolve())
    return folder


def free_port() -> int:
    """A port of the loopback interface without a listener now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
