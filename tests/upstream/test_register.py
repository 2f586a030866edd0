"""Cards, edits, tests and hooks name the same set of changes, so that none drifts."""

from __future__ import annotations

import re

import pytest

from omlx_admission.hooks.features import FEATURES
from omlx_admission.upstream import register
from omlx_admission.upstream.change import Change

CHANGES = register.changes()

#: What a maintainer asks, in this order.
HEADINGS = (
    "Problem",
    "Reproduction",
    "Change",
    "Risk",
    "Measured",
    "What it does not do",
)


@pytest.fixture(params=CHANGES.values(), ids=list(CHANGES))
def change(request: pytest.FixtureRequest) -> Change:
    found: Change = request.param
    return found


def test_every_folder_is_a_change_with_card_edit_and_tests() -> None:
    folders = {p.name for p in register.folder().iterdir() if p.is_dir()}
    folders -= {name for name in folders if name.startswith(("_", "."))}
    assert folders == set(CHANGES) == set(register.ORDER)
    for found in CHANGES.values():
        assert found.card.is_file(), found.name
        assert found.tests, found.name


def test_the_readme_lists_them_with_their_features() -> None:
    text = (register.folder() / "README.md").read_text()
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(\1/card\.md\) \| (.*?) \| (.*?) ?\|$", text, re.M)
    assert [name for name, _, _ in rows] == list(CHANGES)
    for name, features, after in rows:
        assert tuple(re.findall(r"`(\w+)`", features)) == CHANGES[name].features
        assert tuple(re.findall(r"`([\w-]+)`", after)) == CHANGES[name].after


def test_every_feature_knows_how_to_see_its_change(change: Change) -> None:
    native = {feature.name: feature.native for feature in FEATURES}
    assert change.features or change.native
    for name in change.features:
        assert native[name], f"{name} would be wrapped on top of {change.name}"


def test_what_a_change_stands_on_comes_before_it(change: Change) -> None:
    names = list(CHANGES)
    assert all(names.index(other) < names.index(change.name) for other in change.after)


def test_a_card_answers_what_a_maintainer_asks(change: Change) -> None:
    text = change.card.read_text()
    assert text.startswith(f"# {change.title}\n")
    assert tuple(re.findall(r"^## (.*)$", text, re.M)) == HEADINGS
    for number in change.issues:
        assert f"[#{number}](https://github.com/jundot/omlx/issues/{number})" in text
    for feature in change.features:
        assert f"`{feature}`" in text
    for path in change.edits:
        assert f"`omlx/{path}`" in text


def test_a_commit_message_is_one_that_a_maintainer_would_take(change: Change) -> None:
    subject, empty, *body = change.commit_message().splitlines()
    assert len(subject) <= 72
    # As most of oMLX's own are.
    kind, word = re.fullmatch(r"(\w+\(\w+\)): ([a-z]+) .*[^.]", subject).groups()  # type: ignore[union-attr]
    assert kind.partition("(")[0] in {"feat", "fix"}
    # Imperative: neither "adds" nor "added".
    assert not re.search(r"(s|ed|ing)$", word)
    assert empty == ""
    assert max(map(len, body)) <= 80
    assert body[-1] == "Refs: " + ", ".join(f"#{number}" for number in change.issues)
