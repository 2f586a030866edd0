"""``omlx-admission upstream``: what this package does, as commits in a checkout of oMLX."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from omlx_admission.surfaces.cli import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--checkout", type=Path, required=True, metavar="DIR", help="a git checkout of oMLX"
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--change", metavar="NAME", help="the change to make, or all")
    action.add_argument(
        "--list", action="store_true", help="say which changes there are and what fits here"
    )
    parser.add_argument(
        "--branch", metavar="B", help="create this branch for them (default: the current one)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the change, one commit each. Exit status 2: refused, and nothing was changed."""
    try:
        from omlx_admission.upstream import apply, change
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "black":
            raise
        raise CommandError(
            f"{error.name} is missing: pip install '/path/to/omlx-admission[upstream]'"
        ) from None
    if arguments.list and arguments.branch is not None:
        raise CommandError("--branch says where to make a change; --list makes none")
    # Syntax trees of ten thousand lines come and go, each of half a million objects, and
    # none of them waits for the collector.
    gc.disable()
    try:
        if arguments.list:
            apply.show(arguments.checkout)
        else:
            apply.make(arguments.checkout, arguments.change, arguments.branch)
    except change.Refused as error:
        raise CommandError(str(error)) from None
    finally:
        gc.enable()
    return 0
