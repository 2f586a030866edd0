"""Changes that a next release may well bring, and which features are off for each.

Written by hand, one or more for each kind of row and each thing that a row can ask for;
the last test holds that to be so. On the stand-in, or on the ``--omlx-src``.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import standin
from omlx_admission.hooks import install
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.gpu import sites as gpu_sites
from omlx_admission.hooks.install import State
from omlx_admission.hooks.patching import bodies, gate
from omlx_admission.hooks.patching.gate import Kind, Need
from tests.hooks.drift import ALL, Edit, drifted

#: Seconds; the sources of a real oMLX are ten times the stand-in's.
pytestmark = pytest.mark.timeout(300)

POOL, CORE, VLM = "engine_pool.py", "engine_core.py", "engine/vlm.py"
QUEUE = {"queue", "unloads", "stream_hold", "prompt_guard"}
PATH = {"resident", "leases", "off_loop_close", "dead_engines"}
GPU = {"gpu_turn", "exposure", "gpu_lockout", "gpu_stuck_exit"}
EVERYTHING = {f.name for f in FEATURES if getattr(ALL, f.field)}


def method(name: str, head: str = "async def") -> str:
    """A regular expression of the first words of a method."""
    return rf"(?m)^    {head} {name}\("


HARMLESS: dict[str, Edit] = {
    "a parameter with a default more, passed through": (
        POOL,
        r"async def _unload_engine\(self, model_id: str\)",
        "async def _unload_engine(self, model_id: str, *, reason: str | None = None)",
    ),
    "a dict made by its type": (
        POOL,
        r"_entries: dict\[str, EngineEntry\] = \{\}",
        "_entries: dict[str, EngineEntry] = dict()",
    ),
    "an older union": (
        POOL,
        r"def _find_lru_victim\(self\) -> str \| None",
        'def _find_lru_victim(self) -> Optional["str"]',
    ),
    "another import of futures": (
        CORE,
        r"def get_mlx_executor\(\) -> concurrent\.futures\.ThreadPoolExecutor",
        "def get_mlx_executor() -> futures.ThreadPoolExecutor",
    ),
    "a narrower dict": (
        "settings.py",
        r"(class SchedulerSettings[\s\S]*?def to_dict\(self\)) -> dict\[str, Any\]",
        r"\1 -> dict[str, bool | int | str | None]",
    ),
    "no annotation": (
        POOL,
        r"def _find_lru_victim\(self\) -> str \| None",
        r"def _find_lru_victim(self)",
    ),
    "an import that may fail": (
        CORE,
        r"(?m)^import mlx\.core as mx$",
        "try:\n    import mlx.core as mx\nexcept ImportError:\n    mx = None",
    ),
    "a decorator that changes nothing": (
        POOL,
        method("_find_lru_victim", "def"),
        "    @override\n    def _find_lru_victim(",
    ),
    "a decorator of our own changes": (
        POOL,
        r"(?m)^(class EnginePool\b)([\s\S]*?)    async def get_engine\(",
        r"from .admission.gate import noticed\n\n\n\1\2    @noticed\n    async def get_engine(",
    ),
    "an optional method less": (POOL, r"\brequest_unload\b", "ask_for_unload"),
    "an attribute less that is read only where it is": (
        "scheduler.py",
        r"\bprefilling\b",
        "in_prefill",
    ),
    "a body that nobody has run": (
        POOL,
        r"(def _find_lru_victim\([^\n]*\n)",
        r"\1        self._searches = 1\n",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_turns_nothing_off(omlx_found: gate.Found, name: str) -> None:
    with drifted(omlx_found.root, HARMLESS[name]) as source:
        report = install.decide(source, ALL)
    wanted = [v for v in report.verdicts if v.feature.name in EVERYTHING]
    assert {v.feature.name: v.reasons for v in wanted if v.reasons} == {}


#: What is off, the reason that one of them gives, and the change.
OFF: dict[str, tuple[set[str], str, Edit]] = {
    "a parameter renamed": (
        QUEUE | PATH,
        "EnginePool.get_engine takes (model_id, force_lm=False, lease=False",
        (POOL, r"\b_lease\b", "lease"),
    ),
    "a parameter more where every one counts": (
        QUEUE | PATH,
        "expected no more than",
        (
            POOL,
            r"(async def get_engine\([\s\S]*?runtime_settings: [^\n,)]*),?",
            r"\1, nice: int = 0,",
        ),
    ),
    "the parameter that the wrapper of a load reads, renamed": (
        QUEUE | {"surfaces"},
        "EnginePool._load_engine takes (name",
        (POOL, r"(async def _load_engine\(\s*self,\s*)model_id: str", r"\1name: str"),
    ),
    "a parameter more without a default": (
        QUEUE | PATH | {"surfaces"},
        "requires the unknown (reason)",
        (
            POOL,
            r"async def _unload_engine\(self, model_id: str\)",
            "async def _unload_engine(self, model_id: str, reason: str)",
        ),
    ),
    "a parameter less": (
        QUEUE,
        "get_settings takes ()",
        (
            "model_settings.py",
            r"def get_settings\(self, model_id: str\)",
            "def get_settings(self)",
        ),
    ),
    "a parameter by keyword only": (
        QUEUE,
        "get_settings takes (model_id), expected (model_id)",
        (
            "model_settings.py",
            r"def get_settings\(self, model_id: str\)",
            "def get_settings(self, *, model_id: str)",
        ),
    ),
    "another default": (
        QUEUE | PATH,
        "force_lm=True",
        (POOL, r"(async def get_engine\([\s\S]*?force_lm: bool = )False", r"\1True"),
    ),
    "a coroutine made a function": (
        QUEUE | PATH,
        "unload_if_idle_unpinned is a function, expected a coroutine function",
        (POOL, "async def unload_if_idle_unpinned", "def unload_if_idle_unpinned"),
    ),
    "a function made a coroutine": (
        QUEUE | {"surfaces"},
        "has_active_requests is a coroutine function, expected a function",
        (
            "engine/base.py",
            r"(?m)^    def has_active_requests",
            "    async def has_active_requests",
        ),
    ),
    "a function made a generator": (
        GPU,
        "_step_burst is a generator function, expected a function",
        (CORE, r"(def _step_burst\([^\n]*\n)", r"\1        yield\n"),
    ),
    "a generator made a coroutine": (
        {"stream_hold"},
        "expected a asynchronous generator function",
        (
            "server.py",
            r"(async def _with_sse_keepalive\()",
            "async def _with_sse_keepalive(generator, http_request, interval=5.0):\n"
            "    return generator\n\n\nasync def _frames(",
        ),
    ),
    "a class method made a method": (
        {"gpu_setting"},
        "from_dict is a function, expected a class method",
        (
            "settings.py",
            r"(class SchedulerSettings[\s\S]*?)    @classmethod\n(    def from_dict)",
            r"\1\2",
        ),
    ),
    "a method made a property": (
        QUEUE | {"surfaces"},
        "_current_ceiling is decorated by property",
        (POOL, method("_current_ceiling", "def"), "    @property\n    def _current_ceiling("),
    ),
    "a method by another name": (
        QUEUE,
        "EnginePool._find_lru_victim is missing",
        (POOL, r"\b_find_lru_victim\b", "_find_victim"),
    ),
    "a method of a new base": (
        QUEUE,
        "_find_lru_victim is missing; _find_lru_victim is in omlx.engine_pool:_Base",
        (
            POOL,
            r"(?s)\nclass EnginePool:\n(.*?)\n    def _find_lru_victim\(self\)",
            r"\nclass _Base:\n    def _find_lru_victim(self):\n        return None\n\n\n"
            r"class EnginePool(_Base):\n\1\n    def _victim(self)",
        ),
    ),
    "a method under a condition": (
        QUEUE,
        "_find_lru_victim is there only under a condition",
        (
            POOL,
            r"(?m)^    def _find_lru_victim\(self\) -> str \| None:$",
            "    if SEARCH:\n        def _find_lru_victim(self) -> str | None:\n"
            "            return None\n\n    def _victim(self):",
        ),
    ),
    "a method for type checkers only": (
        QUEUE,
        "_find_lru_victim is missing",
        (
            POOL,
            r"(?m)^    def _find_lru_victim\(self\) -> str \| None:$",
            "    if TYPE_CHECKING:\n        def _find_lru_victim(self) -> str | None:\n"
            "            return None\n\n    def _victim(self):",
        ),
    ),
    "a method replaced after its class": (
        QUEUE,
        "_find_lru_victim is a module or class attribute",
        (POOL, "", "EnginePool._find_lru_victim = traced(EnginePool._find_lru_victim)"),
    ),
    "a method replaced by setattr": (
        QUEUE,
        "_find_lru_victim is replaced at line",
        (POOL, "", "setattr(EnginePool, '_find_lru_victim', None)"),
    ),
    "a method defined again": (
        QUEUE,
        "_find_lru_victim returns int, expected str | None",
        (
            POOL,
            method("_find_lru_victim", "def"),
            "    def _find_lru_victim(self) -> str | None:\n        return None\n\n"
            "    def _find_lru_victim(self) -> int:\n        return 0\n\n"
            "    def _victim(",
        ),
    ),
    "another answer": (
        QUEUE,
        "_mark_pending_unload_locked returns None, expected bool",
        (POOL, r"(def _mark_pending_unload_locked\([^)]*\)) -> bool", r"\1 -> None"),
    ),
    "one result of a burst": (
        GPU,
        "_step_burst returns BurstResult",
        (
            CORE,
            r"def _step_burst\(self\) -> [^:\n]+(?=:\n)",
            "def _step_burst(self) -> BurstResult",
        ),
    ),
    "leases as a set": (
        QUEUE | PATH | {"surfaces"},
        "in_use is of type set[str], expected int",
        (POOL, r"\n    in_use: int = 0", "\n    in_use: set[str] = field(default_factory=set)"),
    ),
    "a lock of threads": (
        QUEUE | PATH,
        "_lock is of type threading.Lock, expected asyncio.Lock",
        (POOL, r"self\._lock = asyncio\.Lock\(\)", "self._lock = threading.Lock()"),
    ),
    "an attribute by another name": (
        QUEUE | {"errors", "surfaces"},
        "EnginePool._process_memory_enforcer is missing",
        (POOL, r"\b_process_memory_enforcer\b", "_memory_enforcer"),
    ),
    "a field by another name": (
        QUEUE,
        "EngineEntry.model_id is missing",
        (POOL, r"\n    model_id: str\b", "\n    id: str"),
    ),
    "an attribute that is only annotated": (
        QUEUE | PATH,
        "EnginePool._lock is missing",
        (POOL, r"self\._lock = asyncio\.Lock\(\)", "self._lock: asyncio.Lock"),
    ),
    "another base of an error": (
        QUEUE | {"errors"},
        "ModelBusyError is a kind of (OMLXError), expected (EnginePoolError)",
        (
            "exceptions.py",
            r"class ModelBusyError\(EnginePoolError\)",
            "class ModelBusyError(OMLXError)",
        ),
    ),
    "a class with slots": (
        {"gpu_turn", "gpu_stuck_exit"},
        "Scheduler has slots",
        ("scheduler.py", r"(?m)^(class Scheduler:\n)", "\\1    __slots__ = ('running',)\n\n"),
    ),
    "a class that something else makes": (
        QUEUE | PATH | {"surfaces"},
        "the class EngineEntry is decorated by define(slots=True)",
        (POOL, r"(?m)^@dataclass\nclass EngineEntry", "@define(slots=True)\nclass EngineEntry"),
    ),
    "a class imported from elsewhere": (
        {"gpu_setting"},
        "omlx.settings:SchedulerSettings may come from omlx.parts",
        (
            "settings.py",
            r"(?m)^(@dataclass\n)class SchedulerSettings\b",
            "from omlx.parts import SchedulerSettings\n\n\n\\1class _Settings",
        ),
    ),
    "MLX by another name": (
        {"exposure", "gpu_lockout"},
        "omlx.engine_core:mx is missing",
        (CORE, r"\bmx\b(?!\.core|_)", "mx_core"),
    ),
    "a step that goes another way": (
        {"load_thread"},
        "omlx.engine.vlm does not use _load_vlm_sync",
        (VLM, r"\b_load_vlm_sync\b", "_load_weights"),
    ),
    "another job of a load": (
        {"load_thread"},
        "omlx.engine.batched hands the unknown fuse to get_mlx_executor",
        (
            "engine/batched.py",
            r"(async def start\(self\) -> None:\n)",
            r"\1        await loop.run_in_executor(get_mlx_executor(), fuse, self)\n",
        ),
    ),
    "an optional method of another colour": (
        QUEUE | PATH,
        "request_unload is a function, expected a coroutine function",
        (POOL, r"async def request_unload", "def request_unload"),
    ),
    "a stop that nobody has run": (
        {"off_loop_close"},
        "BatchedEngine.stop has a body that was never run",
        (
            "engine/batched.py",
            r"(async def stop\(self\) -> None:\n)",
            r"\1        asyncio.get_running_loop()\n",
        ),
    ),
    "a module that cannot be parsed": (
        {"gpu_setting"},
        "omlx.settings cannot be parsed",
        ("settings.py", "", "def ("),
    ),
    "a module that is gone": (
        QUEUE | {"surfaces"},
        "omlx.utils.proc_memory is missing",
        ("utils/proc_memory.py", "", None),
    ),
    "a release that does not say which": (
        EVERYTHING,
        "could not be read",
        ("_version.py", "", None),
    ),
    "a release that is not supported": (
        EVERYTHING,
        "oMLX 0.8.0 is outside the supported range",
        ("_version.py", r'__version__ = "[^"]*"', '__version__ = "0.8.0"'),
    ),
}


@pytest.mark.parametrize("name", OFF)
def test_what_a_hook_cannot_live_with_turns_it_off(omlx_found: gate.Found, name: str) -> None:
    expected, reason, edit = OFF[name]
    with drifted(omlx_found.root, edit) as source:
        report = install.decide(source, ALL)
    refused = {v.feature.name for v in report.verdicts if v.state is State.REFUSED}
    assert refused == expected, {v.feature.name: v.reasons for v in report.verdicts}
    wanted = [v for v in report.verdicts if v.feature.name in EVERYTHING]
    assert {v.state for v in wanted} <= {State.READY, State.REFUSED}
    assert any(reason in text for v in report.verdicts for text in v.reasons), [
        text for v in report.verdicts for text in v.reasons
    ]


@pytest.mark.slow
def test_each_kind_of_row_and_each_thing_that_a_row_asks_for_has_a_drift() -> None:
    root = standin.PATH / "omlx"
    rows = list(dict.fromkeys(need for f in FEATURES for need in f.needs))
    hit = set[Need]()
    for _, _, edit in OFF.values():
        module = "omlx." + edit[0].removesuffix(".py").replace("/", ".")
        with drifted(root, edit) as source:
            code = gate.Source(gate.find(source))
            here = [need for need in rows if need.module == module]
            hit |= {need for need in here if code.problem(need) is not None}
    # Only the list of GPU sites has one of these.
    assert {need.kind for need in hit} == {*Kind} - {Kind.GENERATOR}
    plain = Need("", "", Kind.NAME)
    asked = [f.name for f in fields(Need) if f.name not in ("module", "name", "kind")]
    for name in asked:
        assert any(getattr(need, name) != getattr(plain, name) for need in hit), name


def test_a_body_that_changes_is_named_and_its_layout_is_not(
    omlx_found: gate.Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this oMLX's own bodies in the place of the table's."""
    before = gate.Source(omlx_found)
    table = {name: before.fingerprint(name) for name in bodies.known()}
    monkeypatch.setattr(bodies, "known", lambda: {n: {b: ()} for n, b in table.items() if b})
    assert before.never_run() == []
    edits: tuple[Edit, ...] = (
        (POOL, r"(def _find_lru_victim\([^\n]*\n)", r"\1        self._searches = 1\n"),
        (POOL, r"(async def release_engine\()", r"# said otherwise\n    \1"),
        (POOL, r"(def discover_models\([\s\S]*?\) -> None:\n)", r"\1\n        # later\n\n"),
    )
    with drifted(omlx_found.root, *edits) as source:
        assert gate.Source(gate.find(source)).never_run() == [
            "omlx.engine_pool:EnginePool._find_lru_victim"
        ]


def test_an_engine_whose_job_is_not_known_is_not_said_to_be_covered() -> None:
    def embedding(source: Path) -> gpu_sites.Site:
        sites = gpu_sites.present(gate.Source(gate.find(source)))
        return next(site for site in sites if site.name == "embedding")

    edit = ("engine/embedding.py", r"\b_embed_sync\b", "_embed_on_thread")
    with drifted(standin.PATH / "omlx", edit) as source:
        site = embedding(source)
    assert not site.covered
    assert "hands the unknown _embed_on_thread" in site.note
    assert embedding(standin.PATH).covered
