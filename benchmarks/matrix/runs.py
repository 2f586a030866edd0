"""The test runs of one release, each in a process of its own, and what came of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import omlx_admission

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

#: oMLX's own test files about what the package touches, those that a release has.
SUITE = (
    "test_engine_pool",
    "test_process_memory_enforcer",
    "test_server",
    "test_engine_core",
    "test_per_engine_threads",
    "test_decode_fairness",
    "test_admin_unload",
    "test_cluster_engine_pool",
    "test_embedding",
)

#: Minutes on sources of that size; `python -m benchmarks.mutations` is for them.
NOT_HERE = frozenset({"test_mutations.py"})

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
#: Longest time of one run, in seconds.
_LIMIT_S = 3000.0
#: Longest time of one test of oMLX's.
_TEST_S = 120
#: More failures than these are no matter of time; each would start a process.
_MOST_AGAIN = 40
#: What an interrupted run gets to stop its servers, in seconds.
_END_S = 30.0


class RunError(Exception):
    """A run that counted nothing; the text says why, in one line."""


@dataclass
class Counts:
    """Numbers of one run, and the tests that did not pass, as ``file::Class::test``."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    #: Failed among all the others and passed alone: a matter of time on a busy machine.
    alone: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.passed} passed"]
        parts += [
            f"{n} {what}"
            for n, what in ((self.failed, "failed"), (self.skipped, "skipped"))
            if n
        ]
        if self.alone:
            parts[0] += f" ({len(self.alone)} at the second try, alone)"
        return ", ".join(parts)

    def forgive(self, passing: Sequence[str]) -> None:
        """Count failures that passed when they ran alone as passed."""
        for test in passing:
            self.failures.remove(test)
            self.alone.append(test)
            self.failed -= 1
            self.passed += 1

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def read(report: Path) -> Counts:
    """Count a JUnit report."""
    counts = Counts()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            counts.failed += 1
            counts.failures.append(_name(case))
        elif "skipped" in outcomes:
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


def _name(case: ElementTree.Element) -> str:
    """``test_engine_pool::TestLease::test_x`` of pytest's ``classname`` and ``name``."""
    parts = [p for p in case.get("classname", "").split(".") if p]
    while parts and not parts[0].startswith("test_"):
        parts.pop(0)
    return "::".join([*parts, case.get("name", "")])


def omlx_suite(source: Path, python: str, with_package: bool, log: Path) -> Counts:
    """oMLX's own tests on ``source``, with or without the package, in the same way.

    What fails runs once more, each test alone.

    Raises:
        RunError: nothing was counted, or the package was not active where it had to be.
    """
    files = [f"tests/{n}.py" for n in SUITE if (source / "tests" / f"{n}.py").is_file()]
    if not files:
        raise RunError(f"{source}: none of oMLX's own tests in it")
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder)
        (alone / "omlx_admission").symlink_to(Path(omlx_admission.__file__).resolve().parent)
        (alone / "omlx_admission_active.py").symlink_to(HERE / "active.py")
        environment = {
            **_environment(alone, [source, alone]),
            "OMLX_ADMISSION": str(int(with_package)),
            # A test that expects a refusal gets it after this, not after five minutes.
            "OMLX_ADMISSION_MAX_WAIT_S": "2",
        }
        options = ["-p", "omlx_admission_active"] if with_package else []
        options.append(f"--timeout={_TEST_S}")
        return _twice(
            lambda which, to: _pytest(python, [*options, *which], source, environment, to),
            files,
            "tests",
            log,
        )


def hook_tests(source: Path, python: str, log: Path) -> Counts:
    """The hooks in a process that imports this oMLX; needs our test dependencies there."""
    # Plugins of oMLX's own tests may be there; ours know nothing of them. What oMLX and
    # its libraries warn of in this process is not for us to fail on.
    options = ["-p", "no:asyncio", "-W", "default", f"--omlx-src={source}"]
    options += [f"--ignore=tests/hooks/{name}" for name in sorted(NOT_HERE)]
    return _ours("tests/hooks", python, options, log)


def live_tests(source: Path, python: str, log: Path) -> Counts:
    """Whole servers of this oMLX; the stand-in's own runs are left out."""
    options = [f"--omlx-src={source}", f"--omlx-python={python}"]
    options += ["-k", f"not stand-in and {source.name}"]
    return _ours("tests/live", sys.executable, options, log)


def _ours(tests: str, python: str, options: Sequence[str], log: Path) -> Counts:
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(Path(folder), [REPOSITORY])
        return _twice(
            lambda which, to: _pytest(python, [*options, *which], REPOSITORY, environment, to),
            [tests],
            tests,
            log,
        )


def _twice(
    run: Callable[[Sequence[str], Path], Counts],
    files: Sequence[str],
    folder: str,
    log: Path,
) -> Counts:
    """Run ``files``; what fails, if it is not most of it, runs once more, each test alone."""
    counts = run(files, log)
    passing: list[str] = []
    if counts.failed > _MOST_AGAIN:
        return counts
    for test in counts.failures:
        name, _, rest = test.partition("::")
        try:
            second = run([f"{folder}/{name}.py::{rest}"], log.with_suffix(".2.log"))
        except RunError:
            continue  # it did not pass: the first try stands
        if second.passed and not second.failed:
            passing.append(test)
    counts.forgive(passing)
    return counts


def _environment(home: Path, path: Sequence[Path]) -> dict[str, str]:
    kept: Mapping[str, str] = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMLX_", "PYTEST_"))
    }
    entries = [str(p) for p in path] + [e for e in [os.environ.get("PYTHONPATH")] if e]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(entries),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
    }


def _pytest(
    python: str,
    options: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
) -> Counts:
    # Not beside the log: what is left of a killed run may still write there.
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.xml"
        status = _ended(
            [python, *_PYTEST, f"--junitxml={report}", *options], folder, environment, log
        )
        # 0: all passed, 1: some failed; everything else counted nothing that holds.
        if status not in (0, 1) or not report.is_file():
            text = log.read_text("utf-8", "replace").strip().splitlines()
            last = text[-1] if text else "it printed nothing"
            raise RunError(f"pytest ended with {status}, see {log}: {last}")
        try:
            counts = read(report)
        except ElementTree.ParseError as error:
            raise RunError(f"no report, {error}, see {log}") from None
    if not counts.passed + counts.failed:
        raise RunError(f"no test ran, {counts.skipped} skipped, see {log}")
    return counts


def _ended(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
) -> int:
    try:
        with log.open("wb") as output:
            # A group of its own, so that its servers end with it.
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return _wait(process)
        except BaseException:
            _end(process)
            raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{command[0]}: {error}") from None


def _wait(process: subprocess.Popen[bytes]) -> int:
    return process.wait(_LIMIT_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and all that it has started; first as ctrl-C would."""
    try:
        _signal(process, signal.SIGINT)
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # gone; macOS says the latter of one that nobody has waited for
