"""Gate, ledger and switches: all of a feature or none, and stock comes back whole."""

from __future__ import annotations

import gc
import importlib.machinery
import logging
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from omlx_admission.core.request import Handling
from omlx_admission.hooks import install
from omlx_admission.hooks.features import FEATURES, PARTS
from omlx_admission.hooks.gpu import jobs as gpu_jobs
from omlx_admission.hooks.gpu import shared as gpu_shared
from omlx_admission.hooks.gpu import watch as gpu_watch
from omlx_admission.hooks.install import State
from omlx_admission.hooks.patching import gate
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.hooks.patching.switches import Switches, switches
from omlx_admission.hooks.pool import resident
from omlx_admission.observation import observe
from omlx_admission.settings import Settings
from tests.hooks.drift import drifted

POOL_METHODS = (
    "get_engine",
    "release_engine",
    "_release_engine_lease",
    "_unload_engine",
    "_load_engine",
    "_find_lru_victim",
    "discover_models",
    "shutdown",
)


_installers: list[install.Installer] = []


@pytest.fixture
def pool_class() -> Iterator[type]:
    import omlx.engine_pool

    before = dict(vars(omlx.engine_pool.EnginePool))
    yield omlx.engine_pool.EnginePool
    while _installers:
        _installers.pop().undo()
    assert dict(vars(omlx.engine_pool.EnginePool)) == before


def installer(**values: Any) -> install.Installer:
    one = install.Installer(install.decide(settings=Settings(**values)))
    _installers.append(one)
    return one


def applied(**values: Any) -> install.Installer:
    """The pool's module has been imported."""
    import omlx.engine_pool

    one = installer(**values)
    one.on_import(omlx.engine_pool)
    return one


def parts_with(apply: Any, instead: Any) -> tuple[Part, ...]:
    """The register with another function in the place of ``apply``."""
    return tuple(replace(p, apply=instead) if p.apply is apply else p for p in PARTS)


def wrapped(pool_class: type) -> set[str]:
    return {
        name for name in POOL_METHODS if hasattr(vars(pool_class).get(name), "_self_wrapper")
    }


