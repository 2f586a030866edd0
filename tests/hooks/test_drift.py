"""Changes that a next release may well bring, and what has to be off for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.mutations import suite
from benchmarks.mutations.model import Mutation, none
from omlx_admission import standin
from omlx_admission.hooks import gate, gpu_sites, install
from omlx_admission.hooks.install import State

ROOT = standin.PATH / "omlx"
ALL = suite.SETTINGS

POOL = "engine_pool.py"
QUEUE = {"queue", "unloads", "stream_hold"}
PATH = {"resident", "leases", "off_loop_close", "dead_engines"}


@pytest.fixture(scope="module")
def checkout() -> Iterator[suite.Checkout]:
    with suite.checkout(ROOT) as made, suite.quick_judging():
        yield made


def drift(*edits: tuple[str, str, str]) -> Mutation:
    """Edits by regular expression: (file, what, by what)."""
    files: dict[str, str | None] = {}
    for path, old, new in edits:
        text, count = re.subn(old, new, files.get(path) or (ROOT / path).read_text("utf-8"))
        assert count, f"{old} is not in {path}"
        files[path] = text
    return Mutation("drift", edits[0][0], files, none)


HARMLESS = {
    "a reason for unloads": (
        POOL,
        r"async def _unload_engine\(self, model_id: str\)",
        "async def _unload_engine(self, model_id: str, *, reason: str | None = None)",
    ),
    "a generic dict": (
        POOL,
        r"_entries: dict\[str, EngineEntry\] = \{\}",
        "_entries: dict[str, EngineEntry] = dict[str, EngineEntry]()",
    ),
    "an older union": (
        POOL,
        r"def _find_lru_victim\(self\) -> str \| None",
        'def _find_lru_victim(self) -> Optional["str"]',
    ),
    "another import of futures": (
        "engine_core.py",
        r"def get_mlx_executor\(\) -> concurrent\.futures\.ThreadPoolExecutor",
        "def get_mlx_executor() -> futures.ThreadPoolExecutor",
    ),
    "a narrower dict": (
        "settings.py",
        r"(class SchedulerSettings[\s\S]*?def to_dict\(self\)) -> dict\[str, Any\]",
        r"\1 -> dict[str, bool | int | str | None]",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_turns_nothing_off(checkout: suite.Checkout, name: str) -> None:
    with checkout.changed(drift(HARMLESS[name])) as source:
        report = install.decide(source, ALL)
    assert {v.feature.name: v.reasons for v in report.verdicts if v.reasons} == {}


OFF = {
    "a priority for requests": (
        {*QUEUE, *PATH},
        (
            POOL,
            r"(async def get_engine\([\s\S]*?runtime_settings: [^\n,)]*),?",
            r"\1, nice: int = 0,",
        ),
    ),
    "leases as a set": (
        {*QUEUE, *PATH, "surfaces"},
        (POOL, r"\n    in_use: int = 0", "\n    in_use: set[str] = field(default_factory=set)"),
    ),
    "an entry's id": (QUEUE, (POOL, r"\n    model_id: str\b", "\n    id: str")),
    "the enforcer's name": (
        {*QUEUE, "errors", "surfaces"},
        (POOL, r"\b_process_memory_enforcer\b", "_memory_enforcer"),
    ),
    "a mark that says nothing": (
        QUEUE,
        (POOL, r"(def _mark_pending_unload_locked\([^)]*\)) -> bool", r"\1 -> None"),
    ),
    "an idle unload without an await": (
        {*QUEUE, *PATH},
        (POOL, "async def unload_if_idle_unpinned", "def unload_if_idle_unpinned"),
    ),
    "memory of one process": (
        {*QUEUE, "surfaces"},
        (
            "utils/proc_memory.py",
            r"def get_phys_footprint\([^)]*\)",
            "def get_phys_footprint(pid)",
        ),
    ),
    "settings by another name": (
        QUEUE,
        ("model_settings.py", "def get_settings", "def settings_for"),
    ),
    "one result of a burst": (
        {"gpu_turn", "exposure", "gpu_lockout"},
        (
            "engine_core.py",
            r"def _step_burst\(self\) -> list\[SchedulerOutput\]",
            "def _step_burst(self) -> BurstResult",
        ),
    ),
    "MLX by another name": (
        {"exposure", "gpu_lockout"},
        ("engine_core.py", r"\bmx\b(?!\.core|_)", "mx_core"),
    ),
    "tokens by another name": (
        {"exposure", "gpu_lockout"},
        ("request.py", r"\bnum_prompt_tokens\b", "prompt_length"),
    ),
    "another load": (
        {"load_thread"},
        (
            "engine/batched.py",
            r"\n( *)(await loop\.run_in_executor\(get_mlx_executor\(\), materialize)",
            r"\n\1await loop.run_in_executor(get_mlx_executor(), fuse, self._model)\n\1\2",
        ),
    ),
    "the core by another name": (
        {"off_loop_close", "dead_engines"},
        ("engine/batched.py", r"\bself\._engine\b", "self._core"),
    ),
    "an embedder by another name": (
        {"gpu_turn"},
        ("models/embedding.py", r"\bMLXEmbeddingModel\b", "EmbeddingModel"),
    ),
}


@pytest.mark.parametrize("name", OFF)
def test_what_a_hook_cannot_live_with_turns_it_off(checkout: suite.Checkout, name: str) -> None:
    expected, edit = OFF[name]
    with checkout.changed(drift(edit)) as source:
        report = install.decide(source, ALL)
    refused = {v.feature.name for v in report.verdicts if v.state is State.REFUSED}
    assert refused == expected
    assert {v.state for v in report.verdicts} == {State.READY, State.REFUSED}


def test_an_engine_whose_job_is_not_known_is_not_said_to_be_covered(
    checkout: suite.Checkout,
) -> None:
    def embedding(source: Path) -> gpu_sites.Site:
        sites = gpu_sites.present(gate.Source(gate.find(source)))
        return next(site for site in sites if site.name == "embedding")

    edit = ("engine/embedding.py", r"\b_embed_sync\b", "_embed_on_thread")
    with checkout.changed(drift(edit)) as source:
        site = embedding(source)
    assert not site.covered
    assert "hands the unknown _embed_on_thread" in site.note
    assert embedding(standin.PATH).covered
