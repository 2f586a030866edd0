"""Grants keep pace with the engine, seen by clients: bursts are whole, a drain is short."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable

import pytest

from omlx_admission.surfaces.demo.client import Answer, Client
from standin.server import Server

from .conftest import loading, streaming, until

Serve = Callable[..., Server]


def assert_in_order(answers: list[Answer], slack: int) -> None:
    """None ends before one that came ``slack`` places ahead of it."""
    order = sorted(range(len(answers)), key=lambda i: answers[i].ended)
    for place, came in enumerate(order):
        assert abs(place - came) <= slack, f"the {came}th that came ended as the {place}th"


@pytest.mark.parametrize("burst", [44, 500])
async def test_c2_a_burst_behind_a_swap_is_answered_whole_and_in_order(
    serve: Serve, burst: int
) -> None:
    """oMLX's engine takes 40 and then breaks answers that are under way already."""
    server = serve(
        load_s=0.5,
        # The libraries that oMLX loads raise it to this.
        plan={"descriptors": 2048},
        OMLX_ADMISSION_MAX_WAIT_S="250",
        OMLX_ADMISSION_MAX_AGE_S="0",
    )
    client = Client(server.url, timeout=280)
    await client.chat("a")
    stream = await streaming(server)
    answers = await asyncio.gather(
        *(client.chat("b", tokens=12, stream=i % 2 == 0, delay=i * 0.004) for i in range(burst))
    )
    assert (await stream).ok
    broken = [a for a in answers if not a.ok]
    assert not broken, broken[:3]
    assert_in_order(answers, slack=60)


async def test_c25_a_burst_on_a_loaded_model_is_answered_whole(serve: Serve) -> None:
    server = serve(load_s=0.1)
    client = Client(server.url)
    await client.chat("b")
    answers = await asyncio.gather(
        *(client.chat("b", tokens=24, stream=i % 2 == 0) for i in range(60))
    )
    broken = [a for a in answers if not a.ok]
    assert not broken, broken[:3]


@pytest.mark.parametrize(("slots", "clients"), [(1, 6), (8, 60)])
async def test_c3_a_model_behind_a_long_queue_is_served_after_what_runs(
    serve: Serve, slots: int, clients: int
) -> None:
    """Once A's gate is closed, only what its engine has begun or holds next is sat out."""
    server = serve(
        load_s=0.3,
        arguments=["--max-concurrent-requests", str(slots)],
        OMLX_ADMISSION_MAX_AGE_S="1.5",
        OMLX_ADMISSION_MAX_WAIT_S="100",
    )
    client = Client(server.url)
    after_the_gate: list[Answer] = []
    await client.chat("a")
    done: list[Answer] = []
    begun = asyncio.Event()

    async def again_and_again() -> None:
        while True:
            answer = await client.chat("a", tokens=80 // slots)
            done.append(answer)
            begun.set()
            if re.search(r"'a' drains for 'b'", server.log):
                after_the_gate.append(answer)

    crowd = [asyncio.create_task(again_and_again()) for _ in range(clients)]
    await begun.wait()  # their queue is made
    for_b = await client.chat("b")
    before_b = [a for a in after_the_gate if a.ended < for_b.ended]
    for one in crowd:
        one.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert all(a.ok for a in done), [a for a in done if not a.ok][:3]
    assert for_b.ok, for_b
    # What runs, and what the engine holds next; one more may have ended as the gate closed.
    assert len(before_b) <= slots + max(1, slots // 4) + 1, len(before_b)


async def test_c7_a_batch_for_b_turns_nobody_away_from_a(serve: Serve) -> None:
    server = serve(load_s=0.3, OMLX_ADMISSION_MAX_QUEUE="10", OMLX_ADMISSION_MAX_AGE_S="0")
    client = Client(server.url)
    await client.chat("a")
    stream = await streaming(server)
    batch = [asyncio.create_task(client.chat("b")) for _ in range(15)]
    await asyncio.wait(batch, return_when=asyncio.FIRST_COMPLETED)  # a refusal
    for_a = await client.chat("a")
    assert (await stream).ok
    batch = await asyncio.gather(*batch)
    assert for_a.ok, for_a
    assert sorted(a.status for a in batch) == [200] * 10 + [503] * 5
    refused = next(a for a in batch if a.status == 503)
    assert "Model 'b' is not loaded and 10 requests wait already" in refused.body


async def test_c8_a_process_that_was_stopped_refuses_nobody_whose_model_comes(
    serve: Serve,
) -> None:
    server = serve(load_s=3.0, OMLX_ADMISSION_MAX_WAIT_S="8")
    client = Client(server.url)
    asked = [asyncio.create_task(client.chat("b", stream=i % 2 == 0)) for i in range(5)]
    await until(loading(client, "b"))
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(9.0)  # longer than the budget
    os.kill(server.pid, signal.SIGCONT)
    answers = await asyncio.gather(*asked)
    assert all(a.ok for a in answers), [a for a in answers if not a.ok]


async def test_c3_a_refused_waiter_is_served_when_it_returns(serve: Serve) -> None:
    """The drain goes on meanwhile: its client finds it done, whatever runs for how long."""
    server = serve(
        load_s=0.3,
        arguments=["--max-concurrent-requests", "1"],
        OMLX_ADMISSION_MAX_AGE_S="0.2",
    )
    client = Client(server.url)
    await client.chat("a")

    begun = asyncio.Event()

    async def again_and_again() -> None:
        while True:
            await client.chat("a", tokens=60)
            begun.set()

    crowd = [asyncio.create_task(again_and_again()) for _ in range(6)]
    await begun.wait()
    first = await client.chat("b", headers={"X-OMLX-Max-Wait": "0.5"})
    await asyncio.sleep(int(first.headers["retry-after"]))
    second = await client.chat("b", headers={"X-OMLX-Max-Wait": "20"})
    for one in crowd:
        one.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert first.status == 503
    assert second.ok, second
    assert "the drain of 'a' is withdrawn" not in server.log


async def test_c16_clients_that_leave_within_a_moment_evict_nothing_in_use(
    serve: Serve,
) -> None:
    """A request for B with each key: A, used again and again, stays until one of them waits."""
    server = serve(load_s=0.3, OMLX_ADMISSION_MAX_AGE_S="30")
    client = Client(server.url)

    async def press() -> None:
        answer = await client.chat("b", hang_up_after=0.2)
        assert answer.error == "hung up", answer

    await client.chat("a")
    stream = await streaming(server)
    await press()
    assert not stream.done()
    while not stream.done():  # it is remembered for some seconds that they leave
        await press()
    assert (await stream).ok
    for turn in range(12):
        await press()
        if turn % 3 == 2:
            assert (await client.chat("a", tokens=2)).ok
    assert swaps(server) == ["a"]
    assert "'a' drains for 'b'" not in server.log
    patient = await client.chat("b")
    assert patient.ok, patient
    assert swaps(server) == ["a", "b"]
    back = await client.chat("a", tokens=2)
    assert back.ok, back


def swaps(server: Server) -> list[str]:
    return re.findall(r"admission: '(\w+)' resident", server.log)
