"""The names, signatures and kinds that the hooks hold on to (see ``shapes.txt``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet


def _shapes() -> list[tuple[str, str, SpecifierSet]]:
    found, module = [], ""
    lines = (Path(__file__).parent / "shapes.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("["):
            module = line.strip("[]")
        elif "|" in line and not line.startswith("#"):
            name, shape, *releases = (part.strip() for part in line.split("|"))
            found.append((f"{module}:{name}", shape, SpecifierSet(*releases)))
    return found


def _fits(shape: str, found: dict[str, Any] | None) -> bool:
    kind, *rest = shape.split()
    if found is None or kind == "absent":
        return found is None and kind == "absent"
    if found["kind"] != kind:
        return False
    if kind == "class":
        return set(rest) <= set(found["bases"])
    if kind == "dataclass":
        return set(rest) <= set(found["fields"])
    if "parameters" in found:
        given = found["parameters"]
        return given[: len(rest) - 1] == rest[:-1] if rest[-1:] == ["..."] else given == rest
    return not rest or found["value"] == rest[0]


SHAPES = _shapes()


@pytest.mark.parametrize("name", sorted({name for name, _, _ in SHAPES}))
def test_shape(target: Any, home: Path, name: str) -> None:
    found = target.probe("names.py", home).get(name)
    for other, shape, releases in SHAPES:
        # A pre-release of a version counts as that version.
        if other == name and releases.contains(target.version.base_version):
            assert _fits(shape, found), f"{name} should be {shape!r}, is {found}"
