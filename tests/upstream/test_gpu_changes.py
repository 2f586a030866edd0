"""The GPU turn and the exit as changes of oMLX: what an edited stand-in does by itself.

The tests that the changes bring along need the whole of oMLX but for the turn's own; they
run in edited checkouts of real releases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omlx_admission.upstream import editing, register, style
from omlx_admission.upstream.apply import make
from omlx_admission.upstream.change import AnchorMissing, Refused
from omlx_admission.upstream.code import Code
from omlx_admission.upstream.plan import Tree, plan

from .conftest import git


@pytest.fixture
def edited(checkout: Path) -> Path:
    """A stand-in with both changes."""
    for name in ("gpu-turn", "submissions-exit"):
        make(checkout, name)
    return checkout


def python(
    tree: Path, *arguments: str, admission: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the edited tree's oMLX, without this package unless asked."""
    paths = [str(tree)]
    if admission:
        paths.append(str(Path(register.folder()).parent))
    environment = {**os.environ, "OMLX_ADMISSION": str(int(admission)), **variables}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_turn_that_is_added_passes_its_own_tests(edited: Path) -> None:
    (edited / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    done = python(
        edited, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu_turn.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout


IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU "
    "errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)


@pytest.mark.parametrize(("text", "status"), [(IGNORED, 70), ("Caused GPU Hang", 3)])
def test_work_that_the_driver_ignores_ends_the_process(
    edited: Path, text: str, status: int
) -> None:
    code = f"""
from omlx.engine_core import get_mlx_executor

def fail():
    raise RuntimeError({text!r})

try:
    get_mlx_executor().submit(fail).result(60)
except RuntimeError:
    raise SystemExit(3)
"""
    done = python(edited, "-c", code)
    assert done.returncode == status, done.stderr


REPORT = """
import json, sys
from omlx_admission import _startup

_startup.main()
import omlx.server
from omlx_admission.hooks import install

report = install.current()
core = omlx.engine_core.EngineCore
print(json.dumps({
    "states": {v.feature.name: v.state.value for v in report.verdicts},
    "wrapped": {v.feature.name: v.wrapped for v in report.verdicts},
    "reasons": {v.feature.name: v.reasons for v in report.verdicts},
}))
"""


def test_the_package_on_an_edited_omlx_wraps_nothing_twice(
    edited: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "settings.json").write_text('{"scheduler": {"serialize_engine_gpu": true}}')
    done = python(edited, "-c", REPORT, admission=True, OMLX_BASE_PATH=str(base))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for feature in ("gpu_turn", "gpu_setting", "gpu_lockout"):
        assert found["states"][feature] == "native"
        assert found["wrapped"][feature] == []
    # What is not in the changes goes on, round what they have decorated.
    assert found["states"]["exposure"] == "applied", found["reasons"]["exposure"]


SITES = {
    "engine_core.py": ("_step_burst", "fail_now"),
    "scheduler.py": ("fail_all_requests", "fail_everything"),
    "models/embedding.py": ("def embed(", "def vectors("),
    "settings.py": ("class SchedulerSettings", "class QueueSettings"),
    "server.py": ("def init_server(", "def set_up_server("),
    "decode_activity.py": ("def get_decode_activity", "def decode_registry"),
}


@pytest.mark.parametrize("path", SITES)
def test_a_site_that_moved_is_refused_with_its_name(checkout: Path, path: str) -> None:
    file = checkout / "omlx" / path
    old, new = SITES[path]
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(Refused, match=f"gpu-turn: omlx/{path}: "):
        plan(Tree(checkout), register.select("gpu-turn"))


def test_an_omlx_without_the_optional_engine_is_edited_all_the_same(checkout: Path) -> None:
    assert not (checkout / "omlx" / "engine" / "dflash.py").exists()
    change = register.changes()["gpu-turn"]
    assert "engine/dflash.py" in change.optional
    assert change.optional < set(change.edits)


def test_a_test_of_omlxs_own_that_becomes_untrue_is_edited_where_it_is(checkout: Path) -> None:
    code = (
        "class TestSchedulerSettings:\n    def test_to_dict(self):\n        assert f() == {\n"
        '            "a": 1,\n            "b": 2,\n        }\n'
    )
    (checkout / "tests" / "test_settings.py").write_text(code)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message=a test")
    make(checkout, "gpu-turn")
    edited = (checkout / "tests" / "test_settings.py").read_text()
    assert edited == code.replace("2,\n", '2,\n            "serialize_engine_gpu": False,\n')


def module(text: str) -> Code:
    return Code(text.encode())


class TestEdits:
    """The edits that these changes needed, on code that is not oMLX's."""

    def test_a_statement_in_a_loop_is_found_and_dots_stand_for_arguments(self) -> None:
        code = "def f():\n    for x in y:\n        z = g(x, 1)\n        h(z)\n"
        done = editing.insert_beside(module(code), "f", "z = g(...)", "before()", before=True)
        assert "    for x in y:\n        before()\n        z = g(x, 1)\n" in done.text
        with pytest.raises(AnchorMissing, match="no statement z = k"):
            editing.insert_beside(module(code), "f", "z = k(...)", "w()")

    @pytest.mark.parametrize("length", [88, 89])
    def test_what_is_put_in_is_broken_where_it_is_too_long_there(self, length: int) -> None:
        code = (
            "class C:\n    def f(self):\n        try:\n            g(x)\n"
            "        except ValueError as e:\n            h(e)\n"
        )
        call = f"put_in({'a' * (length - len('            put_in()'))})"
        beside = editing.insert_beside(module(code), "C.f", "g(x)", call)
        within = editing.insert_in_handlers(module(code), "C.f", "ValueError", call)
        for done in (beside, within):
            more = len(done.text.splitlines()) - len(code.splitlines())
            assert more == (1 if length <= style.DEFAULT_LINE_LENGTH else 3)
            assert max(map(len, done.text.splitlines())) <= style.DEFAULT_LINE_LENGTH

    def test_a_handler_without_a_name_gets_one_and_loses_its_pass(self) -> None:
        code = "def f():\n    try:\n        g()\n    except ValueError:\n        pass\n"
        done = editing.insert_in_handlers(module(code), "f", "ValueError", "look({})")
        assert done.text == code.replace("ValueError:", "ValueError as e:").replace(
            "pass", "look(e)"
        )
        with pytest.raises(AnchorMissing, match="no handler of KeyError"):
            editing.insert_in_handlers(module(code), "f", "KeyError", "look({})")

    def test_a_field_a_keyword_and_an_entry_come_last(self) -> None:
        code = (
            "class C:\n    a: int = 1\n\n    def f(self):\n        return cls(\n"
            "            a=1,\n            b=2,\n        )\n\n"
            "def g():\n    return {\n        'a': 1,\n        'b': 2,\n    }\n"
        )
        done = editing.insert_field(module(code), "C", "c: int = 3")
        done = editing.add_keyword(done, "C.f", "cls", "c", "3")
        done = editing.add_entry(done, "g", "c", "3")
        assert "    a: int = 1\n    c: int = 3\n" in done.text
        assert "            b=2,\n            c=3,\n        )" in done.text
        assert "        'b': 2,\n        \"c\": 3,\n    }" in done.text
        with pytest.raises(AnchorMissing, match="0 calls of make"):
            editing.add_keyword(done, "C.f", "make", "c", "3")

    def test_names_are_imported_with_those_of_the_same_module(self) -> None:
        code = "import os\n\nfrom .b import Two, three\n"
        done = editing.import_name(module(code), ".b", "ONE")
        assert done.text == "import os\n\nfrom .b import ONE, Two, three\n"
        done = editing.import_name(done, ".a", "x")
        assert "from .a import x\nfrom .b import" in done.text
        alone = editing.import_name(module("import os\n\nx = 1\n"), ".a", "x")
        assert alone.text == "import os\n\nfrom .a import x\n\nx = 1\n"

    def test_a_split_keeps_every_old_line_and_what_belongs_to_it(self) -> None:
        code = (
            "class C:\n    @cached\n    # why\n    async def f(\n"
            "        self, é: int = 1\n    ):  # s\n"
            '        """Do."""\n        # first\n        return await g("é")\n\n    x = 1\n'
        )
        done = editing.split_function(
            module(code), "C.f", head="return self._f(é)", rest="_f", doc="Old."
        )
        head, tail = code.split("        # first\n")
        assert done.text == (
            head + "        return self._f(é)\n\n    async def _f(\n        self, é: int = 1\n"
            '    ):  # s\n        """Old."""\n        # first\n' + tail
        )

    def test_a_block_on_the_line_of_its_head_is_refused(self) -> None:
        with pytest.raises(AnchorMissing, match="on the line of its head"):
            editing.insert_first(module("def f(): return 1\n"), "f", "g()")

    def test_what_cannot_be_parsed_is_refused(self) -> None:
        with pytest.raises(Refused, match="cannot be parsed"):
            editing.insert_first(module("def f(:\n"), "f", "g()")