@pytest.mark.parametrize("on", [True, False])
def test_the_decision_leaves_garbage_collection_as_it_was(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    during = []
    judge = gate.Source.problem

    def problem(self: gate.Source, need: gate.Need) -> str | None:
        during.append(gc.isenabled())
        return judge(self, need)

    monkeypatch.setattr(gate.Source, "problem", problem)
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        install.decide()
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
    assert during
    assert not any(during)


def test_a_resident_model_binds_nothing_that_lies_below_its_wrapper(pool_class: type) -> None:
    """Every wrapper that is bound to the pool costs a request as much as its checks do."""
    applied()
    below = vars(pool_class)["get_engine"].__wrapped__
    assert type(below) is types.FunctionType
    assert hasattr(below.__wrapped__, "_self_wrapper"), "the queue lies below"


def test_undo_puts_the_raw_originals_and_every_switch_back(pool_class: type) -> None:
    """Of the pool's class the fixture looks at everything."""

    def state(of: Switches) -> dict[str, Any]:
        plain = {n: getattr(of, n) for n in Switches.__slots__ if n != "handling"}
        return plain | {n: getattr(of.handling, n) for n in Handling.__slots__}

    off = state(Switches())
    one = applied()
    assert wrapped(pool_class) >= {"get_engine", "_unload_engine", "_find_lru_victim"}
    on = {name for name, value in state(switches).items() if value != off[name]}
    assert on >= {"pacing", "keeping", "marks", "counts_waits"}
    observe.observer.register_section("mine", lambda: 1)
    one.undo()
    assert state(switches) == off
    assert observe.observer.sections() == {}


def test_a_second_import_event_wraps_nothing_twice(pool_class: type) -> None:
    import omlx.engine_pool

    one = applied()
    first = vars(pool_class)["get_engine"]
    one.on_import(omlx.engine_pool)
    assert vars(pool_class)["get_engine"] is first


@pytest.mark.parametrize(
    ("off", "free"),
    [
        ({"resident_path": False}, set()),
        ({"queue": False}, {"_find_lru_victim", "discover_models"}),
        (
            {
                "queue": False,
                "surfaces": False,
                "exposure": False,
                "exit_on_gpu_lockout": False,
            },
            {"_find_lru_victim", "_load_engine", "discover_models"},
        ),
        ({"enabled": False}, set(POOL_METHODS)),
        ({f.field: False for f in FEATURES if f.field != "enabled"}, set(POOL_METHODS)),
    ],
)
def test_each_feature_can_be_off(
    pool_class: type, off: dict[str, bool], free: set[str]
) -> None:
    report = applied(**off).report
    assert not wrapped(pool_class) & free
    for verdict in report.verdicts:
        variable, on = verdict.feature.variable, report.settings.enabled
        if verdict.feature.field in off or not on:
            assert verdict.state is State.OFF
            assert verdict.reasons[0].startswith(variable if on else "OMLX_ADMISSION")


def test_a_failing_part_takes_everything_back(
    pool_class: type, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing = mocker.Mock(side_effect=ZeroDivisionError)
    mocker.patch.object(install, "PARTS", parts_with(resident.apply_outer, failing))
    report = applied().report
    assert wrapped(pool_class) == set()
    assert report.verdict("resident").state is State.FAILED
    assert "applying 'resident' failed" in caplog.text


def test_a_failing_optional_part_takes_back_what_it_has_done_itself(
    pool_class: type, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import omlx.engine_core
    import omlx.engine_pool
    import omlx.models.embedding
    import omlx.scheduler

    kept = dict(vars(omlx.models.embedding.MLXEmbeddingModel))
    undone: list[str] = []

    def half(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
        ledger.changed("it", "half", lambda: undone.append("it"))
        ledger.wrap(module, "MLXEmbeddingModel.embed", gpu_shared.embed)
        ledger.wrap(module, "MLXEmbeddingModel.gone", gpu_shared.embed)

    mocker.patch.object(install, "PARTS", parts_with(gpu_shared.apply_embedding, half))
    one = installer(serialize_engine_gpu=True)
    core = vars(omlx.engine_core.EngineCore)
    for module in (omlx.scheduler, omlx.engine_core, omlx.engine_pool, omlx.models.embedding):
        one.on_import(module)
    assert dict(vars(omlx.models.embedding.MLXEmbeddingModel)) == kept
    assert undone == ["it"]
    assert hasattr(core["_step_burst"], "_self_wrapper")
    assert "get_engine" in wrapped(pool_class)
    verdict = one.report.verdict("gpu_turn")
    assert verdict.state is State.APPLIED
    assert verdict.reasons == ["goes without its part in omlx.models.embedding"]
    assert "omlx.models.embedding has no MLXEmbeddingModel.gone" in caplog.text


def test_a_class_that_has_moved_away_leaves_every_feature_on(
    pool_class: type, caplog: pytest.LogCaptureFixture
) -> None:
    import omlx.engine_core
    import omlx.engine_pool
    import omlx.scheduler

    one = installer(serialize_engine_gpu=True, load_thread=True)
    modules = [omlx.scheduler, omlx.engine_core, omlx.engine_pool]
    names = ("omlx.engine.vlm", "omlx.engine.dflash", gpu_jobs.EMBEDDING, gpu_jobs.RERANKER)
    modules += [types.ModuleType(name) for name in names]
    modules += [types.ModuleType(gpu_jobs.DIFFUSION), types.ModuleType(gpu_watch.MTP)]
    mark = {v.feature.name for v in one.report.verdicts if v.state is State.READY}
    for module in modules:
        one.on_import(module)
    states = {v.feature.name: v.state for v in one.report.verdicts}
    assert {name for name in mark if states[name] is State.FAILED} == set()
    # Its needs name the class; the others only take it where it is.
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert said == ["admission: 'off_loop_close' goes without its part in omlx.engine.vlm"]


def test_the_reason_of_a_failure_is_no_word_about_circular_imports(
    pool_class: type, mocker: Any
) -> None:
    def outer(_module: Any, _ledger: Ledger, _wanted: Wanted) -> None:
        spec = importlib.machinery.ModuleSpec("omlx.half", None)
        half = types.ModuleType("omlx.half")
        half.__spec__ = spec
        spec._initializing = True  # type: ignore[attr-defined]
        half.Gone  # noqa: B018

    mocker.patch.object(install, "PARTS", parts_with(resident.apply_outer, outer))
    report = applied().report
    reason = "applying 'resident' raised AttributeError: omlx.half has no Gone"
    assert report.verdict("resident").reasons == [reason]
    assert report.verdict("queue").reasons == [reason]


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        (
            {"queue": False},
            {"unloads": "needs our 'queue' (off)", "stream_hold": "needs our 'queue' (off)"},
        ),
        ({"resident_path": False}, {"off_loop_close": "needs our 'resident' (off)"}),
        (
            {"queue": False, "resident_path": False},
            {"leases": "needs our 'resident' (off) or our 'queue' (off)"},
        ),
    ],
)
def test_what_stands_on_a_feature_is_off_with_it(
    off: dict[str, bool], expected: dict[str, str]
) -> None:
    report = install.decide(settings=Settings(**off))
    for name, reason in expected.items():
        verdict = report.verdict(name)
        assert (verdict.state, verdict.reasons) == (State.OFF, [reason])
    assert report.verdict("requests").state is State.READY


def test_undo_leaves_what_another_tool_wrapped_since(
    pool_class: type, caplog: pytest.LogCaptureFixture
) -> None:
    raw = vars(pool_class)["_find_lru_victim"]
    one = applied()
    theirs = lambda self: None  # noqa: E731
    pool_class._find_lru_victim = theirs  # type: ignore[attr-defined]
    try:
        one.undo()
        assert vars(pool_class)["_find_lru_victim"] is theirs
        assert "_find_lru_victim" in caplog.text
    finally:
        pool_class._find_lru_victim = raw  # type: ignore[attr-defined]


def test_an_omlx_with_a_resident_path_of_its_own_runs_it(omlx_found: gate.Found) -> None:
    native = "class EnginePool:\n    _unloading_models = None\n"
    native += "    def _acquire_loaded_engine(self):\n        return None\n"
    with drifted(omlx_found.root, ("engine_pool.py", "class EnginePool:", native)) as source:
        verdict = install.decide(source, Settings()).verdict("resident")
    assert verdict.state is State.NATIVE


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.5.0", None),
        ("0.6.3rc2", None),
        ("0.7.0.dev3", None),
        ("0.7.1", None),
        ("0.4.9", "outside the supported range"),
        ("0.8.0rc1", "outside the supported range"),
        ("next", "not a version number"),
    ],
)
def test_prereleases_are_releases_of_the_range(version: str, problem: str | None) -> None:
    found = gate.version_problem(version)
    assert problem in found if problem else found is None


def test_strict_refuses_to_start(mocker: Any, pool_class: type) -> None:
    mocker.patch.object(gate, "version_problem", return_value="too new")
    with pytest.raises(SystemExit, match="too new"):
        applied(strict=True)


def test_a_refused_feature_is_said_in_one_line(
    mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mocker.patch.object(gate, "version_problem", return_value="oMLX 9 is outside")
    with caplog.at_level(logging.WARNING, "omlx.admission"):
        install._announce(install.decide(settings=Settings()))
    assert [r.getMessage() for r in caplog.records] == [
        "admission: not active, oMLX runs stock: oMLX 9 is outside"
    ]
