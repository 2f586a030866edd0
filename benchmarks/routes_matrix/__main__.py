"""Every route by every outcome: ``python -m benchmarks.routes_matrix [--omlx-src DIR]``.

Starts a stock and a patched server, makes the moments, asks at every route and prints
what came back: status, headers that stock clients obey, shape and code of the body.
1 where the patched server answered anything but what it should.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import standin
from benchmarks.arguments import checkout
from benchmarks.routes_matrix.outcomes import OUTCOMES, Outcome
from benchmarks.routes_matrix.routes import BROKEN, KEY, MEMORY_GB, Reply, make_models
from benchmarks.routes_matrix.table import problems, render
from standin.server import Server

#: Seconds of a load.
_LOAD_S = 0.3

_HEAD = """# What every route answers

Written by `python -m benchmarks.routes_matrix --omlx-src DIR --omlx-python PATH --write FILE`
from real requests to oMLX {version}, without and with this package, on tiny models.
Transcription, speech and audio processing are the real routes and the real pool; their
engines load nothing and answer something made up, because the tiny models are no speech
models.

A cell has the status, the headers that stock clients obey, and the shape of an error's body
with its type and its code. `detail` is the body of routes outside `/v1/`. Streams are refused
with their status, before the first byte, like everything else; only a stream that has waited
for `OMLX_ADMISSION_STREAM_HOLD_S` has its 200 already, and ends with an error event.
The realtime socket of transcription is not here: it is always accepted, and where its model is
refused it gets an error frame with the reason, as in stock.
"""


def measure(
    source: Path, python: str | None, root: Path, outcomes: Sequence[Outcome]
) -> dict[str, dict[str, dict[str, Reply]]]:
    """Outcome to ``stock`` or ``patched`` to route to reply.

    Outcomes that need the same variables meet the same server, one after the other.
    """
    models = make_models(root / "models")
    found: dict[str, dict[str, dict[str, Reply]]] = {o.name: {} for o in outcomes}
    for environment in dict.fromkeys(o.environment for o in outcomes):
        for name in ("stock", "patched"):
            extra = {"python": python} if python else {}
            with Server(
                models,
                root / f"{len(environment)}-{name}",
                patched=name == "patched",
                source=source,
                plan={"load_s": _LOAD_S, "failing": BROKEN, "pretend_audio": True},
                environment={"OMLX_API_KEY": KEY, **dict(environment)},
                memory_gb=MEMORY_GB,
                start_s=300.0,
                **extra,
            ) as server:
                for outcome in (o for o in outcomes if o.environment == environment):
                    print(f"... {outcome.name}, {name}", file=sys.stderr, flush=True)
                    found[outcome.name][name] = asyncio.run(outcome.moment(server))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routes_matrix", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=None, metavar="PATH")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE")
    parser.add_argument(
        "--only", action="append", default=[], choices=[o.name for o in OUTCOMES]
    )
    options = parser.parse_args(argv)
    wanted = [o for o in OUTCOMES if not options.only or o.name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.omlx_src.resolve(), options.omlx_python, Path(folder), wanted)
    by_name = {outcome.name: outcome for outcome in OUTCOMES}
    text = render(found, by_name)
    print(text)
    if options.write is not None:
        head = _HEAD.format(version=_version(options.omlx_src))
        options.write.write_text(f"{head}\n{text}\n", encoding="utf-8")
    missed = [
        line for outcome in wanted for line in problems(outcome, found[outcome.name]["patched"])
    ]
    for line in missed:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if missed else 0


def _version(source: Path) -> str:
    names: dict[str, str] = {}
    exec((source / "omlx" / "_version.py").read_text(encoding="utf-8"), names)
    return names["__version__"]


if __name__ == "__main__":
    raise SystemExit(main())
