"""A headless Chromium for the tests of the page, driven over the W3C WebDriver protocol.

Standard library only: the protocol is a dozen JSON calls to ``chromedriver``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omlx_admission.surfaces.demo.server import free_port

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> str | None:
    """Why there is no browser to test with, or None."""
    if shutil.which("chromedriver") is None:
        return "no chromedriver on PATH"
    if not any(shutil.which(name) for name in _BROWSERS):
        return "no chromium or chrome on PATH"
    return None


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        """Load ``url`` and wait for its ``load`` event."""
        self._post("/url", {"url": url})

    def tab(self) -> str:
        """Open one more tab and go to it; its handle, for :meth:`go_to`."""
        handle = str(self._post("/window/new", {"type": "tab"})["handle"])
        self.go_to(handle)
        return handle

    def go_to(self, handle: str) -> None:
        """Look at the tab with that handle; what runs in the others goes on."""
        self._post("/window", {"handle": handle})

    def tabs(self) -> list[str]:
        """All open tabs."""
        return list(_call("GET", self._session + "/window/handles", None))

    def close_all_but(self, kept: list[str]) -> None:
        """Close the other tabs and go to the first of these."""
        for handle in self.tabs():
            if handle not in kept:
                self.go_to(handle)
                _call("DELETE", self._session + "/window", None)
        self.go_to(kept[0])

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page and return what it returns."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any, seconds: float = 20.0) -> Any:
        """Run ``script`` until it returns something true, and return that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.run(script, *arguments):
                return value
            time.sleep(0.05)
        shown = self.run("return document.body.innerText")
        raise AssertionError(f"never true: {script}\nthe page shows:\n{shown}")

    def text(self, id_: str) -> str:
        """The text of an element as it is laid out."""
        return str(self.run("return document.getElementById(arguments[0]).innerText", id_))

    def press(self, *keys: str) -> None:
        """Press and release keys one after the other."""
        actions = [{"type": kind, "value": k} for k in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def cdp(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, *, dark: bool, width: int = 1100, height: int = 900) -> None:
        """Choose colours and size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def errors(self) -> list[str]:
        """What the page's console reported as an error; a failed fetch is none."""
        entries = self._post("/se/log", {"type": "browser"})
        return [
            e["message"]
            for e in entries
            if e["level"] == "SEVERE" and "Failed to load resource" not in e["message"]
        ]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call("POST", self._session + path, body)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A fresh browser with a fresh profile in ``folder``, for the length of a block."""
    port = free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    base = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(base)
        options = {
            "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            "binary": next(path for name in _BROWSERS if (path := shutil.which(name))),
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = _call("POST", base + "/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{base}/session/{answer['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _call("DELETE", session, None)
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_until_up(base: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if _call("GET", base + "/status", None)["ready"]:
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _call(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json"}, method=method
    )
    # A proxy of the environment has no part in a call to this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        problem = json.load(error)["value"]
        raise AssertionError(f"{problem['error']}: {problem['message']}") from None
