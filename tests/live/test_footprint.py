"""P5: what has left stays on the footprint, for a moment or for good; no client is blamed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from omlx_admission.surfaces.demo.client import Client
from standin.server import Server

from .test_main_job import swaps

Serve = Callable[..., Server]

FOR_EVER = 1e6

#: A request that waits 2 s at most.
SHORT = {"X-OMLX-Max-Wait": "2"}


async def test_p5_five_swaps_with_bytes_that_leave_late(serve: Serve) -> None:
    server = serve(load_s=0.4, plan={"residue_s": 1.2})
    client = Client(server.url)
    answers = [await client.chat(model) for model in "ababab"]
    assert [a.status for a in answers] == [200] * 6, answers
    assert all(a.ok for a in answers), answers
    assert swaps(server) == [*"ababab"]


@pytest.mark.parametrize("stream", [False, True])
async def test_p5_bytes_that_never_leave(serve: Serve, stream: bool) -> None:
    """Neither the prompt nor the model is too large."""
    # No head of an answer is sent before its status is known, however busy the machine.
    held = {"OMLX_ADMISSION_STREAM_HOLD_S": "60"}
    server = serve(load_s=0.2, plan={"residue_s": FOR_EVER}, **held)
    client = Client(server.url)
    first, answer = [await client.chat(model, stream=stream) for model in "ab"]
    assert first.ok, first
    assert answer.status == 503, answer
    assert int(answer.headers["retry-after"]) >= 1
    assert json.loads(answer.body)["error"]["code"] == "model_busy", answer


async def test_p5_a_dip_at_a_granted_request(serve: Serve) -> None:
    """What is loaded is above the ceiling, which comes back: no prompt is at fault."""
    server = serve(ceiling_gb=2.7, load_s=0.2, plan={"residue_s": 0})
    client = Client(server.url)
    answers = [await client.chat("a")]
    server.set_ceiling(1.3)
    while answers[-1].ok and len(answers) < 100:
        answers.append(await client.chat("a", stream=False, headers=SHORT))
    server.set_ceiling(2.7)
    (*_, refused), served = answers, await client.chat("a")
    # Where oMLX has begun the answer, to keep the client waiting, its body says it.
    assert refused.status in (200, 503), refused
    assert "retry-after" in refused.headers or refused.status == 200, refused
    assert '"model_busy"' in refused.body or '"model_swap_timeout"' in refused.body, refused
    assert served.ok, served
