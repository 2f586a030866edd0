"""What a part of the matrix was measured on: its result holds for nothing else."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import omlx_admission
from benchmarks.matrix.runs import NOT_HERE, REPOSITORY, SUITE
from omlx_admission.hooks import gate

#: By what it is called in a message: a version, a digest, or both.
Origin = dict[str, str]

PARTS = ("doctor", "hooks", "live", "stock", "patched")

#: Modules of the matrix that only say what kept numbers mean; the others make numbers.
_SAYS = frozenset({"table.py", "known.py"})

_USED = re.compile(r"\bbenchmarks\.(\w+)|\bfrom benchmarks import ([\w, ]+)")

_ASK = """
import platform, sys
from importlib import metadata
print(platform.python_implementation(), platform.python_version(), sys.platform,
      platform.machine())
found = []
for name in ("mlx", "mlx-lm", "pytest"):
    try:
        found.append(name + " " + metadata.version(name))
    except metadata.PackageNotFoundError:
        found.append("no " + name)
print(", ".join(found))
"""


class OriginError(Exception):
    """What a part would run on cannot be said; the text says why."""


def of_parts(source: Path, python: str) -> dict[str, Origin]:
    """What each part would be measured on now.

    Raises:
        OriginError: there is no oMLX there, or the Python does not run.
    """
    try:
        version = gate.find(source).version
    except gate.NoOmlx as error:
        raise OriginError(f"{source}: {error}") from None
    omlx = {
        "oMLX": f"{version} {_digest(source, (source / 'omlx').rglob('*.py'))}",
        "harness": _digest(REPOSITORY, _harness()),
    }
    package = Path(omlx_admission.__file__).parent
    ours = {"package": _digest(package, package.rglob("*"))}
    runs_it = _python(python)
    # Stock has nothing of ours in it, so that no change of ours costs its time again.
    stock = {**omlx, **runs_it, "oMLX's tests": _digest(source, _suite(source))}
    hooks, live = (
        {"our tests": _digest(REPOSITORY, _ours(REPOSITORY / "tests" / n))}
        for n in ("hooks", "live")
    )
    client = {f"client's {k}": v for k, v in _python(sys.executable).items()}
    return {
        "doctor": {**omlx, **ours},
        "hooks": {**omlx, **runs_it, **ours, **hooks},
        "live": {**omlx, **runs_it, **client, **ours, **live},
        "stock": stock,
        "patched": {**stock, **ours},
    }


def differences(kept: Origin | None, now: Origin) -> list[str]:
    """Why a result that was measured on ``kept`` is none of ``now``; empty: it is one."""
    if kept is None:
        return ["it does not say what it was measured on"]
    return [
        f"{what} was {kept.get(what, 'not kept')}, is {now.get(what, 'not part of it')}"
        for what in dict.fromkeys([*now, *kept])
        if kept.get(what) != now.get(what)
    ]


def _harness() -> Iterator[Path]:
    for path in (REPOSITORY / "benchmarks" / "matrix").glob("*.py"):
        if path.name not in _SAYS:
            yield path


def _suite(source: Path) -> Iterator[Path]:
    """The test files that run, what they import from beside them, and their settings."""
    tests = source / "tests"
    yield from (tests / f"{name}.py" for name in SUITE)
    yield from (p for p in tests.glob("*.py") if not p.name.startswith("test_"))
    yield from (source / name for name in ("pyproject.toml", "pytest.ini", "conftest.py"))


def _ours(folder: Path) -> Iterator[Path]:
    """The tests in ``folder``, what they run of ``benchmarks/``, and their settings."""
    # The texts beside the tests are read by people and by the table.
    tests = [p for p in folder.rglob("*") if p.suffix != ".md" and p.name not in NOT_HERE]
    tests += [REPOSITORY / "tests" / name for name in ("__init__.py", "conftest.py")]
    yield from tests
    yield REPOSITORY / "pyproject.toml"
    seen: set[Path] = set()
    new = {p for p in tests if p.suffix == ".py"}
    while new:
        seen |= new
        new = {used for path in new for used in _benchmarks(path)} - seen
    yield from seen.difference(tests)


def _benchmarks(path: Path) -> Iterator[Path]:
    """The modules, or all of a package, that the text of ``path`` names."""
    root = REPOSITORY / "benchmarks"
    for one, several in _USED.findall(path.read_text("utf-8")):
        for name in [one] if one else re.findall(r"\w+", several):
            module = root / f"{name}.py"
            if module.is_file():
                yield module
            elif name != "matrix":
                yield from (root / name).rglob("*.py")


def _digest(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(root).as_posix().encode()
            digest.update(b"%b\0%b" % (name, hashlib.sha256(path.read_bytes()).digest()))
    return digest.hexdigest()[:12]


@functools.cache
def _python(python: str) -> Origin:
    try:
        answer = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=120, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise OriginError(f"{python}: {error}") from None
    return {"Python": answer[-2], "libraries": answer[-1]}
