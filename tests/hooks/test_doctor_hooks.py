"""``omlx-admission doctor --hooks`` shows what lies on oMLX, in its order, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import standin
from omlx_admission.surfaces import cli

ROOT = Path(__file__).resolve().parents[2]

#: By the features that are on: most of them, all of them, the queue alone and none.
VARIABLES: dict[str, dict[str, str]] = {
    "as installed": {},
    "everything": {"OMLX_SERIALIZE_ENGINE_GPU": "1", "OMLX_ADMISSION_LOAD_THREAD": "1"},
    "without the resident path": {
        "OMLX_ADMISSION_RESIDENT_PATH": "0",
        "OMLX_ADMISSION_SURFACES": "0",
        "OMLX_ADMISSION_EXPOSURE": "0",
    },
    "off": {"OMLX_ADMISSION": "0"},
}


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Path:
    """The oMLX of these tests."""
    given = request.config.getoption("--omlx-src")
    return Path(given[0] if given else standin.PATH)


def run(code: str, source: Path, variables: dict[str, str]) -> Any:
    path = os.pathsep.join([str(source), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMLX_BASE_PATH": str(source / "none")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("features", VARIABLES)
def test_what_doctor_shows_is_what_lies_on_omlx(source: Path, features: str) -> None:
    variables = VARIABLES[features]
    command = f"['doctor', '--hooks', '--json', '--omlx-src', {str(source)!r}]"
    shown = run(
        f"from omlx_admission.surfaces import cli; cli.main({command})", source, variables
    )
    found = run("from tests.hooks import walked; walked.main()", source, variables)
    layers = {
        attribute["name"]: [layer["layer"] for layer in attribute["layers"]]
        for attribute in shown["hooks"]["attributes"]
    }
    # Several features may want one executor changed; it is changed once.
    layers = {
        name: list(dict.fromkeys(all_)) if "()" in name else all_
        for name, all_ in layers.items()
    }
    assert layers == found["during"]
    assert bool(layers) is (features != "off")
    assert found["after"] == {}


ABORTS = "import os, sys\nsys.stderr.write('no GPU\\n')\nsys.stderr.flush()\nos.abort()\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import no_such_accelerator\n",
            "oMLX cannot be imported here: "
            "ModuleNotFoundError: No module named 'no_such_accelerator'",
        ),
        (ABORTS, "importing oMLX ended the process (status -6): no GPU"),
    ],
    ids=["raises", "aborts"],
)
def test_an_omlx_that_cannot_be_imported_is_one_sentence_and_status_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    package = tmp_path / "omlx"
    package.mkdir()
    (package / "_version.py").write_text('__version__ = "0.6.2"\n', "utf-8")
    (package / "__init__.py").write_text(code, "utf-8")
    assert cli.main(["doctor", "--hooks", "--omlx-src", str(tmp_path)]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"omlx-admission doctor: --hooks: {said}\n")
