"""What the gate reads of annotations, of jobs and of odd bindings in one source."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bodies as write
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.patching import bodies, gate
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.source import Module, is_one_of


@pytest.mark.parametrize(
    ("written", "wanted", "fits"),
    [
        ("str | None", "str | None", True),
        ("None | str", "str | None", True),
        ("Optional[str]", "str | None", True),
        ("typing.Optional['str']", "str | None", True),
        ("Union[str, None]", "str | None", True),
        ("'str | None'", "str | None", True),
        ("str", "str | None", False),
        ("Optional[bytes]", "str | None", False),
        ("futures.ThreadPoolExecutor", "ThreadPoolExecutor", True),
        ("ThreadPoolExecutor | None", "ThreadPoolExecutor", False),
        ("List[omlx.scheduler.SchedulerOutput]", "list[SchedulerOutput]", True),
        ("list[RequestOutput]", "list[SchedulerOutput]", False),
        ("list", "list[SchedulerOutput]", False),
        ("dict[str, bool | int | None]", "dict[...]", True),
        ("Dict", "dict[...]", True),
        ("dict[str, int] | None", "dict[...]", False),
        ("dict[str, int] | list[int]", "dict[...]", False),
        ("asyncio.Lock", "asyncio.Lock", True),
        ("threading.Lock", "asyncio.Lock", False),
        ("'not a type('", "str", False),
    ],
)
def test_annotations_are_compared_by_what_they_mean(
    written: str, wanted: str, fits: bool
) -> None:
    assert is_one_of(written, (wanted,)) is fits


JOBS = Need("omlx.x", "get", Kind.JOBS, jobs=("load", "materialize", "clear_cache"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("await loop.run_in_executor(get(), load)", None),
        ("await loop.run_in_executor(core.get(), self.load, 1)", None),
        ("await loop.run_in_executor(get(), partial(load, 1))", None),
        ("get().submit(load)", None),
        ("ours = get()\nours.submit(load)\nother.submit(print)", None),
        ("get().submit(lambda: (mx.synchronize(), mx.clear_cache()))", None),
        ("get().submit(lambda: fuse(model))", "omlx.x hands the unknown fuse to get"),
        (
            "loop.run_in_executor(get(), load)\nloop.run_in_executor(get(), fuse)",
            "omlx.x hands the unknown fuse to get",
        ),
        ("ours = get()\nours.submit(fuse)", "omlx.x hands the unknown fuse to get"),
        ("loop.run_in_executor(None, load)", "omlx.x hands no job to get"),
        ("from .core import get", "omlx.x hands no job to get"),
    ],
)
def test_jobs_are_known_or_the_module_is_not(source: str, problem: str | None) -> None:
    body = "\n".join(f"    {line}" for line in source.splitlines())
    assert Module(f"async def start(self, loop):\n{body}".encode()).problem(JOBS) == problem


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(): ...", None),
        ("def f(): ...\ndel f", "is replaced at line 2"),
        ("try:\n    pass\nexcept E:\n    def f(): ...", "only under a condition"),
        ("for x in y:\n    def f(): ...", "only under a condition"),
        ("match x:\n    case 1:\n        def f(): ...", "only under a condition"),
        ("if x:\n    def f(): ...\nelse:\n    def f(): ...", "only under a condition"),
        ("def f(): ...\nif x:\n    async def f(): ...", "is a coroutine function"),
        ("async def f(): ...\ndef f(): ...", None),
        ("def f(): ...\nfrom y import f", "may come from y"),
        ("with x as f:\n    pass", "is replaced at line 1"),
        ("with x:\n    def f(): ...", None),
        ("if TYPE_CHECKING:\n    from y import f\ndef f(): ...", None),
        ("@traced\ndef f(): ...", "is decorated by traced"),
        ("from omlx.admission import traced\n@traced\ndef f(): ...", None),
        ("def f():\n    def g():\n        yield", None),
    ],
)
def test_what_a_name_stands_for_in_the_end(source: str, problem: str | None) -> None:
    found = Module(source.encode()).problem(Need("omlx.x", "f", Kind.SYNC))
    assert found is None if problem is None else problem in (found or "")


def test_a_parser_that_another_thread_disturbs_is_asked_again(
    omlx_found: gate.Found, mocker: Any
) -> None:
    """A defect of Pythons 3.11.4 to 3.11.7, 3.12.0 and 3.12.1."""
    parse, left = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * 3

    def disturbed(source: bytes) -> ast.Module:
        if left:
            raise left.pop()
        return parse(source)

    mocker.patch.object(ast, "parse", disturbed)
    assert gate.find(omlx_found.root.parent).version == omlx_found.version
    assert left == []


LAYOUTS = [
    "def f(a):\n    return f'{a!r:>{w}} and {a=}' 'b'",
    "def g( a ):\n    '''What it does.'''\n\n    # why\n"
    '    return (f"{a!r:>{w}} and {a=}"\n       "b")',
]


def test_a_body_goes_by_what_it_does() -> None:
    """Neither by its layout, nor by the Python that parses it."""

    def of(text: str) -> str:
        return bodies.fingerprint(ast.parse(text).body[0])

    assert of(LAYOUTS[0]) == of(LAYOUTS[1]) == "75dc19e4b21e"
    assert of(LAYOUTS[0]) != of(LAYOUTS[0].replace("'b'", "'c'"))
    assert of(LAYOUTS[0]) != of(LAYOUTS[0].replace("a!r", "a!s"))
    assert of(LAYOUTS[0]) != of(f"async {LAYOUTS[0]}")


def test_the_table_is_about_functions_that_rows_name_and_has_what_rows_demand() -> None:
    rows = {str(need): need for f in FEATURES for need in f.needs}
    named = set(re.findall(r"^(omlx\S+)", bodies.TABLE.read_text("utf-8"), re.MULTILINE))
    assert named == {*bodies.known()}
    assert named <= {*rows}
    assert {name for name, need in rows.items() if need.run} <= named


def test_the_table_has_the_bodies_of_a_release_that_was_run(
    pytestconfig: pytest.Config,
) -> None:
    """Of the real ones, and of the stand-in those that a row demands."""
    for source in map(Path, pytestconfig.getoption("--omlx-src")):
        found = gate.find(source)
        code = gate.Source(found)
        for name, table in bodies.known().items():
            releases = {release for there in table.values() for release in there}
            if found.version in releases and code.fingerprint(name) is not None:
                assert found.version in table.get(code.fingerprint(name) or "", ()), name


def test_the_table_is_what_its_command_writes(pytestconfig: pytest.Config) -> None:
    """From the checkouts of all releases in it, to the same bytes."""
    sources = [Path(source) for source in pytestconfig.getoption("--omlx-src")]
    table = bodies.known().values()
    releases = {r for there in table for those in there.values() for r in those}
    if not releases - {"stand-in"} <= {gate.find(source).version for source in sources}:
        pytest.skip("needs --omlx-src of each release that was run")
    assert write.table(sources, bodies.known()) == bodies.TABLE.read_text("utf-8")
