"""A whole server on a mutated checkout, without the package and with it: one chat each.

With the package it answers 200, or what it answers without (a failed load: 500, not 409).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from omlx_admission.standin import tinymodels
from omlx_admission.surfaces.demo.client import Client
from omlx_admission.surfaces.demo.server import Server, ServerError

_ANSWER_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What came of one server: a status, or why there was none."""

    status: int | None
    text: str = ""

    def __str__(self) -> str:
        return str(self.status) if self.status is not None else self.text


def model(folder: Path) -> Path:
    """One tiny text model."""
    tinymodels.make_text_model(folder, name="a", seed=0)
    return folder


def ask(source: Path, python: str | None, models: Path, base: Path, patched: bool) -> Answer:
    """Start a server on ``source``, ask for one chat, end it."""
    extra = {"python": python} if python else {}
    server = Server(models, base, patched=patched, source=source, **extra)
    try:
        with server as running:
            answer = asyncio.run(
                asyncio.wait_for(Client(running.url).chat("a", tokens=4), _ANSWER_S)
            )
            return Answer(answer.status)
    except ServerError as error:
        # A port, a path or a time in the text differs from one server to the next.
        return Answer(None, "no server: " + str(error).partition(":")[0])
    except TimeoutError:
        return Answer(None, f"no answer within {_ANSWER_S:.0f} s")


def problem(stock: Answer, patched: Answer) -> str | None:
    """Why the server with the package did not do what it has to, or None."""
    if patched.status == 200 or patched == stock:
        return None
    # A load that fails is a conflict to stock, and a fault of the server with `errors`.
    if (stock.status, patched.status) == (409, 500):
        return None
    return f"with the package {patched}, without {stock}"
