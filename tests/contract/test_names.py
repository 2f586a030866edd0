"""The register's rows on the imported oMLX: what the gate reads in a source is so.

The rows are those of `hooks.features`; this suite has no list of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import standin
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.patching import gate
from omlx_admission.hooks.patching.gate import Kind, Need


def rows_for(target: Any) -> list[Need]:
    """Rows about one name; the others are about a module's own code.

    But for those of parking on the stand-in, which decodes without mlx-lm's batches.
    """
    features = [f for f in FEATURES if f.name != "park" or target.source != standin.PATH]
    needs = dict.fromkeys(need for f in features for need in f.needs)
    return [need for need in needs if need.kind not in (Kind.USED, Kind.JOBS)]


def problem(need: Need, found: dict[str, Any] | None) -> str | None:
    """Why what was found, None: nothing, is not what the row says."""
    if found is None:
        # Attributes of instances are not seen on their class.
        hidden = "." in need.name and need.kind in (Kind.VALUE, Kind.NAME)
        return None if need.optional or hidden else "it is missing"
    if need.kind in (Kind.VALUE, Kind.NAME):
        return None  # a value may well be a function
    if found["kind"] != need.kind.value:
        return f"it is a {found['kind']}"
    if need.bases is not None and found["bases"] != list(need.bases):
        return f"it is a kind of {found['bases']}"
    if need.params is None:
        return None
    given = [name for name in found["parameters"] if name not in ("self", "*")]
    wanted, _, named = ",".join(need.params).partition("*")
    in_place = [p.partition("=")[0] for p in wanted.split(",") if p]
    by_name = {p.partition("=")[0] for p in named.split(",") if p}
    fits = given[: len(in_place)] == in_place and by_name <= {*given}
    return None if fits else f"it takes {found['parameters']}"


def test_every_row_is_what_it_says(target: Any, home: Path) -> None:
    rows = rows_for(target)
    names = json.dumps([(need.module, need.name) for need in rows])
    found = target.probe("names.py", home, OMLX_NAMES=names)
    assert len(found) > len(rows) / 2
    problems = {str(need): problem(need, found.get(str(need))) for need in rows}
    assert {name: text for name, text in problems.items() if text is not None} == {}


def test_the_gate_reads_the_same_in_its_source(target: Any) -> None:
    source = gate.Source(gate.find(target.source))
    assert source.problems(rows_for(target)) == []


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "it is missing"),
        ({"kind": "function", "parameters": ["self", "a", "b"]}, "it is a function"),
        ({"kind": "coroutine function", "parameters": ["self", "b", "a"]}, "it takes"),
        ({"kind": "coroutine function", "parameters": ["self", "a"]}, "it takes"),
        ({"kind": "coroutine function", "parameters": ["self", "a", "x", "*", "b"]}, None),
    ],
)
def test_what_is_something_else_is_told(found: dict[str, Any] | None, text: str | None) -> None:
    told = problem(Need("omlx.x", "X.f", Kind.ASYNC, ("a", "*", "b")), found)
    assert told is None if text is None else (told or "").startswith(text)
