"""Server scenarios: on the stand-in always, on each real oMLX named by ``--omlx-src``.

Every scenario runs a patched server in a process of its own and looks at it from
outside, as a client does.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import standin
from omlx_admission.core import faults
from omlx_admission.surfaces.demo.client import Answer, Client
from standin import tinymodels
from standin.server import Server

#: Bytes counted by oMLX: with the guard at 2.7 GB one of A and B fits, D fits
#: beside either, and X never fits.
SIZES = {"a": 1_650_000_000, "b": 1_650_000_000, "d": 300_000_000, "x": 5_000_000_000}

#: The part of the ceiling that does not move, where the rest does: X never fits.
STATIC_GB = 4.0

#: Suites of what none of the changes in ``patches/`` brings to oMLX.
_NOT_IN_PATCHES = frozenset({"test_stream_hold", "test_unloads"})


async def said(server: Server, words: str, times: int = 1, since: int = 0) -> None:
    """Return when the server has logged these words so often, after ``since`` characters."""
    for _ in range(3000):
        if server.log[since:].count(words) >= times:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the log does not say {words!r} {times} times")


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - a server tells
            await asyncio.sleep(0.02)


def loading(client: Client, model: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        status = (await client.get("/v1/models/status"))[1]
        return any(m["id"] == model and m["is_loading"] for m in status["models"])

    return look


async def streaming(
    server: Server, model: str = "a", tokens: int = 150, **options: Any
) -> asyncio.Task[Answer]:
    """A chat whose first piece has arrived."""
    began, reads = asyncio.Event(), 0

    def clock() -> float:
        # It is read at the start, and then with each piece or at the end.
        nonlocal reads
        reads += 1
        if reads == 2:
            began.set()
        return time.monotonic()

    client = Client(server.url, clock=clock)
    task = asyncio.create_task(client.chat(model, tokens=tokens, stream=True, **options))
    await began.wait()
    return task


@dataclass(frozen=True)
class Omlx:
    """One oMLX to run: its folder, and a Python that can run it (None: this one).

    ``native``: the changes of ``patches/`` are in it, and it runs without this package.
    """

    name: str
    source: Path
    python: str | None = None
    native: bool = False


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An ``async def`` test is the clients of its servers."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "omlx" not in metafunc.fixturenames:
        return
    config = metafunc.config
    found = [Omlx("stand-in", standin.PATH)]
    found += [
        Omlx(Path(source).name, Path(source), config.getoption("--omlx-python"))
        for source in config.getoption("--omlx-src")
    ]
    found += [
        Omlx(
            f"{Path(source).name}-native", Path(source), config.getoption("--omlx-python"), True
        )
        for source in config.getoption("--omlx-native")
        if metafunc.module.__name__.rpartition(".")[2] not in _NOT_IN_PATCHES
    ]
    metafunc.parametrize("omlx", found, ids=lambda o: o.name, scope="session")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tiny models; A's tokens are slow enough for a stream of some seconds."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, size) in enumerate(SIZES.items()):
        heavy = {"hidden": 512, "layers": 8} if name == "a" else {}
        tinymodels.make_text_model(root, name=name, counted_bytes=size, seed=seed, **heavy)
    return root


@pytest.fixture
def serve(omlx: Omlx, models: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a patched server: ``serve(load_s=2.0, OMLX_ADMISSION_MAX_WAIT_S="2")``.

    ``plan`` is more of the plan of ``standin/launch.py``, ``arguments`` of the
    command line. With ``ceiling_gb=2.7`` the server runs in oMLX's default tier and the
    ceiling moves by ``server.set_ceiling(1.2)``; X is still too large for ever, unless
    ``plan`` states another ``static_gb``. Loads that hang go on when the test ends.
    """
    running: list[Server] = []

    def start(
        *,
        load_s: float = 1.0,
        failing: tuple[str, ...] = (),
        plan: dict[str, object] | None = None,
        arguments: Sequence[str] = (),
        ceiling_gb: float | None = None,
        **env: str,
    ) -> Server:
        wanted = env.pop("OMLX_ADMISSION", "1") == "1"
        if omlx.native and not wanted:
            env["OMLX_ADMISSION_QUEUE"] = "0"
        more: dict[str, object] = {
            "hang_until": str(tmp_path / "hangs-end"),
            # As many as a process of macOS may open at first.
            "descriptors": 256,
        }
        if ceiling_gb is not None:
            more["static_gb"] = STATIC_GB
        server = Server(
            models,
            tmp_path / f"base{len(running)}",
            patched=wanted and not omlx.native,
            source=omlx.source,
            plan={"load_s": load_s, "failing": failing, **more, **(plan or {})},
            ceiling_gb=ceiling_gb,
            environment=env,
            arguments=arguments,
            **({"python": omlx.python} if omlx.python else {}),
        )
        server.__enter__()
        running.append(server)
        return server

    yield start
    (tmp_path / "hangs-end").touch()
    for server in running:
        server.__exit__()
    for server in running:
        # Stock has taken over where a hook of ours failed, so no answer shows it.
        assert faults.SAID not in server.log


@pytest.fixture
def client_of() -> Callable[[Server], Client]:
    return lambda server: Client(server.url, timeout=60)
