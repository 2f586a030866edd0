"""``omlx-admission upstream`` from end to end, in git checkouts of the stand-in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from omlx_admission.hooks.install import State, decide
from omlx_admission.settings import Settings
from omlx_admission.surfaces.cli import main
from omlx_admission.upstream import register

from .conftest import git

NAMES = tuple(register.changes())


def upstream(checkout: Path, *arguments: str) -> int:
    return main(["upstream", "--checkout", str(checkout), *arguments])


def state(checkout: Path) -> tuple[str, str, str]:
    """Everything that a refusal must leave alone."""
    return (
        git(checkout, "rev-parse", "HEAD"),
        git(checkout, "branch", "--list"),
        git(checkout, "status", "--porcelain", "--ignored"),
    )


def refused(checkout: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run, expect a refusal that changes nothing, return its one line."""
    known = checkout.is_dir() and (checkout / ".git").exists()
    before = state(checkout) if known else None
    assert upstream(checkout, *arguments) == 2
    if known:
        assert state(checkout) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", NAMES)
def test_a_change_alone_is_committed_native_and_twice_a_no_op(
    checkout: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upstream(checkout, "--change", name) == 0
    made = register.select(name)
    subjects = git(checkout, "log", "--format=%s", "--reverse", "HEAD").splitlines()
    assert subjects == ["as it is", *(change.title for change in made)]
    assert git(checkout, "status", "--porcelain", "--ignored") == ""
    everything = Settings(serialize_engine_gpu=True, keep_gpu_setting=True)
    report = decide(checkout, everything)
    for change in made:
        for feature in change.features:
            assert report.verdict(feature).state is State.NATIVE, feature
    head = git(checkout, "rev-parse", "HEAD")
    capsys.readouterr()
    assert upstream(checkout, "--change", name) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(made)
    assert all("already" in line for line in said)
    assert git(checkout, "rev-parse", "HEAD") == head


def test_all_of_them_make_one_commit_each_on_a_new_branch(checkout: Path) -> None:
    assert upstream(checkout, "--change", "all", "--branch", "mine") == 0
    assert git(checkout, "branch", "--show-current") == "mine"
    assert git(checkout, "rev-list", "--count", "main..mine") == str(len(NAMES))
    for path in sorted((checkout / "omlx").rglob("*.py")):
        compile(path.read_bytes(), str(path), "exec")


def test_list_tells_what_fits_and_what_is_done(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upstream(checkout, "--change", "resident-path") == 0
    capsys.readouterr()
    assert upstream(checkout, "--list") == 0
    lines = capsys.readouterr().out.splitlines()[::2]
    states = dict(line.split(maxsplit=1) for line in lines)
    assert tuple(states) == NAMES
    assert states.pop("resident-path") == "done"
    assert all(text.startswith("fits") for text in states.values())


def test_list_takes_no_branch_and_names_a_change_once(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(checkout, capsys, "--list", "--branch", "b")
    assert "--list makes none" in line
    (checkout / "omlx" / "decode_activity.py").unlink()
    git(checkout, "commit", "-qam", "without it")
    assert upstream(checkout, "--list") == 0
    out = capsys.readouterr().out
    (row,) = (row for row in out.splitlines() if row.startswith("gpu-turn"))
    assert "does not fit: " in row
    assert row.count("gpu-turn") == 1


def test_a_branch_is_not_made_for_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upstream(checkout, "--change", "resident-path") == 0
    capsys.readouterr()
    assert upstream(checkout, "--change", "resident-path", "--branch", "b") == 0
    assert "branch b is not created" in capsys.readouterr().out
    assert git(checkout, "branch", "--list", "b") == ""


def test_commits_that_nothing_would_keep_are_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(checkout, "switch", "-q", "--detach")
    assert "--branch B" in refused(checkout, capsys, "--change", "resident-path")
    assert upstream(checkout, "--change", "resident-path", "--branch", "b") == 0
    assert git(checkout, "branch", "--show-current") == "b"


def test_an_unknown_name_is_refused_with_the_names_there_are(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(checkout, capsys, "--change", "faster")
    assert "no change 'faster'" in line
    assert all(name in line for name in (*NAMES, "all"))


@pytest.mark.parametrize("how", ["modified", "staged", "untracked"])
def test_a_dirty_tree_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    path = checkout / ("omlx/settings.py" if how != "untracked" else "notes.txt")
    with path.open("a") as file:
        file.write("# mine\n")
    if how == "staged":
        git(checkout, "add", str(path))
    line = refused(checkout, capsys, "--change", "all", "--branch", "mine")
    assert f"not committed: {path.relative_to(checkout)}" in line
    assert path.read_text().endswith("# mine\n")


def test_what_is_no_checkout_of_omlx_is_refused(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = refused(checkout / "omlx", capsys, "--change", "all")
    assert "is not the top folder of a git checkout" in below
    assert "no such folder" in refused(tmp_path / "nowhere", capsys, "--change", "all")
    shutil.rmtree(checkout / "omlx")
    git(checkout, "commit", "--quiet", "--all", "--message=gone")
    assert "holds no oMLX" in refused(checkout, capsys, "--change", "all")


def test_a_missing_anchor_is_refused_with_its_name(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the anchor of a later change is missing: the earlier ones are not made."""
    pool = checkout / "omlx" / "engine_pool.py"
    text = pool.read_text()
    pool.write_text(text.replace("async def _unload_engine(", "async def _drop_engine("))
    git(checkout, "commit", "--quiet", "--all", "--message=moved")
    line = refused(checkout, capsys, "--change", "all", "--branch", "mine")
    assert "resident-path: omlx/engine_pool.py: EnginePool._unload_engine is missing" in line


def test_a_commit_that_fails_leaves_the_tree_as_it_was(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook of the checkout refuses the last commit: those before it go again."""
    hook = checkout / ".git" / "hooks" / "commit-msg"
    hook.parent.mkdir(exist_ok=True)
    last = register.select("all")[-1].title
    hook.write_text(f"#!/bin/sh\nif grep -q '{last}' \"$1\"; then echo no >&2; exit 1; fi\n")
    hook.chmod(0o755)
    line = refused(checkout, capsys, "--change", "all", "--branch", "mine")
    assert "git commit: no" in line
    assert git(checkout, "branch", "--show-current") == "main"


def test_a_branch_that_is_there_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(checkout, "branch", "mine")
    line = refused(checkout, capsys, "--change", "all", "--branch", "mine")
    assert "branch mine" in line


def test_other_lines_of_an_edited_file_do_not_change(checkout: Path) -> None:
    """No edit takes a line away that it does not have to: the diff only adds."""
    assert upstream(checkout, "--change", "resident-path") == 0
    for row in git(checkout, "diff", "--numstat", "HEAD~", "HEAD").splitlines():
        _added, removed, path = row.split("\t")
        assert removed == "0", path
