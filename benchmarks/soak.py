"""Everything at once for minutes: ``python -m benchmarks.soak [--omlx-src DIR]``.

See :mod:`benchmarks.mix`. Ends with status 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import standin
from benchmarks import mix
from benchmarks.arguments import checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--omlx-src", type=checkout, default=standin.PATH, metavar="DIR")
    parser.add_argument("--omlx-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where the server's log is to be kept")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models = mix.make_models(root / "models")
        with mix.server(
            models, root / "base", arguments.omlx_src, arguments.omlx_python
        ) as server:
            run = mix.Mix(server, arguments.seed)
            try:
                asyncio.run(run.run(60.0 * arguments.minutes))
            finally:
                if arguments.log:
                    arguments.log.write_text(server.log)
    for line in run.broken[:20]:
        print(f"BROKEN: {line}")
    if len(run.broken) > 20:
        print(f"and {len(run.broken) - 20} more")
    return int(bool(run.broken))


if __name__ == "__main__":
    sys.exit(main())
