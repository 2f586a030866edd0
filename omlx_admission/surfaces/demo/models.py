"""The four tiny models of the demo, and the memory in which one main model fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: ``--memory-guard-gb`` of the demo's servers. The sizes below are what oMLX
#: counts (times 1.05), not what the models use. ``A`` leaves 1.4 GB for the
#: process itself; ``A`` with ``D`` stays under oMLX's soft limit of 85 %, above
#: which it evicts; and none exceeds 2 GB but ``C``: a larger model would have
#: oMLX wait ten seconds at its unload for memory that was never used.
MEMORY_GB = 3.4


@dataclass(frozen=True)
class Model:
    """One model: the letter in tables and pictures, the name that is asked for."""

    letter: str
    name: str
    counted_bytes: int
    what: str


A = Model("A", "demo-a", 2_000_000_000, "resident at the start")
B = Model("B", "demo-b", 2_000_000_000, "as large as A: both do not fit")
C = Model("C", "demo-huge", 5_000_000_000, "larger than the memory: never fits")
D = Model("D", "demo-small", 300_000_000, "small: fits beside A")
MODELS = (A, B, C, D)


def make(directory: Path) -> None:
    """Write all models below ``directory``: sparse files, a few seconds at most."""
    from omlx_admission.surfaces.demo.tinymodels import make_text_model

    for seed, model in enumerate(MODELS):
        # 300 tokens per second on one CPU core: a stream of seconds has hundreds
        # of tokens, and a short answer takes less than a tenth of a second.
        make_text_model(
            directory,
            name=model.name,
            counted_bytes=model.counted_bytes,
            seed=seed,
            hidden=256,
            layers=4,
        )
