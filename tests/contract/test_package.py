"""The package ``omlx`` is there for who asks for it, and says what it is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import standin


def run(code: str, **variables: str) -> str:
    """Output of a fresh interpreter with the plugin off."""
    environment = {**os.environ, "OMLX_ADMISSION": "0", "PYTHONPATH": "", **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_found_only_on_the_path() -> None:
    code = "import importlib.util as u; print(getattr(u.find_spec('omlx'), 'origin', None))"
    ours = str(standin.PATH / "omlx" / "__init__.py")
    assert run(code, PYTHONPATH=str(standin.PATH)) == ours
    assert run(code) != ours


def test_says_that_it_is_no_real_one() -> None:
    code = "from omlx import _version as v; print(v.__version__, v.STANDIN)"
    assert run(code, PYTHONPATH=str(standin.PATH)) == "0.6.3rc2 True"


def test_import_is_cheap() -> None:
    code = "import sys, omlx; print('mlx.core' in sys.modules, 'fastapi' in sys.modules)"
    assert run(code, PYTHONPATH=str(standin.PATH)) == "False False"


@pytest.mark.parametrize(
    "path", sorted((standin.PATH / "omlx").rglob("*.py")), ids=lambda path: path.stem
)
def test_imports_nothing_of_the_plugin(path: Path) -> None:
    """A stand-in that leans on what it is to test would prove nothing."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    assert not [name for name in names if name.startswith("omlx_admission")]
