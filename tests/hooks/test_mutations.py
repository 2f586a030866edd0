"""Drift: what oMLX may change, and what the gate says to it.

A sample of ``benchmarks.mutations`` with every kind of change in it; the command runs
them all, and whole servers on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutations import suite
from benchmarks.mutations.model import Mutation
from omlx_admission.hooks import gate, install
from omlx_admission.hooks.features import MODULES
from omlx_admission.hooks.install import State

COUNT = 205

#: Seconds; the sources of a real oMLX are ten times the stand-in's.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def mutations(omlx_found: gate.Found) -> list[Mutation]:
    return suite.generate(omlx_found.root)


@pytest.fixture(scope="module")
def checkout(omlx_found: gate.Found) -> Iterator[suite.Checkout]:
    with suite.checkout(omlx_found.root) as made, suite.quick_judging():
        yield made


def test_exactly_what_needs_the_changed_thing_is_off(
    mutations: list[Mutation], checkout: suite.Checkout
) -> None:
    chosen = suite.sample(mutations, COUNT)
    assert len(chosen) >= 200
    assert {m.kind for m in chosen} == {m.kind for m in mutations}
    wrong = []
    for mutation in chosen:
        with checkout.changed(mutation) as source:
            outcome, _ = suite.judge(source, mutation)
        wrong += [f"{mutation.name}: {text}" for text in outcome.wrong]
    assert wrong == []


def test_what_is_applied_in_ci_has_a_class_of_each_module_in_it(
    mutations: list[Mutation],
) -> None:
    """A hook that cannot do without its class is found out where the class is gone."""
    classes = {m.target for m in mutations if m.kind == "class removed"}
    modules = {target.partition(":")[0] for target in classes} & {*MODULES}
    assert {"omlx.engine.vlm", "omlx.models.embedding", "omlx.engine_pool"} <= modules
    chosen = suite.sample(mutations, APPLIED)
    renamed = {
        m.target.partition(":")[0]
        for m in chosen
        if m.kind == "renamed everywhere" and m.target in classes
    }
    assert renamed & modules == modules
    whole = {m.target.partition(":")[0] for m in chosen if m.kind.startswith("harmless")}
    assert whole >= modules
    assert len({m.kind for m in chosen}) > APPLIED / 2


def test_the_checkout_is_as_it_was_between_two_mutations(
    mutations: list[Mutation], checkout: suite.Checkout
) -> None:
    module = next(m for m in mutations if m.kind == "module made a package that passes on")
    with checkout.changed(module):
        pass
    states = {v.state for v in install.decide(checkout.source, suite.SETTINGS).verdicts}
    assert states == {State.READY}
    left = {p.relative_to(checkout.root) for p in checkout.root.rglob("*.py")}
    assert left == {p.relative_to(checkout.original) for p in checkout.original.rglob("*.py")}


@pytest.mark.parametrize(
    ("piece", "kind", "target"),
    [
        ("shape_problem", "decorated by property", "omlx.engine_pool:EnginePool.get_engine"),
        ("holder_problem", "class decorated", "omlx.engine_pool:EngineEntry"),
    ],
)
def test_a_gate_that_overlooks_is_found_out(
    piece: str,
    kind: str,
    target: str,
    mutations: list[Mutation],
    checkout: suite.Checkout,
    mocker: Any,
) -> None:
    mutation = next(m for m in mutations if (m.kind, m.target) == (kind, target))
    with checkout.changed(mutation) as source:
        assert suite.judge(source, mutation)[0].good
        mocker.patch.object(gate, piece, return_value=None)
        assert not suite.judge(source, mutation)[0].good


#: Kinds of change whose modules are imported and used in CI; the command takes all.
APPLIED = 40

#: A hook that raises where it must not, on modules that nobody has mutated.
_BROKEN = """
import sys, tempfile
from pathlib import Path
from benchmarks.mutations import apply, suite
from benchmarks.mutations.model import Mutation, none
from omlx_admission.hooks import install, resident
nothing = Mutation("nothing", "omlx.engine_pool", {}, none)
source = Path(sys.argv[1])
with apply.quiet(), tempfile.TemporaryDirectory() as folder:
    models = apply.models(Path(folder))
    report = install.decide(source, suite.SETTINGS)
    print(apply.compare(source, nothing, report, models))
    resident.hand_out = lambda *_: 1 / 0
    report = install.decide(source, suite.SETTINGS)
    print(apply.compare(source, nothing, report, models))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what is mutated may leave anything behind."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "OMLX_ADMISSION": "0"},
        check=False,
    )


