"""Held streams and the queue: served, refused, left."""

from __future__ import annotations

import asyncio
from typing import Any

from omlx_admission.core.queue import Admission
from omlx_admission.core.request import WAIT_HEADER
from omlx_admission.settings import Settings

from ..fake_pool import FakePool, Model
from ..virtual import VirtualLoop
from .rig import (
    AFTER,
    INTERVAL,
    JSON,
    Exchange,
    openai,
    read,
    whole,
)


class Queue:
    """The application of a route whose model 'b' waits for 'a', which is busy."""

    def __init__(self, loop: VirtualLoop, **settings: Any) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.pool = FakePool({"a": Model(6), "b": Model(6)}, ceiling=10)
        self.pool.models["a"].engine = object()
        self.pool.models["a"].leases = 1
        self.admission = Admission(self.pool, Settings(**settings), clock=loop.time)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        try:
            await self.admission.acquire(self.pool.ask("b"))
        except Exception:
            await whole(send, 500, JSON, b"{}")
        else:
            await self.go_on.wait()
            await whole(send)


def test_a_waiter_that_is_served_in_time_is_left_alone(loop: VirtualLoop) -> None:
    queue = Queue(loop)
    queue.go_on.clear()
    exchange = Exchange(loop, queue)
    loop.advance(AFTER - 1)
    queue.pool.models["a"].leases = 0
    loop.call_soon(queue.admission.released, "a")
    loop.turn()
    queue.pool.end_load("b")
    loop.turn()
    loop.advance(10 * AFTER)
    assert exchange.sent == []
    queue.go_on.set()
    loop.turn()
    assert exchange.text == "data: 1\n\ndata: [DONE]\n\n"


def test_a_waiter_of_the_queue_is_kept_alive_and_served(loop: VirtualLoop) -> None:
    queue = Queue(loop)
    exchange = Exchange(loop, queue)
    loop.advance(AFTER + INTERVAL)
    assert exchange.keepalives == 2
    queue.pool.models["a"].leases = 0
    loop.call_soon(queue.admission.released, "a")
    loop.turn()
    queue.pool.end_load("b")
    loop.turn()
    assert exchange.closed
    assert exchange.text.endswith("data: [DONE]\n\n")
    assert queue.admission.policy.waiting == 0


def test_the_waited_time_is_known_without_a_listener(loop: VirtualLoop) -> None:
    queue = Queue(loop)
    exchange = Exchange(loop, queue, body={"model": "b"})
    loop.advance(4.5)
    queue.pool.models["a"].leases = 0
    loop.call_soon(queue.admission.released, "a")
    loop.turn()
    queue.pool.end_load("b")
    loop.turn()
    assert dict(exchange.sent[0]["headers"])[WAIT_HEADER] == b"4500"


def test_the_budget_of_a_waiter_ends_in_an_event(loop: VirtualLoop) -> None:
    exchange = Exchange(loop, Queue(loop, max_wait_s=AFTER + INTERVAL / 2))
    loop.advance(AFTER)
    assert exchange.keepalives == 1
    loop.advance(INTERVAL)
    assert openai(exchange.text)["code"] == "model_swap_timeout"
    assert exchange.closed


def test_a_budget_below_the_hold_ends_in_a_status(loop: VirtualLoop) -> None:
    exchange = Exchange(loop, Queue(loop, max_wait_s=AFTER - 1))
    loop.advance(AFTER * 3)
    assert exchange.status == 503
    assert "retry-after" in {k.decode() for k, _ in exchange.sent[0]["headers"]}


def test_a_client_that_leaves_while_it_is_kept_alive_leaves_nothing(
    loop: VirtualLoop,
) -> None:
    queue = Queue(loop)
    exchange = Exchange(loop, queue)
    loop.advance(AFTER + INTERVAL)
    assert queue.admission.policy.waiting == 1
    exchange.incoming.put_nowait({"type": "http.disconnect"})
    loop.turn()
    assert queue.admission.policy.waiting == 0
    assert exchange.task.done()
    assert asyncio.all_tasks(loop) == set()
