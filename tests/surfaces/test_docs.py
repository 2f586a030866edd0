"""The documents say of cases, links and layers what the repository has.

Run as a script it writes the last column of ``docs/cases.md`` anew.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from omlx_admission.core.policy.estimates import Dials

ROOT = Path(__file__).parents[2]
PACKAGE = "omlx_admission"
#: What everything may know: the version, and the words of switches.
_FREE = ("__version__", "_startup")
CASES = ROOT / "docs" / "cases.md"
DOCUMENTS = sorted(
    (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
)

#: A row's case, what is said of it, and the test files that name it.
_ROW = re.compile(r"^\| ([BCFGP]\d+) \|(.*)\|([^|]*)\|$", re.MULTILINE)
_IN_NAME = re.compile(r"def test_((?:[bcfgp]\d+_)+)")
_IN_TEXT = re.compile(r"\b(B\d\d|[CFGP]\d{1,2})\b")
#: What a document names and a run makes.
_MADE = {"reports/"}
#: Folders whose files may name a case.
_CODE = (PACKAGE, "tests", "benchmarks", "standin")


def _named_in(text: str) -> set[str]:
    found = set(_IN_TEXT.findall(text))
    for name in _IN_NAME.findall(text):
        found.update(name.strip("_").upper().split("_"))
    return found


def files() -> dict[str, list[str]]:
    """The test files that name each case, below ``tests/``."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for case in _named_in(path.read_text("utf-8")):
            found[case].append(path.relative_to(ROOT / "tests").as_posix())
    return found


def column(case: str, held: dict[str, list[str]]) -> str:
    """The last cell of a row."""
    return " " + ", ".join(f"`{name}`" for name in held[case]) + " "


def test_every_case_that_is_named_has_a_row_with_the_tests_that_hold_it() -> None:
    held = files()
    shown = {row[1]: row[3] for row in _ROW.finditer(CASES.read_text("utf-8"))}
    assert shown == {case: column(case, held) for case in held}, (
        "add the case, then run: python tests/surfaces/test_docs.py"
    )


def test_no_code_names_a_case_without_a_row() -> None:
    rows = {row[1] for row in _ROW.finditer(CASES.read_text("utf-8"))}
    for folder in _CODE:
        for path in (ROOT / folder).rglob("*.py"):
            unknown = _named_in(path.read_text("utf-8")) - rows
            assert not unknown, f"{path.relative_to(ROOT)}: {unknown}"


def test_the_formulas_of_the_automatic_waits_are_those_of_the_policy() -> None:
    text = " ".join((ROOT / "docs" / "operation.md").read_text("utf-8").split())
    found = re.search(
        r"W = max\((\d+), (\d+) S\) seconds old, half the wait budget at most, and W/n where n "
        r"models are waited for, W/(\d) at least; a model is kept for S/(\d), (\d+) to (\d+) "
        r"seconds and a quarter of the wait budget at most",
        text,
    )
    assert found is not None
    least, times, parts, half, shortest, longest = map(float, found.groups())
    dials = Dials(budget=1000.0)
    assert [dials.age_for(s) for s in (0.0, 10.0, 99.0)] == [least, 10 * times, 500.0]
    assert [dials.share(120.0, n) for n in (1, 2, 9)] == [120.0, 60.0, 120.0 / parts]
    lingers = [shortest, 10 / half, longest]
    assert [dials.linger_for(s) for s in (0.0, 10.0, 99.0)] == lingers
    assert Dials(budget=20.0).linger_for(99.0) == 20.0 / 4


def _anchors(text: str) -> set[str]:
    return {
        re.sub(r"[^a-z0-9 _-]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text("utf-8")), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_are_there(document: Path) -> None:
    """Paths in backticks, as they are from the root or from the package."""
    text = document.read_text("utf-8")
    for name in set(re.findall(r"`([a-z_.]+/[a-z_/.]*)`", text)):
        if name not in _MADE:
            places = (ROOT, ROOT / "omlx_admission", ROOT / "tests", document.parent)
            assert any((place / name).exists() for place in places), name


def _allowed() -> dict[str, set[str]]:
    """What each folder may import, by the table of layers."""
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    table = text.split("\n## Layers\n")[1].split("\n\n`hooks/` has")[0]
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|[^|]*\|([^|]*)\|$", table, re.MULTILINE)
    folders = {folder for folder, _ in rows}
    return {
        folder: folders if cell.strip() == "all" else set(re.findall(r"`(\w+)", cell))
        for folder, cell in rows
    }


def _imports(path: Path) -> set[str]:
    """Our folders that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found.update(name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}."))
    return found


def test_imports_go_the_ways_that_the_design_says() -> None:
    allowed = _allowed()
    assert {"core", "gpu", "hooks", "surfaces"} <= allowed.keys()
    for folder, others in allowed.items():
        root = ROOT / PACKAGE / folder
        for path in root.rglob("*.py") if root.is_dir() else [root.with_suffix(".py")]:
            ways = _imports(path) - others - {folder, *_FREE}
            assert not ways, f"{path.relative_to(ROOT)} imports {ways}"


def test_only_one_hook_knows_the_surfaces() -> None:
    hooks = (ROOT / PACKAGE / "hooks").rglob("*.py")
    knows = [path.name for path in hooks if "surfaces" in _imports(path)]
    assert knows == ["surfaces.py"]


def write() -> None:
    """Put the test files into the table of cases."""
    held = files()
    text = CASES.read_text("utf-8")
    CASES.write_text(
        _ROW.sub(lambda row: f"| {row[1]} |{row[2]}|{column(row[1], held)}|", text), "utf-8"
    )


if __name__ == "__main__":
    write()
