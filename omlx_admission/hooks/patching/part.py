"""One piece of a feature, and what every piece is given when it is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.settings import Settings


@dataclass(frozen=True)
class Wanted:
    """Which features are to be applied, known before the first one is."""

    settings: Settings
    features: frozenset[str]


#: Given the imported module: changes it, and enters each change in the ledger.
Apply = Callable[[Any, Ledger, Wanted], None]


@dataclass(frozen=True)
class Part:
    """Applied when ``module`` has been imported.

    Attributes:
        feature: its name, which the register fills in.
        optional: the feature is whole without it: its module is not always imported.
    """

    module: str
    apply: Apply
    optional: bool = False
    feature: str = ""
