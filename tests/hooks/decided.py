"""The decision for the oMLX of this process, made once for each set of variables."""

from __future__ import annotations

import copy
import functools

from omlx_admission.hooks import install
from omlx_admission.settings import Settings

#: Its sources are read in full, which takes a second where they are real.
_once = functools.cache(lambda settings: install.decide(settings=settings))


def decided(settings: Settings) -> install.Report:
    """A report of one's own: what is applied is written down in it."""
    return copy.deepcopy(_once(settings))
