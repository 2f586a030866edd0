"""Git checkouts to edit: of the stand-in always, of each real oMLX named by ``--omlx-src``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import standin


def git(root: Path, *arguments: str) -> str:
    """Run git in ``root``; no setting of the user's takes part."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


def make_checkout(source: Path, root: Path) -> Path:
    """A git checkout with the package of ``source`` in it, one commit, clean."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
    shutil.copytree(source / "omlx", root / "omlx", ignore=ignored)
    (root / "tests").mkdir()
    (root / "tests" / "README").write_text("tests go here\n")
    project = source / "pyproject.toml"
    if project.is_file():
        shutil.copy(project, root)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "Somebody")
    git(root, "config", "user.email", "somebody@example.org")
    git(root, "add", "--force", "--all")
    git(root, "commit", "--quiet", "--message=as it is")
    return root


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "real" in metafunc.fixturenames:
        found = [Path(source) for source in metafunc.config.getoption("--omlx-src")]
        metafunc.parametrize("real", found, ids=lambda path: path.name)


@pytest.fixture(scope="session")
def _pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(standin.PATH, tmp_path_factory.mktemp("pristine") / "checkout")


@pytest.fixture
def checkout(_pristine: Path, tmp_path: Path) -> Path:
    """The stand-in as a checkout of its own."""
    return Path(shutil.copytree(_pristine, tmp_path / "checkout"))


@pytest.fixture
def checkout_of(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda source: make_checkout(source, tmp_path / "real")