def test_the_pool_works_on_with_the_hooks_in_mutated_modules(omlx_found: gate.Found) -> None:
    source = str(omlx_found.root.parent)
    done = run_python(
        "-m", "benchmarks.mutations", "--omlx-src", source, "--sample", str(APPLIED)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{APPLIED} mutations" in done.stdout


#: Stock and patched alike ask for a victim again and again, with no await between.
_ENDLESS = """
import sys, tempfile
from pathlib import Path
from benchmarks.mutations import apply, suite
from omlx_admission.hooks import gate
root = Path(sys.argv[1])
target = ("defined again below", "omlx.engine_pool:EnginePool._find_lru_victim")
mutation = next(m for m in suite.generate(root) if (m.kind, m.target) == target)
apply._STORY_CPU_S = 0.5
with (
    apply.quiet(),
    tempfile.TemporaryDirectory() as folder,
    suite.checkout(root) as made,
    made.changed(mutation) as source,
):
    models = apply.models(Path(folder))
    report = suite.judge(source, mutation)[1]
    print(apply._side(source, mutation, models, None))
    print(apply.compare(source, mutation, report, models))
"""


def test_a_mutation_that_computes_for_ever_ends(omlx_found: gate.Found) -> None:
    done = run_python("-W", "ignore", "-c", _ENDLESS, str(omlx_found.root))
    assert done.returncode == 0, done.stderr
    stock, compared = done.stdout.splitlines()
    assert "broke off: _Endless" in stock
    assert compared == "[]"


def test_a_wrong_patch_is_noticed(omlx_found: gate.Found) -> None:
    done = run_python("-c", _BROKEN, str(omlx_found.root.parent))
    assert done.returncode == 0, done.stderr
    whole, broken = done.stdout.splitlines()
    assert whole == "[]"
    assert "ZeroDivisionError" in broken


class TestWhereItIsNow:
    """A name that another module has: the reason says which."""

    @pytest.fixture
    def said(self, checkout: suite.Checkout, mutations: list[Mutation]) -> Any:
        def reasons(kind: str, target: str, feature: str) -> str:
            mutation = next(m for m in mutations if (m.kind, m.target) == (kind, target))
            with checkout.changed(mutation) as source:
                verdict = install.decide(source, suite.SETTINGS).verdict(feature)
            assert verdict.state is State.REFUSED
            return "; ".join(verdict.reasons)

        return reasons

    def test_a_module(self, said: Any) -> None:
        reasons = said("module moved", "omlx.engine_pool", "queue")
        assert "omlx.engine_pool is missing; EnginePool is in omlx.engine_pool_v2" in reasons

    def test_a_class(self, said: Any) -> None:
        reasons = said("moved, and imported back", "omlx.engine_pool:EnginePool", "resident")
        assert "EnginePool is in omlx.engine_pool_moved" in reasons

    def test_a_method_in_a_new_base(self, said: Any) -> None:
        name = "EnginePool._find_lru_victim"
        reasons = said("inherited from a new base", f"omlx.engine_pool:{name}", "queue")
        assert f"{name} is missing; _find_lru_victim is in" in reasons
        assert "omlx.engine_pool:_EnginePoolBase" in reasons

    def test_nothing_is_said_of_a_name_that_is_nowhere(self, said: Any) -> None:
        name = "omlx.engine_pool:EnginePool._find_lru_victim"
        reasons = said("renamed everywhere", name, "queue")
        assert f"{name} is missing" in reasons and " is in " not in reasons


def test_a_package_without_its_pool_is_an_omlx_still(tmp_path: Path) -> None:
    package = tmp_path / "omlx"
    package.mkdir()
    (package / "_version.py").write_text('__version__ = "0.7.0"\n')
    report = install.decide(tmp_path, suite.SETTINGS)
    assert report.found is not None
    assert report.verdict("queue").reasons[0] == "omlx.engine_pool is missing"
