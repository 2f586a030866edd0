"""Drift: ``python -m benchmarks.mutations [--omlx-src DIR --omlx-python PY --serve N]``.

Makes each mutation of a checkout (see the package's text), compares the gate's verdicts
with the right ones, applies the hooks to the mutated modules in this process, and with
``--serve N`` starts whole servers, without the package and with it, on N of them, every
kind of change first. The in-process part needs a Python that has what that oMLX needs.
Exit status 1: a verdict was wrong, a wrapper went astray, or a server was broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mutations import apply, serve, suite
from benchmarks.mutations.model import Mutation, Outcome
from omlx_admission import _startup, standin
from omlx_admission.hooks import gate


def run(
    root: Path, mutations: Sequence[Mutation], *, in_process: bool, folder: Path
) -> list[Outcome]:
    """The verdicts on all mutations, and the hooks on their modules."""
    outcomes = []
    models = apply.models(folder / "models") if in_process else None
    with suite.checkout(root) as made, suite.quick_judging():
        for at, mutation in enumerate(mutations):
            if at % 100 == 0:
                print(f"... {at} of {len(mutations)}", file=sys.stderr, flush=True)
            with made.changed(mutation) as source:
                outcome, report = suite.judge(source, mutation)
                if models is not None:
                    outcome.faults = apply.compare(source, mutation, report, models)
                    outcome.applied = True
            outcomes.append(outcome)
    return outcomes


def run_servers(
    root: Path, outcomes: Sequence[Outcome], count: int, python: str | None, folder: Path
) -> int:
    """Whole servers on ``count`` of the mutations; returns how many that were."""
    chosen = {m.name for m in suite.sample([o.mutation for o in outcomes], count)}
    models = serve.model(folder / "served")
    done = 0
    with suite.checkout(root) as made:
        for outcome in outcomes:
            if outcome.mutation.name not in chosen:
                continue
            done += 1
            print(f"... server {done}: {outcome.mutation.name}", file=sys.stderr, flush=True)
            with made.changed(outcome.mutation) as source:
                answers = [
                    serve.ask(source, python, models, folder / f"base{done}{patched}", patched)
                    for patched in (False, True)
                ]
            outcome.served = " -> ".join(map(str, answers))
            problem = serve.problem(*answers)
            if problem is not None:
                outcome.faults.append(f"server: {problem}")
    return done


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each kind of change."""
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.mutation.kind, []).append(outcome)
    width = max(map(len, kinds))
    lines = [f"{'change':<{width}}  mutations  features off  applied  served  wrong"]
    for kind, group in kinds.items():
        off = sorted({o.refused for o in group})
        span = str(off[0]) if len(off) == 1 else f"{off[0]} to {off[-1]}"
        lines.append(
            f"{kind:<{width}}  {len(group):>9}  {span:>12}  "
            f"{sum(o.applied for o in group):>7}  "
            f"{sum(o.served is not None for o in group):>6}  "
            f"{sum(not o.good for o in group):>5}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutations", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--omlx-src", type=Path, default=standin.PATH, metavar="DIR")
    parser.add_argument(
        "--omlx-python", metavar="PATH", help="Python for the servers (default: this one)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutations")
    parser.add_argument("--serve", type=int, default=0, metavar="N", help="servers on N")
    parser.add_argument(
        "--verdicts-only", action="store_true", help="import nothing of that oMLX here"
    )
    options = parser.parse_args(argv)
    # The installed line must not act here: each side decides for itself.
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _startup.OmlxFinder)]
    try:
        root = gate.find(options.omlx_src).root.resolve()
    except gate.NoOmlx as error:
        parser.error(f"--omlx-src {error}")
    mutations = suite.generate(root)
    if options.sample is not None:
        mutations = suite.sample(mutations, options.sample)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["OMLX_BASE_PATH"] = str(folder / "base")
        if options.verdicts_only:
            outcomes = run(root, mutations, in_process=False, folder=folder)
        else:
            with apply.quiet():
                outcomes = run(root, mutations, in_process=True, folder=folder)
        run_servers(root, outcomes, options.serve, options.omlx_python, folder)
    print(table(outcomes))
    bad = [outcome for outcome in outcomes if not outcome.good]
    served = Counter(o.served for o in outcomes if o.served is not None)
    print(
        f"\n{len(outcomes)} mutations of {gate.find(options.omlx_src).version}, "
        f"{sum(o.refused > 0 for o in outcomes)} turn something off, {len(bad)} wrong"
    )
    if served:
        print("servers, without -> with: " + ", ".join(f"{n} x {s}" for s, n in served.items()))
    for outcome in bad:
        for text in (*outcome.wrong, *outcome.faults):
            print(f"{outcome.mutation.name}: {text}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
