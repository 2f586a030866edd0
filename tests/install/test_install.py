"""The package as a user gets it: a wheel in a fresh environment, looked at from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import standin

ROOT = Path(__file__).parents[2]

#: Neither may be in a process that never imports oMLX.
HEAVY = ("wrapt", "asyncio", "omlx", "omlx_admission.settings", "importlib.util")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=110,
    )
    return next(out.glob("*.whl"))


class Environment:
    """A virtual environment that sees this one's packages, but not this package."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = Path(
            self.run("-c", "import site; print(site.getsitepackages()[0])").strip()
        )

    def run(self, *arguments: str, **env: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMLX", "PYTHON"))}
        done = subprocess.run(
            [str(self.python), *arguments],
            env={**clean, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pip(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "pip", "--quiet", "--python", str(self.python), *arguments],
            check=True,
            capture_output=True,
            timeout=110,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """One for all tests; the last of them takes the package out."""
    made = Environment(tmp_path_factory.mktemp("install") / "venv")
    made.pip("install", str(wheel))
    return made


MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"

#: A stand-in pool without the packages that the server needs.
WRAPPED = """
import json, sys, types
sys.path.insert(0, {path!r})
import omlx
from omlx_admission.hooks import install
report = install.current()
states = {{v.feature.name: v.state.value for v in report.verdicts}} if report else None
print(json.dumps(states))
"""


def test_the_wheel_holds_the_package_and_the_switch_alone(wheel: Path) -> None:
    """No stand-in, no tests: nothing that a user could import by mistake."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"omlx_admission", "omlx_admission.pth", "omlx_admission.start"}
    assert "omlx_admission/surfaces/demo/__init__.py" in names
    assert not [name for name in names if "standin" in name or "/omlx/" in name]


def test_the_demo_without_an_omlx_says_what_it_needs(environment: Environment) -> None:
    done = subprocess.run(
        [str(environment.python.with_name("omlx-admission")), "demo"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has no oMLX: name one with --omlx-src, or run the demo from a checkout" in line


def test_the_switch_lies_at_the_top_of_site_packages(environment: Environment) -> None:
    line = (environment.site / "omlx_admission.pth").read_text()
    assert line == "import omlx_admission._startup; omlx_admission._startup.main()\n"
    start = (environment.site / "omlx_admission.start").read_text()
    assert start == "omlx_admission._startup:main\n"
    record = next(environment.site.glob("omlx_admission-*.dist-info/RECORD")).read_text()
    assert "omlx_admission.pth" in record
    assert "omlx_admission.start" in record


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",)])
def test_a_process_without_omlx_pays_almost_nothing(
    environment: Environment, flags: tuple[str, ...]
) -> None:
    """The budget itself is measured in benchmarks/; here: what must not be imported."""
    loaded = json.loads(environment.run(*flags, "-c", MODULES))
    assert "omlx_admission._startup" in loaded
    assert not set(HEAVY) & set(loaded)


def test_importing_omlx_decides_and_hooks(environment: Environment) -> None:
    states = json.loads(environment.run("-c", WRAPPED.format(path=str(standin.PATH))))
    for name in ("resident", "queue", "errors", "leases", "requests"):
        assert states[name] == "ready"


def test_switched_off_nothing_is_installed(environment: Environment) -> None:
    out = environment.run("-c", WRAPPED.format(path=str(standin.PATH)), OMLX_ADMISSION="0")
    assert json.loads(out) is None


def test_a_malformed_variable_is_one_line_and_no_failure(environment: Environment) -> None:
    done = subprocess.run(
        [str(environment.python), "-m", "omlx_admission.surfaces.cli", "doctor",
         "--omlx-src", str(standin.PATH)],
        env={"PATH": os.environ["PATH"], "OMLX_ADMISSION_MAX_WAIT_S": "soon"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if "MAX_WAIT" in line]
    assert len(lines) == 1
    assert "'soon' is not a number of seconds, 0 or more; using the default 300" in lines[0]


def test_an_editable_install_is_switched_on_too(tmp_path: Path) -> None:
    made = Environment(tmp_path / "venv")
    made.pip("install", "--no-deps", "--editable", str(ROOT))
    loaded = json.loads(made.run("-c", MODULES))
    assert "omlx_admission._startup" in loaded


def test_uninstalling_leaves_nothing(environment: Environment) -> None:
    environment.pip("uninstall", "--yes", "omlx-admission")
    assert not list(environment.site.glob("omlx_admission*"))
    loaded = json.loads(environment.run("-c", MODULES))
    assert not [name for name in loaded if name.startswith("omlx")]
