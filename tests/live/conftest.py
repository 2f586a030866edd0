"""Server scenarios: on the stand-in always, on each real oMLX named by ``--omlx-src``.

Every scenario runs a patched server in a process of its own and looks at it from
outside, as a client does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import standin
from omlx_admission.hooks.patching import faults
from omlx_admission.surfaces.demo import tinymodels
from omlx_admission.surfaces.demo.client import Client
from omlx_admission.surfaces.demo.server import Server

#: Bytes counted by oMLX: with the guard at 2.7 GB one of A and B fits, D fits
#: beside either, and X never fits.
SIZES = {"a": 1_650_000_000, "b": 1_650_000_000, "d": 300_000_000, "x": 5_000_000_000}

#: The part of the ceiling that does not move, where the rest does: X never fits.
STATIC_GB = 4.0

#: Suites of what none of the changes in ``patches/`` brings to oMLX.
_NOT_IN_PATCHES = frozenset({"test_stream_hold", "test_unloads"})


@dataclass(frozen=True)
class Omlx:
    """One oMLX to run: its folder, and a Python that can run it (None: this one).

    ``native``: the changes of ``patches/`` are in it, and it runs without this package.
    """

    name: str
    source: Path
    python: str | None = None
    native: bool = False


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

    ``plan`` is more of the plan of ``surfaces/demo/launch.py``, ``arguments`` of the
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
