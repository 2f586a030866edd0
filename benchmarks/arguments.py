"""Options that several benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.doctor import check_source


def checkout(text: str) -> Path:
    """``--omlx-src``: a folder with an oMLX in it; one line where it is none."""
    path = Path(text)
    try:
        check_source(path)
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--omlx-src ")) from None
    return path
