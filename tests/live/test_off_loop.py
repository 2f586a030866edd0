"""An engine that takes long to close, seen by the clients of another one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from benchmarks.probed_server import ProbedServer
from omlx_admission.surfaces.demo.client import Client
from standin import tinymodels

from .conftest import Omlx


def test_a_resident_answers_while_another_engine_closes(omlx: Omlx, tmp_path: Path) -> None:
    for seed, name in enumerate("as"):
        tinymodels.make_text_model(tmp_path / "models", name=name, seed=seed)
    server = ProbedServer(
        tmp_path / "models",
        tmp_path / "base",
        patched=True,
        source=omlx.source,
        python=omlx.python or sys.executable,
        memory_gb=None,
        probe={"flush_s": {"s": 0.0}, "hold": str(tmp_path / "go")},
    )

    async def test() -> None:
        client = Client(server.url, timeout=60)
        for name in "as":
            assert (await client.chat(name, tokens=2)).ok
        unloading = asyncio.create_task(client.post("/v1/models/s/unload", {}))
        for _ in range(3000):
            if server.lines("flush"):
                break
            await asyncio.sleep(0.01)
        # The engine's thread is held inside the teardown: stock answers nobody now.
        assert (await client.chat("a", tokens=2)).ok
        assert not unloading.done()
        (tmp_path / "go").touch()
        assert (await unloading).status == 200
        assert (await client.chat("s", tokens=2)).ok

    with server:
        asyncio.run(test())
        closed_on = [line[2] for line in server.lines("close")]
    assert closed_on
    assert all(str(name).startswith("admission-close") for name in closed_on)
