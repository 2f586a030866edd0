"""``omlx-admission``: one subcommand per module, imported only when asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from omlx_admission import __version__

# name -> (module with add_arguments(parser) and run(args) -> int, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": (
        "omlx_admission.surfaces.doctor",
        "say which oMLX was found and what is patched in it, without starting a server",
    ),
    "demo": (
        "omlx_admission.surfaces.demo",
        "stock and patched side by side on three tiny models",
    ),
    "top": (
        "omlx_admission.surfaces.top",
        "follow a running server: loaded models, waiting requests and why they wait",
    ),
    "report": (
        "omlx_admission.surfaces.report",
        "GPU exposure and lockups counted so far, and what they prove about turns",
    ),
    "repro": (
        "omlx_admission.surfaces.repro",
        "two threads, two MLX streams, with and without turns: does the GPU hang?",
    ),
    "upstream": (
        "omlx_admission.surfaces.upstream",
        "make this package's changes in a checkout of oMLX, one commit each",
    ),
}


class CommandError(Exception):
    """A user's mistake or a missing piece: shown as one line, exit status 2."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; subcommand modules are not imported yet."""
    parser = argparse.ArgumentParser(
        prog="omlx-admission",
        description="Cross-model admission for oMLX: queue, drain, swap, serve.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_module, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status; 2 means the call itself was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known, rest = build_parser().parse_known_args(arguments)
    module_name, text = COMMANDS[known.command]
    try:
        module = importlib.import_module(module_name)
        parser = argparse.ArgumentParser(
            prog=f"omlx-admission {known.command}", description=text
        )
        module.add_arguments(parser)
        status = int(module.run(parser.parse_args(rest)))
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"omlx-admission {known.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, `head` perhaps, has what it wanted; Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"omlx-admission {known.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # The module under its own name: as `__main__` it would have a second
    # CommandError, which the commands do not raise.
    sys.exit(importlib.import_module("omlx_admission.surfaces.cli").main())
