"""All figures in one table: ``python -m benchmarks [--quick] [--omlx-src DIR ...]``.

Simulated rows put our policy beside strict first come first served, exhaustive (the
rule of Ollama, llama-swap and the llama.cpp router) and gated service, on the same
traces. Then what the queue and the hot path cost in this process, as ratios. With
``--servers`` also whole servers, stock beside patched. Every row says what it ran on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import compare, queue_cost
from benchmarks.table import Row, render
from omlx_admission import standin


def machine() -> str:
    """What the rows with wall-clock times ran on."""
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def queue_rows(quick: bool) -> Iterator[Row]:
    """Cost of one waiter at four queue lengths, and the longest block of the loop."""
    plan = {10: 200, 100: 60, 1000: 15, 10_000: 5}
    if quick:
        plan = {waiters: max(2, rounds // 5) for waiters, rounds in plan.items()}
    costs = {waiters: queue_cost.measure(waiters, rounds) for waiters, rounds in plan.items()}
    on = f"runtime in process, {machine()}"
    for waiters, cost in costs.items():
        yield Row(
            f"enter and wake, each of {waiters} waiters, us",
            {"ours": f"{cost.enter_s * 1e6:.1f} + {cost.wake_s * 1e6:.1f}"},
            on,
        )
    ratio = costs[10_000].total_s / costs[10].total_s
    worst = costs[10_000].total_s / min(c.total_s for c in costs.values())
    yield Row(
        "enter and wake, 10,000 waiters against 10 (against the cheapest)",
        {"ours": f"{ratio:.2f} ({worst:.2f})"},
        on,
        "<= 1.5",
        ratio <= 1.5,
    )
    block = costs[10_000].block_s
    yield Row(
        "longest block of the loop while 10,000 are released, ms",
        {"ours": f"{block * 1e3:.1f}"},
        on,
        "<= 5",
        block <= 5e-3,
    )


def hot_path_row(source: Path, python: str, quick: bool) -> Row:
    """``get_engine`` of a loaded model in a process of its own."""
    name = "the stand-in" if source == standin.PATH else source.name
    command = [python, "-m", "benchmarks.hot_path", "--omlx-src", str(source)]
    here = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(here), str(source)])
    done = subprocess.run(
        [*command, "--rounds", "5" if quick else "15"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMLX_ADMISSION": "0"},
        check=False,
    )
    what = "get_engine of a loaded model, patched / stock"
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return Row(what, {"ours": "not measured"}, f"{name}: {reason[0]}")
    found = json.loads(done.stdout)
    stock, patched = found["stock"] * 1e6, found["patched"] * 1e6
    return Row(
        what,
        {"ours": f"{found['ratio']:.2f} ({stock:.1f} -> {patched:.1f} us)"},
        f"pool of {name}, {machine()}",
        "<= 1.0",
        found["ratio"] <= 1.0,
    )


def server_rows(sources: Sequence[Path], python: str | None) -> Iterator[Row]:
    """Whole servers, stock beside patched."""
    from benchmarks import server

    for source in sources:
        name = "the stand-in" if source == standin.PATH else source.name
        with tempfile.TemporaryDirectory() as folder:
            found = server.measure(source, python, Path(folder))
        for what in dict.fromkeys(row.what for row in found):
            values = {
                ("ours" if r.server == "patched" else r.server): r.value
                for r in found
                if r.what == what
            }
            yield Row(what, values, f"server of {name}, tiny models, {machine()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the picture; 1 where an aim was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="short runs, for CI; aims are shown, not enforced"
    )
    parser.add_argument(
        "--omlx-src",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="a real oMLX to measure as well; may be repeated",
    )
    parser.add_argument(
        "--omlx-python",
        default=None,
        metavar="PATH",
        help="Python that has what that oMLX needs",
    )
    parser.add_argument("--servers", action="store_true", help="whole servers too (minutes)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-out"),
        metavar="DIR",
        help="folder for the picture",
    )
    options = parser.parse_args(argv)
    for source in options.omlx_src:
        if not (source / "omlx" / "engine_pool.py").is_file():
            parser.error(f"--omlx-src {source}: no omlx/engine_pool.py in it")
    if options.omlx_python and not Path(options.omlx_python).is_file():
        parser.error(f"--omlx-python {options.omlx_python}: no such file")
    effort = compare.Effort.of(quick=options.quick)
    rows: list[Row] = list(queue_rows(options.quick))
    rows.append(hot_path_row(standin.PATH, sys.executable, options.quick))
    python = options.omlx_python or sys.executable
    rows += [
        hot_path_row(source.resolve(), python, options.quick) for source in options.omlx_src
    ]
    for row in compare.rows(effort):
        print(f"... {row.what}", file=sys.stderr, flush=True)
        rows.append(row)
    if options.servers:
        rows += server_rows([standin.PATH], None)
        rows += server_rows([s.resolve() for s in options.omlx_src], options.omlx_python)
    print(render(rows))
    try:
        from benchmarks import picture

        path = options.out / "waits-against-swaps.png"
        picture.draw(path, effort)
        print(f"\npicture: {path}")
    except ModuleNotFoundError as error:
        print(
            f"\nno picture: {error}; pip install '/path/to/omlx-admission[demo]'",
            file=sys.stderr,
        )
    missed = [row.what for row in rows if row.kept is False]
    if missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    raise SystemExit(main())
