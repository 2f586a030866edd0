"""What the gate reads of annotations and of jobs, beyond what the mutations say."""

from __future__ import annotations

import ast

import pytest

from omlx_admission.hooks.gate import Kind, Need
from omlx_admission.hooks.source_jobs import jobs_problem
from omlx_admission.hooks.source_types import is_one_of


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
        ("'not a type('", "str", False),
    ],
)
def test_annotations_are_compared_by_what_they_mean(
    written: str, wanted: str, fits: bool
) -> None:
    node = ast.parse(written, mode="eval").body
    assert is_one_of(node, (wanted,)) is fits


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
        (
            "get().submit(load)\nrun_on(get(), fuse)",
            "omlx.x:get gives its executor away at line 3",
        ),
        ("get().submit(load)\nkeep = get", "omlx.x:get gives its executor away at line 3"),
        (
            "loop.run_in_executor(executor=get(), func=load)",
            "omlx.x:get gives its executor away at line 2",
        ),
        ("loop.run_in_executor(None, load)", "omlx.x hands no job to get"),
        ("from .core import get", "omlx.x hands no job to get"),
    ],
)
def test_jobs_are_known_or_the_module_is_not(source: str, problem: str | None) -> None:
    body = "\n".join(f"    {line}" for line in source.splitlines())
    tree = ast.parse(f"async def start(self, loop):\n{body}")
    assert jobs_problem(JOBS, tree) == problem
