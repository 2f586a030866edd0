"""A git checkout of oMLX: asked, written to, committed, and put back where that fails."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from omlx_admission.upstream.change import Refused


class Checkout:
    """The work tree whose top folder is ``root``."""

    def __init__(self, root: Path) -> None:
        """Look whether ``root`` is what it should be.

        Raises:
            Refused: no folder, no git checkout, not its top, or no oMLX in it.
        """
        if not root.is_dir():
            raise Refused(f"{root}: no such folder")
        self.root = root.resolve()
        top = self._git("rev-parse", "--show-toplevel", check=False)
        if top.returncode != 0 or Path(top.stdout.strip()).resolve() != self.root:
            raise Refused(f"{root} is not the top folder of a git checkout")
        if not (self.root / "omlx" / "engine_pool.py").is_file():
            raise Refused(f"{root} holds no oMLX: no omlx/engine_pool.py in it")
        if self._git("rev-parse", "--verify", "--quiet", "HEAD", check=False).returncode != 0:
            raise Refused(f"{root} has no commit yet")

    def require_clean(self) -> None:
        """Raise :class:`Refused` where anything is modified, staged or untracked."""
        lines = self._git("status", "--porcelain").stdout.splitlines()
        if lines:
            more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
            raise Refused(
                f"{self.root} has changes that are not committed: {lines[0][3:]}{more}"
            )

    def create_branch(self, name: str) -> None:
        """Create a branch here and go to it.

        Raises:
            Refused: it is there already, or git does not want the name.
        """
        done = self._git("switch", "--quiet", "--create", name, check=False)
        if done.returncode != 0:
            raise Refused(f"branch {name}: {_first_line(done.stderr)}")

    def leave_branch(self, name: str, back: str) -> None:
        """Go back to where ``name`` was created and remove it, if nothing was committed."""
        self._git("switch", "--quiet", *(() if back else ("--detach",)), back or "HEAD")
        self._git("branch", "--quiet", "-D", name)

    def branch(self) -> str:
        """The branch that is checked out; empty where none is."""
        return self._git("branch", "--show-current").stdout.strip()

    def head(self) -> str:
        """The commit that is checked out."""
        return self._git("rev-parse", "HEAD").stdout.strip()

    def commit(self, files: Mapping[str, bytes], message: str) -> str:
        """Write ``files`` and commit them and nothing else; return git's short statistics.

        Raises:
            Refused: writing or committing failed; the work tree is as it was.
        """
        paths = sorted(files)
        try:
            for path in paths:
                target = self.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files[path])
            self._git("add", "--force", "--", *paths)
            self._git("commit", "--quiet", "--file", "-", "--", *paths, stdin=message)
        except BaseException as error:
            self._put_back(paths)
            if isinstance(error, OSError):
                raise Refused(f"cannot write {error.filename}: {error.strerror}") from None
            raise
        return self._git("show", "--stat", "--format=", "HEAD").stdout.rstrip()

    def _put_back(self, paths: list[str]) -> None:
        self._git("reset", "--quiet", "HEAD", "--", *paths, check=False)
        for path in paths:
            if self._git("checkout", "--quiet", "HEAD", "--", path, check=False).returncode:
                target = self.root / path
                target.unlink(missing_ok=True)
                for parent in target.parents:
                    if parent == self.root or any(parent.iterdir()):
                        break
                    parent.rmdir()

    def back_to(self, commit: str) -> None:
        """Undo the commits since ``commit``, which this object has made in a clean tree."""
        self._git("reset", "--quiet", "--keep", commit)

    def _git(
        self, *arguments: str, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                ["git", "-C", str(self.root), *arguments],
                capture_output=True,
                text=True,
                input=stdin,
                check=False,
            )
        except OSError as error:
            raise Refused(f"git cannot be run: {error.strerror}") from None
        if check and done.returncode != 0:
            raise Refused(f"git {arguments[0]}: {_first_line(done.stderr or done.stdout)}")
        return done


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].removeprefix("fatal: ") if lines else "failed without a word"
