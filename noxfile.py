"""The checks of this project, each a session; ``nox --list`` names them.

``tests`` and ``oldest_and_newest`` make an environment from ``pyproject.toml``; arguments
after ``--`` go to pytest. The others are about one release of oMLX or more, and
run in the environment that nox is in, with the Python that has what that oMLX needs::

    nox -s hooks live stock patched table -- --omlx-src=DIR --omlx-python=PATH

``--omlx-src`` may be repeated. Each of them leaves JUnit reports in ``reports/VERSION/``:
one of all its tests, and one of a second try of those that failed, without the others.
``benchmarks.known_differences`` says what they mean; ``table`` prints them as
``docs/compatibility.md`` has them. ``tests/live/known_differences.md`` names what is meant to
fail with the package.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests", "oldest_and_newest"]
#: A Python that a machine does not have is no failure, in CI either.
nox.options.error_on_missing_interpreters = False

HERE = Path(__file__).resolve().parent
REPORTS = HERE / "reports"

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

#: More than there are cores, up to what memory is sure to hold: most of the time is spent
#: waiting for servers. A file stays together.
PYTEST = ("pytest", f"--numprocesses={min(8, 2 * (os.cpu_count() or 1))}", "--dist=loadfile")

_PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
#: A distribution's own 3.11, and the newest Python that is supported.
PYTHONS = [
    str(path)
    for path in (
        Path("/usr/bin/python3.11"),
        *sorted(_PYENV.glob("versions/3.13.*/bin/python3.13"))[-1:],
    )
    if path.is_file()
] or ["3.13"]


@nox.session
def tests(session: nox.Session) -> None:
    """Formatter, linter, type checker, and all tests.

    ``-- --omlx-src=DIR --omlx-python=PATH`` adds a real oMLX.
    """
    session.install("-e", ".[test]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run(*PYTEST, *session.posargs)


@nox.session(venv_backend="none", default=False)
def fast(session: nox.Session) -> None:
    """What a person runs at each save, in the environment that nox is in: a minute."""
    folders = ("tests/policy", "tests/runtime", "tests/hooks")
    command = (sys.executable, "-m", *PYTEST, "-q", "-m", "not slow", *folders)
    session.run(*command, *session.posargs, env={"PYTHONPATH": str(HERE)}, external=True)


@nox.session(python=PYTHONS)
def oldest_and_newest(session: nox.Session) -> None:
    """The tests that ask Python and its mocks what they are."""
    session.install("-e", ".[test]")
    names = ("leases", "off_loop", "queue", "resident", "stream_hold", "unloads")
    session.run(*PYTEST, "tests/runtime", *(f"tests/hooks/test_{name}.py" for name in names))


# --- one release of oMLX ----------------------------------------------------------


@nox.session(venv_backend="none")
def hooks(session: nox.Session) -> None:
    """The tests of the hooks on a real pool."""
    for source, python in _releases(session):
        # Plugins of oMLX's own tests may be there; ours know nothing of them. What oMLX
        # and its libraries warn of in this process is not for us to fail on.
        options = ("-p", "no:asyncio", "-W", "default", f"--omlx-src={source}")
        _run(session, source, [python, *options, "tests/hooks"])


@nox.session(venv_backend="none")
def live(session: nox.Session) -> None:
    """Whole servers of a real oMLX; the stand-in's own runs are left out."""
    for source, python in _releases(session):
        options = (f"--omlx-src={source}", f"--omlx-python={python}")
        only = ("-k", f"not stand-in and {source.name}")
        _run(session, source, [sys.executable, *options, *only, "tests/live"])


@nox.session(venv_backend="none")
def stock(session: nox.Session) -> None:
    """oMLX's own tests on oMLX as it is."""
    for source, python in _releases(session):
        _suite(session, source, python)


@nox.session(venv_backend="none")
def patched(session: nox.Session) -> None:
    """oMLX's own tests with the package active."""
    for source, python in _releases(session):
        _suite(session, source, python, "-p", "omlx_admission_active")


@nox.session(venv_backend="none")
def table(session: nox.Session) -> None:
    """Print these releases' rows of docs/compatibility.md, and what is wrong with reports."""
    _judge(session, *(source for source, _ in _releases(session)))


def _releases(session: nox.Session) -> Iterator[tuple[Path, str]]:
    parser = argparse.ArgumentParser(prog=f"nox -s {session.name} --")
    parser.add_argument("--omlx-src", action="append", required=True, type=Path)
    parser.add_argument("--omlx-python", default=sys.executable)
    options = parser.parse_args(session.posargs)
    for source in options.omlx_src:
        if not (source / "omlx" / "_version.py").is_file():
            session.error(f"--omlx-src {source}: no omlx/_version.py in it")
        yield source.resolve(), options.omlx_python


def _suite(session: nox.Session, source: Path, python: str, *options: str) -> None:
    files = [
        f"tests/{name}.py" for name in SUITE if (source / "tests" / f"{name}.py").is_file()
    ]
    # Only the package and the plugin: `tests` and `benchmarks` have to be oMLX's own.
    ours = Path(session.create_tmp()).resolve()
    for name, target in (
        ("omlx_admission", HERE / "omlx_admission"),
        ("omlx_admission_active.py", HERE / "benchmarks" / "active.py"),
    ):
        (ours / name).unlink(missing_ok=True)
        (ours / name).symlink_to(target)
    path = os.pathsep.join([str(source), str(ours)])
    command = [python, "--timeout=120", *options, *files]
    _run(session, source, command, folder=source, PYTHONPATH=path)


def _run(
    session: nox.Session,
    source: Path,
    command: list[str],
    folder: Path = HERE,
    **variables: str,
) -> None:
    """Run pytest, and what fails once more without the others; then say what came of it."""
    text = (source / "omlx" / "_version.py").read_text("utf-8")
    release = re.findall(r'__version__ = "(.+)"', text)[-1]
    python, *arguments = command
    home = session.create_tmp()
    environment: dict[str, str | None] = {
        **{name: None for name in os.environ if name.startswith(("OMLX_", "PYTEST_"))},
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": home,
        "OMLX_ADMISSION": str(int(session.name != "stock")),
        # A test that expects a refusal gets it after this, not after five minutes.
        **({"OMLX_ADMISSION_MAX_WAIT_S": "2"} if folder is source else {}),
        **variables,
    }
    report = REPORTS / release / f"{session.name}.xml"
    second = report.with_suffix(".2.xml")
    for old in (report, second):
        old.unlink(missing_ok=True)
    failures = ("--last-failed", "--last-failed-no-failures=none")
    # 0: all passed, 1: some failed, 5: none had failed; all else counted nothing that holds.
    for which, to, codes in (((), report, [0, 1]), (failures, second, [0, 1, 5])):
        with session.chdir(folder):
            session.run(
                *(python, "-m", "pytest", "-q", "-o", f"cache_dir={home}/pytest"),
                *(f"--junitxml={to}", *which, *arguments),
                env=environment,
                external=True,
                success_codes=codes,
            )
    _judge(session, source)


def _judge(session: nox.Session, *sources: Path) -> None:
    session.run(
        *(sys.executable, "-m", "benchmarks.known_differences", f"--reports={REPORTS}"),
        *map(str, sources),
        env={"PYTHONPATH": str(HERE)},
        external=True,
    )
