"""The second look at a prompt that oMLX's guard has refused (P5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omlx_admission.core import footprint
from omlx_admission.core import request as requests
from omlx_admission.core.footprint import Reading
from omlx_admission.hooks.pool import prompt_guard
from omlx_admission.hooks.pool.prompt_guard import PromptGuard
from omlx_admission.settings import Settings

GB = 10**9


class Scheduler:
    """oMLX's sum: what is used and what the prompt needs, against the limit."""

    _memory_hard_limit_bytes = 2 * GB
    footprint = 2 * GB

    def _current_usage_bytes(self) -> int:
        return self.footprint

    def preflight_eviction_request(self, *, num_prompt_tokens: int) -> object | None:
        used = self._current_usage_bytes() + num_prompt_tokens
        return None if used <= self._memory_hard_limit_bytes else object()


@pytest.fixture
def scheduler(mocker: Any) -> Scheduler:
    """1 GB is in use; the ceiling and its fixed part are 2 GB."""
    mocker.patch.object(
        prompt_guard, "_houses", lambda: [(Reading(2 * GB, GB, False), 2 * GB, 2 * GB)]
    )
    mocker.patch.object(footprint, "LONGEST_S", 0.2)
    return Scheduler()


@pytest.fixture
def request_at_hand() -> Iterator[requests.Request]:
    scope = {"type": "http", "path": "/v1/chat/completions"}
    request = requests.Request(scope, asyncio.Queue().get)
    token = requests.current.set(request)
    yield request
    requests.current.reset(token)


def ask(scheduler: Scheduler, tokens: int) -> int:
    """How often oMLX was asked until it let the prompt in; its error where it does not."""
    from omlx.exceptions import PrefillMemoryExceededError

    asked = 0

    async def stock(scheduler: Scheduler, *, num_prompt_tokens: int) -> None:
        nonlocal asked
        asked += 1
        if scheduler.preflight_eviction_request(num_prompt_tokens=num_prompt_tokens):
            raise PrefillMemoryExceededError("reduce context length", request_id="r")

    async def check() -> None:
        guard = PromptGuard(Settings())
        await guard.check(stock, None, (scheduler,), {"num_prompt_tokens": tokens})

    asyncio.run(check())
    return asked


def test_what_never_fits_gets_omlx_s_own_answer_at_once(
    scheduler: Scheduler, request_at_hand: requests.Request, mocker: Any
) -> None:
    waits = mocker.spy(footprint, "until")
    with pytest.raises(Exception, match="reduce context"):
        ask(scheduler, 2 * GB)
    assert request_at_hand.refusal is None
    assert waits.call_count == 0


def test_what_fits_once_the_footprint_has_fallen_is_let_in(
    scheduler: Scheduler, request_at_hand: requests.Request, mocker: Any
) -> None:
    real = scheduler.preflight_eviction_request

    def falls(**arguments: Any) -> object | None:
        found = real(**arguments)
        scheduler.footprint = GB
        return found

    mocker.patch.object(scheduler, "preflight_eviction_request", falls)
    assert ask(scheduler, GB) == 2
    assert request_at_hand.refusal is None


def test_what_would_fit_is_refused_for_now_where_the_footprint_stays(
    scheduler: Scheduler, request_at_hand: requests.Request
) -> None:
    with pytest.raises(Exception, match="reduce context"):
        ask(scheduler, GB)
    refusal = request_at_hand.refusal
    assert (refusal.status, refusal.code) == (503, "model_busy")
    assert refusal.retry_after is not None


def test_a_fault_of_the_second_look_leaves_omlx_s_answer(
    scheduler: Scheduler, request_at_hand: requests.Request, mocker: Any
) -> None:
    mocker.patch.object(prompt_guard, "_again", lambda *_a, **_k: lambda: 1 // 0)
    with pytest.raises(Exception, match="reduce context"):
        ask(scheduler, GB)
    assert request_at_hand.refusal is None


@pytest.mark.parametrize(
    ("kept", "now", "passing"),
    [(1.0, 2.0, True), (1.0, 1.2, True), (2.0, 2.0, False)],
    ids=["residue", "a dip", "all of it in use"],
)
def test_an_abort_is_for_now_where_not_all_is_in_use(
    mocker: Any, kept: float, now: float, passing: bool
) -> None:
    reading = Reading(2 * GB, int(kept * GB), False)
    mocker.patch.object(prompt_guard, "_houses", lambda: [(reading, int(now * GB), 2 * GB)])
    ended = SimpleNamespace(error="x", error_code="prefill_memory_aborted")
    assert prompt_guard._is_passing(ended) is passing
    assert not prompt_guard._is_passing(SimpleNamespace(error="x", error_code=None))
