"""Our modules as oMLX's: a rule that is of no use is an error, and imports are oMLX's style."""

from __future__ import annotations

import pytest

from omlx_admission.upstream import transplant as made
from omlx_admission.upstream.transplant import Recipe, StaleRecipe, transplant

TEXT = '''
"""A module."""

from __future__ import annotations

import sys
import asyncio
from typing import Any, Iterable

from omlx_admission.gpu.policy import turn


def first(name: str) -> Any:
    """Of two."""
    import mlx.core as mx

    # Why it is asked.
    return mx, turn, sys, name


def second() -> Any:
    import mlx.core as mx

    return mx
'''

RESULT = '''
# SPDX-License-Identifier: Apache-2.0
"""A module."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from . import queue as turn


def first(name: str) -> Any:
    """Of two."""
    # Why it is asked.
    return mx, turn, sys, name


def second() -> Any:
    return mx
'''


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = made.cst.parse_module
    monkeypatch.setattr(made, "source", lambda _name: parse(TEXT.lstrip()))


def test_imports_are_of_what_is_used_and_grouped() -> None:
    recipe = Recipe(
        "any", rewrite={"import mlx.core as mx": None}, imports="import mlx.core as mx\n"
    )
    assert transplant(recipe, {"gpu.policy.turn": "queue"}) == RESULT.lstrip()


def test_what_is_used_has_to_be_in_the_new_package() -> None:
    with pytest.raises(StaleRecipe, match=r"policy\.turn is used"):
        transplant(Recipe("any"), {})


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("any", drop=("third",)),
        Recipe("any", rewrite={"import numpy": None}),
        Recipe("any", rewrite={"second | import sys": None}),
        Recipe("any", text={"no such words": ""}),
        Recipe("any", keep=("third",)),
        Recipe("any", parameters={"third": ("name",)}),
        Recipe("any", drop_calls="third"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(recipe: Recipe) -> None:
    with pytest.raises(StaleRecipe):
        transplant(recipe, {"gpu.policy.turn": "queue"})
