"""The queue itself, as a package that nothing uses yet."""

from __future__ import annotations

from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.upstream import package
from omlx_admission.upstream.change import Change

CHANGE = Change(
    name="admission-queue",
    title="feat(pool): add a queue that decides which model is loaded next",
    message="""
Nothing keeps the order of requests for models that are not loaded. Each tries
for itself, and is refused while the loaded model has a request.

omlx/admission/ decides in one step, from a view of the pool, which model takes
no new requests, which one leaves, what is loaded next and which request is
refused. The decisions are plain functions without a clock; one module carries
them out and waits. It talks to the pool by a port, and nothing calls it yet.
""",
    issues=(1970,),
    features=(),
    native=(Need("omlx.admission.pool.admission", "PoolAdmission", Kind.CLASS),),
    edits={},
    modules=package.copied(
        "admission",
        "pool.admission",
        "pool.places",
        "pool.port",
        "footprint",
        "load_work",
        "variables",
    ),
    copied_tests=package.tests(
        "benchmarks/simulation/contract.py",
        "benchmarks/simulation/sim_types.py",
        "benchmarks/simulation/world.py",
        "tests/policy/test_admission.py",
        "tests/policy/test_cancel_windows.py",
        "tests/policy/test_parking.py",
    ),
)
