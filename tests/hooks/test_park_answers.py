"""Whose parked answers are: what coroutines tell their old core reaches the new one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.hooks.park import parking, rows
from omlx_admission.hooks.park.answers import Answer, Parked, note_owner, on_core
from omlx_admission.hooks.pool import leases


class Core:
    """What is used of an engine's core; its methods are wrapped as oMLX's are."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.scheduler = SimpleNamespace(requests={}, abort_request=lambda _name: None)
        self._output_collectors: dict[str, Any] = {}
        self._stream_states: dict[str, Any] = {}
        self._finished_events: dict[str, Any] = {}
        self._finished_at: dict[str, float] = {}

    def begin(self, name: str) -> object:
        collector = self._output_collectors[name] = object()
        self._finished_events[name] = object()
        note_owner(self, name)
        return collector

    def _cleanup_request(self, name: str) -> None:
        def stock(name: str) -> None:
            self._output_collectors.pop(name, None)
            self.told.append(("cleanup", name))

        parking.cleanup_request(stock, self, (name,), {})

    async def abort_request(self, name: str) -> bool:
        async def stock(name: str) -> bool:
            self.told.append(("abort", name))
            return True

        return bool(await parking.abort_request(stock, self, (name,), {}))


class Engine:
    """What is referenced weakly."""


class Pool:
    """The same, with its books."""

    _entries: dict[str, Any]


def request_of(engine: Any) -> requests.Request:
    request = requests.Request({"path": "/v1/chat/completions"}, None)  # type: ignore[arg-type]
    held = holding.Holding(leases.reference(engine), False, None, leased=1)
    request.handed["a"] = held
    return request


def taken_from(core: Core, engine: Any, *names: str) -> tuple[Parked, Any]:
    """Running requests of ``names`` are out, each of a request of its own."""
    entry = SimpleNamespace(engine=engine, in_use=len(names))
    pool = Pool()
    pool._entries = {"a": entry}
    for name in names:
        token = requests.current.set(request_of(engine))
        core.begin(name)
        requests.current.reset(token)
    parked = Parked(pool, "a", None, [])
    parked.taken = rows.Taken(object(), [rows.Row(n, None, None, None) for n in names], bytes=8)
    parked.detach_running(core)
    parked.name_owners(dict(on_core(core).owners), engine)
    return parked, entry


async def test_what_is_told_the_old_core_reaches_the_one_where_it_goes_on() -> None:
    """On a cancel the clean-up comes first, and then the abort, which must not be lost."""
    old, new, last, engine = Core(), Core(), Core(), Engine()
    parked, entry = taken_from(old, engine, "r")
    assert entry.in_use == 0
    assert old._output_collectors == {}
    parked.attach(new)
    assert "r" in new._output_collectors
    again = Parked(parked.pool, "a", None, [])
    again.taken = rows.Taken(object(), [rows.Row("r", None, None, None)])
    again.detach_running(new)
    again.attach(last)
    old._cleanup_request("r")
    await old.abort_request("r")
    assert (old.told, new.told) == ([], [])
    assert last.told == [("cleanup", "r"), ("abort", "r")]


async def test_back_in_its_own_core_it_is_told_itself() -> None:
    core, engine = Core(), Engine()
    parked, _ = taken_from(core, engine, "r", "gone")
    parked.drop(["gone"])
    core._finished_at["r"] = 1.0
    parked.attach(core)
    assert core._finished_at == {}, "it would be taken for an answer that nobody reads"
    core._cleanup_request("r")
    await core.abort_request("gone")
    assert core.told == [("cleanup", "r"), ("abort", "gone")]


async def test_a_client_that_leaves_is_told_of_once_and_the_last_one_frees_the_bytes() -> None:
    core, engine = Core(), Engine()
    parked, _ = taken_from(core, engine, "r", "s")
    left: list[Answer] = []
    for answer in parked.answers:
        answer.waits(lambda answer=answer: left.append(answer))  # type: ignore[misc]
    core._cleanup_request("r")
    await core.abort_request("r")
    (first,) = left
    assert first.names == {"r"}
    assert parked.bytes == 8, "rows of one batch are parted when it goes on"
    other = next(answer for answer in parked.answers if answer is not first)
    other.request.end()
    assert left == [first, other]
    assert parked.bytes == 0


async def test_leases_follow_and_a_release_meanwhile_counts_on_nothing() -> None:
    core, engine, later = Core(), Engine(), Engine()
    parked, entry = taken_from(core, engine, "r")
    (answer,) = parked.answers
    # The engine that it was taken from is still there.
    assert not leases.counts(parked.pool, "a", answer.held.engine)
    entry.engine, entry.in_use = later, 1
    assert not leases.counts(parked.pool, "a", answer.held.engine)
    later._engine = SimpleNamespace(engine=None)  # type: ignore[attr-defined]
    entry.runtime_settings_signature = "other settings"
    said: list[Any] = []
    answer.request.cut = SimpleNamespace(end_with=said.append)
    parked.put_back(later, [answer])
    assert [refusal.code for refusal in said] == ["answer_lost"]
    assert "its settings have changed" in said[0].message
    assert leases.counts(parked.pool, "a", answer.held.engine), "the request gives it back"
