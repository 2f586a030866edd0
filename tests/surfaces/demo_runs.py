"""Made-up runs in which everything is as wanted, for the demo's tests to break."""

import json
from collections.abc import Iterable
from pathlib import Path

from omlx_admission.surfaces.demo import models, scenarios
from omlx_admission.surfaces.demo.client import Answer
from omlx_admission.surfaces.demo.models import A, B, C, D, Model
from omlx_admission.surfaces.demo.runs import Run
from omlx_admission.surfaces.demo.stage import STREAM, Measures, Played
from omlx_admission.surfaces.demo.watch import Sample

TOKENS = 12
MEASURES = Measures(load=2.0, swap=2.2, alone=0.1, tokens=TOKENS)
START = 100.0
REFUSED = {"error": {"message": "no", "type": "server_error", "param": None, "code": "x"}}


def answer(
    model: Model, label: str, start: float, end: float, status: int = 200, **more: str
) -> Answer:
    """A complete answer; ``start`` and ``end`` are seconds of the scenario."""
    body = {"choices": []} if status == 200 else REFUSED
    return Answer(
        label,
        model.name,
        START + start,
        status=status,
        headers={k.replace("_", "-"): v for k, v in more.items()},
        first_byte=START + end - 0.05,
        ended=START + end,
        body=json.dumps(body),
        whole=True,
    )


def stream(end: float, tokens: int = TOKENS) -> Answer:
    """The long stream on A, in four pieces."""
    piece = tokens // 4
    events = [{"choices": [{"delta": {"content": "a" * piece}}]} for _ in range(4)]
    lines = [f"data: {json.dumps(e)}\n\n" for e in events]
    made = answer(A, STREAM, 0.0, end)
    made.first_byte = START + 0.05
    made.body = "".join([*lines, "data: [DONE]\n\n"])
    made.chunks = [START + end * n / 4 for n in range(1, 5)]
    return made


def samples(*phases: tuple[float, Iterable[Model], Iterable[Model]]) -> list[Sample]:
    """A look every tenth of a second; a phase is (until, resident, loading)."""
    found, now = [], 0.0
    for until, loaded, loading in phases:
        names = frozenset(m.name for m in loaded), frozenset(m.name for m in loading)
        while now < until - 1e-9:
            found.append(Sample(START + now, *names))
            now += 0.1
    return found


def right(name: str) -> Played:
    """One scenario on a server that does everything that is wanted."""
    match name:
        case "busy":
            answers = [
                stream(3.0),
                answer(B, "B while A streams", 0.5, 5.6),
                answer(A, "A again, B waiting", 1.0, 1.2),
            ]
            seen = samples((3.5, [A], []), (5.5, [], [B]), (5.8, [B], []))
        case "cold":
            answers = [
                answer(B, "B, cold, A idle", 0.0, 2.5),
                answer(A, "A while B loads", 1.0, 5.0),
            ]
            seen = samples(
                (0.4, [A], []), (2.4, [], [B]), (2.9, [B], []), (4.9, [], [A]), (5.1, [A], [])
            )
        case "neighbour":
            answers = [
                *(answer(A, "A alone", n / 10, (n + 1) / 10) for n in range(8)),
                answer(D, "D, cold, fits beside A", 0.8, 2.9),
                *(answer(A, "A while D loads", 1 + n / 10, 1.1 + n / 10) for n in range(19)),
            ]
            seen = samples((0.8, [A], []), (2.8, [A], [D]), (3.0, [A, D], []))
        case "budget":
            label = f"B, waits {scenarios.BUDGET_S:g} s at most"
            answers = [stream(3.0), answer(B, label, 0.5, 1.5, 503, retry_after="8")]
            seen = samples((3.0, [A], []))
        case _:
            answers = [
                answer(C, "C, larger than the memory", 0.0, 0.02, 507),
                answer(A, "A afterwards", 0.02, 0.12),
            ]
            seen = samples((0.2, [A], []))
    end = max(a.ended for a in answers) + 0.01
    return Played(name, START, end, answers, seen, MEASURES)


def whole_run(mode: str) -> Run:
    """All scenarios, as wanted."""
    played = [right(scenario.name) for scenario in scenarios.SCENARIOS]
    return Run(mode, MEASURES, played, active=mode == "patched")


def half_an_omlx(source: Path, version: str) -> Path:
    """A package ``omlx`` that can be found and cannot serve."""
    package = source / "omlx"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "engine_pool.py").touch()
    (package / "_version.py").write_text(f'__version__ = "{version}"\n')
    return package


assert models.MODELS == (A, B, C, D)
