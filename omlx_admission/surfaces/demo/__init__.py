"""``omlx-admission demo``: the reported failures replayed, stock beside patched.

Two servers run one after the other on the same tiny models. What is shown is
what a client saw; the picture adds which model was in memory meanwhile.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import omlx_admission
from omlx_admission._startup import OmlxFinder
from omlx_admission.surfaces.cli import CommandError
from omlx_admission.surfaces.demo.probe import missing_text

#: Scenarios, in the order in which they are played; a test holds it against
#: ``scenarios.SCENARIOS``, which needs packages that the command line does not.
NAMES = ("busy", "cold", "neighbour", "budget", "too-large")

#: What the demo itself imports, beside what its servers need.
_NEEDS = ("httpx", "matplotlib", "mlx", "tokenizers")

#: The stand-in's folder, beside the package in a checkout. No wheel has it.
STANDIN = Path(omlx_admission.__file__).resolve().parents[1] / "standin"

PICTURE = "omlx-admission-demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--omlx-src",
        type=Path,
        metavar="DIR",
        help="run the oMLX in this checkout (default: the oMLX of this Python, "
        "else the stand-in of the checkout that this package lies in)",
    )
    parser.add_argument(
        "--omlx-python",
        type=Path,
        metavar="PATH",
        help="Python that has what that oMLX needs (default: this one)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=NAMES,
        metavar="NAME",
        help=f"play only this scenario, may be given again: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the picture and the servers' logs (default: a new temporary one)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all results to FILE as JSON too"
    )
    parser.add_argument(
        "--load-seconds",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="how long a load takes; the tiny models load at once (default %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=0,
        metavar="N",
        help="port of the servers on the loopback interface (default: a free one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Play, show and check. Exit status 0: the patched server did all that is wanted;
    1: it missed something, or the plugin was not active in it."""
    if not (arguments.omlx_src or arguments.omlx_python or _has_omlx()):
        stand_in()  # before asking for packages that would not help
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise CommandError(missing_text(missing))
    if arguments.port:
        _check_port(arguments.port)
    if arguments.json is not None:
        _check_file(arguments.json)
    if arguments.out is not None:
        _check_folder(arguments.out)
    from omlx_admission.surfaces.demo.show import show

    with tempfile.TemporaryDirectory(prefix="omlx-admission-") as work:
        return show(arguments, Path(work))


def _has_omlx() -> bool:
    # Past our own finder, which takes the question for an import and hooks.
    finders = [finder for finder in sys.meta_path if not isinstance(finder, OmlxFinder)]
    return any(finder.find_spec("omlx", None) for finder in finders)


def stand_in() -> Path:
    """The folder of the stand-in; a CommandError where there is none."""
    if not (STANDIN / "omlx").is_dir():
        raise CommandError(
            f"{sys.executable} has no oMLX: name one with --omlx-src, or run the demo from a "
            "checkout of omlx-admission, which has a stand-in for it"
        )
    return STANDIN


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.5 <= value <= 30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0.5 to 30")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        # As servers do: a port in TIME_WAIT after an earlier run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CommandError(f"--port {port}: {reason}; name another one") from None


def _check_folder(wanted: Path) -> None:
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError as error:
        raise CommandError(f"--out {wanted}: {error.strerror or error}") from None


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise CommandError(f"--json {path}: is a directory")
    folder = path.parent
    if not folder.is_dir():
        raise CommandError(f"--json {path}: no such directory as {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"--json {path}: not writable")


def note(text: str) -> None:
    """A line for people beside the results, on standard error."""
    print(text, file=sys.stderr, flush=True)
