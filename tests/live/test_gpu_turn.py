"""The GPU turn and the way out of the penalty box, on whole servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.gpu import exposure_file, presence
from omlx_admission.gpu.exposure import Cell, Record
from omlx_admission.surfaces.demo.client import Answer, Client
from standin import tinymodels
from standin.server import Server

from .conftest import Omlx, said

FILE = exposure_file.FILE_NAME
IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU "
    "errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)


class GpuServer(Server):
    """Starts `gpu_server` instead of the launcher."""

    def _launcher(self) -> list[str]:
        return [str(Path(__file__).with_name("gpu_server.py")), json.dumps(self.plan)]


@pytest.fixture(scope="module")
def two_and_an_embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu-models")
    for seed, name in enumerate("ab"):
        tinymodels.make_text_model(root, name=name, seed=seed, hidden=128, layers=4)
    tinymodels.make_embedder(root, name="e")
    return root


@pytest.fixture
def gpu_serve(
    omlx: Omlx, two_and_an_embedder: Path, tmp_path: Path
) -> Iterator[Callable[..., GpuServer]]:
    """Start a server with these models, patched or edited; keywords are variables."""
    running: list[GpuServer] = []

    def serve(**variables: str) -> GpuServer:
        server = GpuServer(
            two_and_an_embedder,
            tmp_path / "base",
            not omlx.native,
            source=omlx.source,
            python=omlx.python or sys.executable,
            environment=variables,
            memory_gb=None,
        )
        running.append(server)
        return server.__enter__()

    yield serve
    for server in running:
        server.__exit__()


def takes_turns_itself(omlx: Omlx) -> bool:
    """Whether the changes `gpu-turn` and `submissions-exit` are in this oMLX."""
    return (omlx.source / "omlx" / "gpu_turn").is_dir()


def chat_body(model: str, text: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0.0,
    }


def text_of(answer: Answer) -> str:
    assert answer.ok, answer
    return str(json.loads(answer.body)["choices"][0]["message"]["content"])


def everything_at_once(server: Server) -> dict[str, str]:
    """Both text models and the embedder busy together; returns what the models said."""

    async def scenario() -> dict[str, str]:
        client = Client(server.url)
        chats = {n: await client.chat(n, tokens=60) for n in "ab"}
        alone = {n: text_of(answer) for n, answer in chats.items()}
        body = {"model": "e", "input": ["some words"] * 8}
        together = await asyncio.gather(
            *(client.chat(n, tokens=60) for n in "ab" for _ in range(3)),
            *(client.post("/v1/embeddings", body) for _ in range(6)),
        )
        assert all(a.status == 200 for a in together)
        for answer in together[:6]:
            assert text_of(answer) == alone[answer.model]
        return alone

    return asyncio.run(scenario())


def works(path: Path) -> list[tuple[str, float, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((name, start, end) for name, start, end in lines)


def overlaps(found: list[tuple[str, float, float]]) -> list[tuple[Any, Any]]:
    by_start = sorted(found, key=lambda work: work[1])
    return [(one, two) for one, two in itertools.pairwise(by_start) if two[1] < one[2]]


def test_nobody_is_on_the_gpu_together_and_answers_stay_the_same(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    spans = tmp_path / "spans"
    server = gpu_serve(OMLX_SERIALIZE_ENGINE_GPU="1", GPU_SPANS=str(spans))
    everything_at_once(server)
    found = works(spans)
    assert {name for name, _s, _e in found} == {"a", "b", "e"}
    assert overlaps(found) == []
    if not takes_turns_itself(omlx):
        return

    async def totals() -> Any:
        _, status = await Client(server.url).get("/api/status")
        return status["gpu_turn"]["totals"]

    assert set(asyncio.run(totals())) == {"a", "b", "e"}
    if not omlx.native:  # the package on an edited oMLX stands aside
        (line,) = (text for text in server.log.splitlines() if "admission: active on" in text)
        features = line.partition(": active on ")[2]
        assert "gpu_turn" not in features
        assert "gpu_lockout" not in features


def test_another_model_answers_within_a_long_prompt(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    """A long prompt that is prefilled in one step: others have their turn between chunks."""
    spans, stop = tmp_path / "spans", tmp_path / "stop"
    server = gpu_serve(
        OMLX_SERIALIZE_ENGINE_GPU="1", GPU_SPANS=str(spans), GPU_PROMPTS=str(stop)
    )

    async def waits(client: Client) -> bool:
        native = takes_turns_itself(omlx)
        _, status = await client.get("/api/status" if native else "/admission/status")
        return '"b"' in json.dumps(status["gpu_turn"]["waiting"])

    async def scenario() -> None:
        client = Client(server.url)
        assert (await client.chat("b", tokens=2)).ok
        prompt = chat_body("a", "word " * 300, 2)
        for_a = asyncio.create_task(client.post("/v1/chat/completions", prompt))
        for _ in range(2000):
            if stop.exists():
                break
            await asyncio.sleep(0.01)
        for_b = asyncio.create_task(client.chat("b", tokens=2))
        for _ in range(2000):
            if await waits(client):
                break
            await asyncio.sleep(0.01)
        (stop / "go").touch()
        assert (await for_b).ok
        assert (await for_a).ok

    asyncio.run(scenario())
    found = works(spans)
    assert overlaps(found) == []
    names = [name for name, _s, _e in sorted(found, key=lambda work: work[1])]
    prompt = names[names.index("a") :]
    assert prompt.count("a") > 4, "the prompt was one piece of work"
    # Whoever waited at the end of the first chunk came right after it; oMLX's first step for
    # a request may be no GPU work yet.
    assert "b" in prompt[:4]


def test_without_the_turn_they_are_and_nothing_of_it_is_wrapped(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path
) -> None:
    """The check above can fail: stock does overlap."""
    spans = tmp_path / "spans"
    server = gpu_serve(GPU_SPANS=str(spans))
    everything_at_once(server)
    assert overlaps(works(spans))


def test_the_settings_file_switches_it_on_and_keeps_the_key(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    settings = base / "settings.json"
    settings.write_text(json.dumps({"scheduler": {"serialize_engine_gpu": True}}))
    spans = tmp_path / "spans"
    server = gpu_serve(GPU_SPANS=str(spans))
    everything_at_once(server)
    assert overlaps(works(spans)) == []
    written = json.loads(settings.read_text())
    if omlx.name != "stand-in":
        assert "server" in written, "this oMLX has saved its settings"
    assert written["scheduler"]["serialize_engine_gpu"] is True


def test_the_ledger_counts_two_busy_engines_and_both_ends_of_the_run(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    if omlx.native:
        pytest.skip("the ledger is this package's")
    server = gpu_serve()
    everything_at_once(server)
    server.__exit__()
    lines = exposure_file.read(tmp_path / "base" / FILE).lines
    assert sum(line.starts for line in lines) == sum(line.stops for line in lines) == 1
    total = lines[0].record
    for line in lines[1:]:
        total.add(line.record)
    assert total.hours(busy=2, serialised=False) > 0
    assert total.hours(busy=0, serialised=False) > 0
    assert total.names() == {"a", "b", "e"}


@pytest.mark.parametrize(
    ("where", "turn"), [("synchronise", "0"), ("synchronise", "1"), ("work", "0")]
)
async def test_a_process_in_the_penalty_box_ends_itself(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx, where: str, turn: str
) -> None:
    if omlx.name == "stand-in" and (where, turn) == ("synchronise", "0"):
        pytest.skip("a step of the stand-in synchronises nothing")
    fails = tmp_path / "fails"
    server = gpu_serve(GPU_FAILS=str(fails), GPU_WHERE=where, OMLX_SERIALIZE_ENGINE_GPU=turn)
    client = Client(server.url, timeout=30)
    assert (await client.chat("a", tokens=4)).ok
    fails.write_text(IGNORED)
    chat = asyncio.create_task(client.chat("a", tokens=2000))
    assert server._process is not None
    assert await asyncio.to_thread(server._process.wait, 30) == 70
    await chat
    if omlx.native or takes_turns_itself(omlx):
        return  # it left by itself, perhaps before our log and ledger could see why
    assert "GPU fault SubmissionsIgnored in 'a'" in server.log
    lines = exposure_file.read(tmp_path / "base" / FILE).lines
    assert any(line.record.faults for line in lines)
    assert not any(line.stops for line in lines)
    # Why it ended is known; its next start does not call that sudden.
    assert not any(lives for _, lives in presence.states(tmp_path / "base" / FILE))
    gpu_serve().__exit__()
    lines = exposure_file.read(tmp_path / "base" / FILE).lines
    assert not any(line.record.ended for line in lines)


async def test_g8_a_killed_server_is_counted_by_what_was_busy(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    if omlx.native:
        pytest.skip("the ledger is this package's")
    server = gpu_serve()
    path = tmp_path / "base" / FILE
    client = Client(server.url, timeout=30)
    assert (await client.chat("a", tokens=4)).ok
    assert (await client.chat("b", tokens=4)).ok
    chats = [asyncio.create_task(client.chat(name, tokens=2000)) for name in "ab"]
    for _ in range(2000):
        if [state.cell.busy for state, _ in presence.states(path)] == [2]:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("two engines were never busy")
    assert server._process is not None
    server._process.kill()
    await asyncio.gather(*chats)
    await asyncio.to_thread(server._process.wait)
    second = gpu_serve()
    lines = exposure_file.read(path).lines
    assert [dict(line.record.ended) for line in lines if line.record.ended] == [
        {Cell(2, 0, False): 1}
    ]
    second.__exit__()
    assert not list(presence.folder_of(path).iterdir())


async def test_g7_two_servers_on_one_base_path_are_two_engines(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    if omlx.native:
        pytest.skip("the ledger is this package's")
    first, second = gpu_serve(), gpu_serve()
    path = tmp_path / "base" / FILE
    ours, theirs = Client(first.url, timeout=60), Client(second.url, timeout=60)
    for client in (ours, theirs):
        assert (await client.chat("a", tokens=4)).ok
    chats = [asyncio.create_task(client.chat("a", tokens=600)) for client in (ours, theirs)]
    for _ in range(2000):
        if sorted(state.cell.busy for state, _ in presence.states(path)) == [1, 1]:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("both were never busy at once")
    assert all(answer.ok for answer in await asyncio.gather(*chats))
    for server in (first, second):
        server.__exit__()
    total = Record()
    for line in exposure_file.read(path).lines:
        total.add(line.record)
    assert total.across > 0
    assert total.hours(busy=2, serialised=False) == pytest.approx(total.across / 3600)


async def test_switched_off_it_goes_on_as_stock_does(
    gpu_serve: Callable[..., GpuServer], tmp_path: Path, omlx: Omlx
) -> None:
    if omlx.native or takes_turns_itself(omlx):
        pytest.skip("its exit has no switch")
    fails = tmp_path / "fails"
    server = gpu_serve(
        GPU_FAILS=str(fails), GPU_WHERE="work", OMLX_ADMISSION_EXIT_ON_GPU_LOCKOUT="0"
    )
    client = Client(server.url, timeout=30)
    assert (await client.chat("a", tokens=4)).ok
    fails.write_text(IGNORED)
    # Stock may well try for ever: nobody waits for this answer.
    chat = asyncio.create_task(client.chat("a", tokens=20))
    await said(server, "GPU fault SubmissionsIgnored")
    status, _ = await client.get("/health")
    assert status == 200
    chat.cancel()


async def test_the_same_text_in_a_prompt_changes_nothing(
    gpu_serve: Callable[..., GpuServer],
) -> None:
    server = gpu_serve()
    client = Client(server.url)
    for path, body in (
        ("/v1/chat/completions", chat_body("a", IGNORED, 8)),
        ("/v1/completions", {"model": "a", "prompt": IGNORED, "max_tokens": 8}),
        ("/v1/embeddings", {"model": "e", "input": IGNORED}),
        ("/v1/chat/completions", chat_body(IGNORED, IGNORED, 8)),
        ("/v1/chat/completions", {**chat_body("a", "x", 8), "messages": IGNORED}),
    ):
        await client.post(path, body)
    assert (await client.chat("a", tokens=8)).ok
    assert server._process is not None
    assert server._process.poll() is None
    assert "GPU fault" not in server.log
