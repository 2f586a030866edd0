"""Whose parked answers are, and what becomes of them: on the event loop.

The coroutine of a request waits on two objects, its output collector and an event, and
asks nothing else of its engine until the answer ends. So they are taken over into the
next engine as they are, and it notices nothing but the silence. What it says at its end, it
says to the engine core that it began in, which has been closed since: that is passed on,
by the request's id. An entry for that lies on the old core itself and goes with it.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.core.refusal import Refusal
from omlx_admission.gpu_turn import holding as gpu_holding
from omlx_admission.gpu_turn import sites as gpu_sites
from omlx_admission.hooks.park import rows
from omlx_admission.hooks.pool import leases

logger = logging.getLogger("omlx.admission")

_ATTRIBUTE = "_omlx_admission_park"

#: Requests of an engine whose owners may be remembered beyond those that it knows.
_SPARE = 16


@dataclass
class OnCore:
    """What is kept on an engine's core.

    Attributes:
        owners: by the id of a request of the engine, the HTTP request that it is for.
        moved: by id, what was taken out of this core.
    """

    owners: dict[str, requests.Request | None] = field(default_factory=dict)
    moved: dict[str, Parked] = field(default_factory=dict)


def on_core(core: Any) -> OnCore:
    """What is kept on ``core``, made at first use."""
    kept: OnCore | None = vars(core).get(_ATTRIBUTE)
    if kept is None:
        kept = OnCore()
        setattr(core, _ATTRIBUTE, kept)
    return kept


def note_owner(core: Any, name: str) -> None:
    """The request ``name`` of the engine is for the HTTP request that is handled now."""
    owners = on_core(core).owners
    if len(owners) > len(core._output_collectors) + _SPARE:
        for old in owners.keys() - core._output_collectors.keys():
            del owners[old]
    owners[name] = requests.active()


def shells_of(engine: Any) -> list[weakref.ref[Any]]:
    """The stopped engines that stand for ``engine``, because requests of theirs went on
    in it and may ask them again."""
    shells: list[weakref.ref[Any]] = vars(engine).get(_ATTRIBUTE) or []
    return shells


@dataclass
class Stream:
    """What the coroutine of one request waits on."""

    collector: Any
    state: Any
    event: Any

    @classmethod
    def taken_from(cls, core: Any, name: str) -> Stream | None:
        """None: nobody waits on it any more, or its answer has ended."""
        if name in core._finished_at or name not in core._output_collectors:
            return None
        return cls(
            core._output_collectors.pop(name),
            core._stream_states.pop(name, None),
            core._finished_events.pop(name, None),
        )

    def put_into(self, core: Any, name: str) -> None:
        # Behind a detached stream it may have been begun, and ended, before it was aborted.
        core._finished_at.pop(name, None)
        core._output_collectors[name] = self.collector
        if self.state is not None:
            core._stream_states[name] = self.state
        if self.event is not None:
            core._finished_events[name] = self.event


class Answer:
    """One request whose answer is parked: it may have several in its engine at once."""

    def __init__(
        self, parked: Parked, request: requests.Request, held: holding.Holding
    ) -> None:
        self.parked = parked
        self.request = request
        self.held = held
        self.names: set[str] = set()
        self._leave: Callable[[], None] | None = None
        request.at_end(self._ended)

    def waits(self, leave: Callable[[], None]) -> None:
        """See :class:`~omlx_admission.core.port.ParkedAnswer`."""
        self._leave = leave
        self.left()

    def left(self) -> None:
        """One of its answers, or the client, may have gone."""
        leave = self._leave
        if leave is not None and self.names <= self.parked.gone:
            self._leave = None
            leave()

    def waits_no_more(self) -> None:
        """It has been granted, or has ended."""
        self._leave = None

    def lost(self, error: Exception) -> None:
        """See :class:`~omlx_admission.core.port.ParkedAnswer`."""
        self._leave = None
        self.parked.drop(self.names)
        refusal = getattr(error, "refusal", None)
        if not isinstance(refusal, Refusal):
            text = (
                f"This answer was interrupted for another model, and could not go on: "
                f"model '{self.parked.model}' did not come back ({error})."
            )
            refusal = Refusal(503, "answer_lost", text, 1)
        logger.warning("admission: a parked answer has ended: %s", refusal.message)
        self.request.cut.end_with(refusal)

    def _ended(self) -> None:
        if self._leave is not None:
            self.parked.drop(self.names)
            self.left()


@dataclass(eq=False)
class Parked:
    """What was taken out of one engine at one time.

    Attributes:
        signature: the settings that its model was loaded with.
        again: requests that had not begun, and begin again.
        gone: ids whose clients have left, or that ended meanwhile.
        core: where it goes on; None while it is parked.
    """

    pool: Any
    model: str
    signature: Any
    engines: list[weakref.ref[Any]]
    streams: dict[str, Stream] = field(default_factory=dict)
    again: list[Any] = field(default_factory=list)
    taken: rows.Taken = field(default_factory=rows.Taken)
    answers: list[Answer] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    core: Callable[[], Any] | None = None

    @property
    def bytes(self) -> int:
        """What it holds now."""
        return self.taken.bytes

    def drop(self, names: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        self.gone.update(names)
        if self.core is None and self.streams.keys() <= self.gone:
            self.taken = rows.Taken()

    # -- what the coroutines say at their ends ----------------------------------

    def cleanup(self, name: str) -> None:
        """What their core was told by ``_cleanup_request``."""
        core = self.core() if self.core is not None else None
        if core is not None:
            core._cleanup_request(name)
        elif self.core is None:
            self._leaves(name)

    async def abort(self, name: str) -> bool:
        """What their core was told by ``abort_request``."""
        core = self.core() if self.core is not None else None
        if core is not None:
            return bool(await core.abort_request(name))
        if self.core is None:
            self._leaves(name)
        return True

    def _leaves(self, name: str) -> None:
        self.drop([name])
        for answer in self.answers:
            if name in answer.names:
                answer.left()

    # -- out of an engine -------------------------------------------------------

    def detach_waiting(self, core: Any, names: Iterable[str]) -> None:
        """Take the requests that have sent nothing from their engine, to begin again.

        A prefill that is under way ends at its next chunk.
        """
        kept, scheduler = on_core(core), core.scheduler
        for name in names:
            request = scheduler.requests.get(name)
            if request is None or request.batch_uid is not None:
                continue
            stream = Stream.taken_from(core, name)
            if stream is None:
                continue
            kept.moved[name] = self
            self.streams[name] = stream
            self.again.append(copy.copy(request))
            scheduler.abort_request(name)

    def detach_running(self, core: Any) -> None:
        """The rows are out: their streams follow."""
        kept = on_core(core)
        for row in self.taken.rows:
            stream = Stream.taken_from(core, row.id)
            if stream is None:
                self.gone.add(row.id)
            else:
                kept.moved[row.id] = self
                self.streams[row.id] = stream

    def attach(self, core: Any) -> None:
        """Streams are those of ``core`` from now on."""
        kept = on_core(core)
        for name, stream in self.streams.items():
            # Where it is the core that they were taken from, it is told itself again.
            kept.moved.pop(name, None)
            if name not in self.gone:
                stream.put_into(core, name)
        self.core = weakref.ref(core)

    def name_owners(self, owners: dict[str, requests.Request | None], engine: Any) -> None:
        """Make an answer of each request, and give its lease of ``engine`` back."""
        found: dict[requests.Request, Answer] = {}
        entry = self.pool._entries[self.model]
        for name in self.streams.keys() - self.gone:
            request = owners.get(name)
            held = request.handed.get(self.model) if request is not None else None
            if request is None or held is None or request.ended:
                self.gone.add(name)
                continue
            if request not in found:
                found[request] = Answer(self, request, held)
                if held.engine() is engine and holding.leases(held) and entry.in_use > 0:
                    entry.in_use -= 1
                _move(held, holding.no_engine, _nothing)
            found[request].names.add(name)
        self.answers = list(found.values())
        self.drop(())

    # -- into another engine ----------------------------------------------------

    def put_back(self, engine: Any, answers: Iterable[Answer]) -> None:
        """Go on in ``engine``, on which a lease is held for each of ``answers``."""
        # Leases first: whatever fails then, their requests give them back.
        reference = leases.reference(engine)
        for answer in answers:
            answer.waits_no_more()
            if not holding.leases(answer.held):
                self.gone.update(answer.names)
            if answer.names <= self.gone:
                leases.give_back(self.pool, self.model, reference)
                continue
            give_back = functools.partial(leases.give_back, self.pool, self.model, reference)
            _move(answer.held, reference, give_back)
        core, entry = engine._engine.engine, self.pool._entries[self.model]
        if entry.runtime_settings_signature != self.signature:
            error = RuntimeError("its settings have changed")
            self.core = holding.no_engine
            for answer in self.answers:
                if not answer.names <= self.gone:
                    answer.lost(error)
            return
        self._stand_for(engine)
        owners = on_core(core).owners
        for answer in self.answers:
            owners.update(dict.fromkeys(answer.names, answer.request))
        self.attach(core)
        taken, self.taken = self.taken, rows.Taken()
        gone = frozenset(self.gone)
        again = [request for request in self.again if request.request_id not in gone]

        def work() -> dict[str, Exception]:
            rows.put_back(core, taken, gone)
            return rows.begin_again(core, again)

        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(core._mlx_executor, on_thread(core, "parked answers", work))
        done.add_done_callback(functools.partial(self._is_back, core))

    def _is_back(self, core: Any, done: asyncio.Future[dict[str, Exception]]) -> None:
        failed: dict[str, Exception]
        error = None if done.cancelled() else done.exception()
        if error is not None or done.cancelled():
            logger.error("admission: parked answers could not go on", exc_info=error)
            cause: Exception = RuntimeError(str(error or "its engine was stopped"))
            failed = dict.fromkeys(self.streams.keys() - self.gone, cause)
        else:
            failed = done.result()
        for name, cause in failed.items():
            for answer in self.answers:
                if name in answer.names:
                    answer.lost(cause)
        core._wake_engine_loop()

    def _stand_for(self, engine: Any) -> None:
        """The engines that its requests hold stand for ``engine``: they may be asked for
        another answer, or for their tokenizer."""
        shells = [ref for ref in self.engines if ref() not in (None, engine)]
        for ref in shells:
            shell = ref()
            if shell is not None:
                shell._engine, shell._loaded = engine._engine, True
                shell._model, shell._tokenizer = engine._model, engine._tokenizer
        setattr(engine, _ATTRIBUTE, [*shells_of(engine), *shells])


def let_shells_go(engine: Any) -> None:
    """``engine`` has stopped: what stood for it holds nothing of it but the tokenizer."""
    for ref in shells_of(engine):
        shell = ref()
        if shell is not None:
            shell._engine = shell._model = None
            shell._loaded = False


def on_thread(core: Any, site: str, work: Callable[[], Any]) -> Callable[[], Any]:
    """``work`` as a job of the engine's thread, in a turn of the GPU where turns are taken."""
    scheduler = core.scheduler
    return functools.partial(
        gpu_holding.held,
        gpu_sites.name_of(core),
        site,
        work,
        functools.partial(gpu_holding.drain, scheduler._stream),
        optional=True,
        owner=scheduler,
    )


def _move(
    held: holding.Holding, engine: Callable[[], Any], give_back: Callable[[], None]
) -> None:
    """The lease of ``held`` is one on another engine, or on none."""
    held.engine = engine
    for kept in held.kept:
        kept.moved(give_back)


def _nothing() -> None:
    """A lease that was given back already."""
