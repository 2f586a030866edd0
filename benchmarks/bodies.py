"""Write the table of function bodies that were run (`bodies.txt`, see `patching/bodies.py`).

Give it the checkout of every release that this package was run on: the table is made anew
from them. Its names stay; a new one is added to the file by hand, alone on its line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import standin
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.patching import bodies, gate

HEAD = """\
# Functions of oMLX whose bodies the hooks rely on: name, fingerprint of the body, releases.
# `stand-in` is there where a row demands a body that was run. What this is for is told in
# bodies.py. Written by: python -m benchmarks.bodies DIR...
"""


def table(sources: Iterable[Path], names: Iterable[str]) -> str:
    """The whole file for ``names``, from one checkout of each release."""
    demanded = {str(n) for f in FEATURES for n in f.needs if n.run}
    read = {found.version or "?": found for found in map(gate.find, sources)}
    read["stand-in"] = gate.find(standin.PATH)
    releases = {version: gate.Source(found) for version, found in read.items()}
    lines = [HEAD]
    for name in names:
        found: dict[str, list[str]] = {}
        for version, source in releases.items():
            body = source.fingerprint(name)
            if body is not None and (version != "stand-in" or name in demanded):
                found.setdefault(body, []).append(version)
        lines += [f"{name} {body} {' '.join(there)}\n" for body, there in found.items()]
    return "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bodies", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("sources", type=Path, nargs="+", metavar="DIR")
    options = parser.parse_args(argv)
    lines = bodies.TABLE.read_text("utf-8").splitlines()
    names = dict.fromkeys(line.split()[0] for line in lines if line and line[0] != "#")
    bodies.TABLE.write_text(table(options.sources, names), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
