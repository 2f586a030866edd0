"""Parking what a busy model runs, as long as it drains, and its return.

The queue decides (`core.policy`): when the gate of a busy model is due, it asks its port to
park it. A task tries between two bursts of the engine until everything that the engine was
given is out, the drain has ended, or something is found that cannot be moved. Newcomers
wait in the queue meanwhile, so what is taken out grows only by what was on its way.

What was taken out waits in the queue, as parked answers, for the model to be loaded again;
where the drain is withdrawn instead, it goes back into the very engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.core.pool.engines import lives
from omlx_admission.core.pool.marks import drains_for_us
from omlx_admission.core.port import Ask, ParkedAnswer
from omlx_admission.hooks.park import rows
from omlx_admission.hooks.park.answers import (
    Answer,
    Parked,
    let_shells_go,
    note_owner,
    on_core,
    on_thread,
    shells_of,
)
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Part, Wanted
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.pool import off_loop, resident
from omlx_admission.hooks.pool.state import in_background, state_of
from omlx_admission.hooks.server import requests as requests_hook

logger = logging.getLogger("omlx.admission")

CORE = "omlx.engine_core"
BATCHED = "omlx.engine.batched"

_DICT = ("dict[...]", "Dict[...]", "OrderedDict[...]")

NEEDS = (
    *rows.NEEDS,
    # Leases are told apart by the request that holds them, and an engine that has gone is
    # not started again.
    *requests_hook.NEEDS,
    *resident.NEEDS,
    *off_loop.NEEDS,
    Need(CORE, "EngineCore.scheduler", Kind.VALUE, types=("Scheduler",)),
    Need(CORE, "EngineCore._mlx_executor", Kind.VALUE, types=("ThreadPoolExecutor",)),
    Need(CORE, "EngineCore._output_collectors", Kind.VALUE, types=_DICT),
    Need(CORE, "EngineCore._stream_states", Kind.VALUE, types=_DICT),
    Need(CORE, "EngineCore._finished_events", Kind.VALUE, types=_DICT),
    Need(CORE, "EngineCore._finished_at", Kind.VALUE, types=_DICT),
    Need(CORE, "EngineCore._cleanup_request", Kind.SYNC, ("request_id",)),
    Need(CORE, "EngineCore.abort_request", Kind.ASYNC, ("request_id",)),
    Need(CORE, "EngineCore._wake_engine_loop", Kind.SYNC, ()),
    Need(CORE, "EngineCore.stream_outputs", Kind.ASYNC_GENERATOR),
    Need(CORE, "_cleanup_request", Kind.USED),
    Need(BATCHED, "BatchedEngine._model", Kind.VALUE),
    Need(BATCHED, "BatchedEngine._tokenizer", Kind.VALUE),
)

#: Seconds between two looks at an engine that was in the middle of something.
_LOOK_S = 0.02


# -- what the port asks --------------------------------------------------------------------


def answering(model: str, entry: Any) -> float | None:
    """Seconds for which the oldest answer of ``model`` runs; None where it cannot be
    parked, or nothing runs."""
    if not switches.parking:
        return None
    try:
        core = _core_of(entry.engine)
        if core is None or _why_not(core) is not None:
            return None
        began = [r.arrival_time for r in list(core.scheduler.requests.values())]
        return time.monotonic() - min(began) if began else None
    except Exception as error:  # noqa: BLE001 - it drains
        faults.note("the look at what may be parked", error)
        return None


def _core_of(engine: Any) -> Any:
    """The core of a text engine that lives; None of any other."""
    if type(engine).__name__ != "BatchedEngine" or not lives(engine):
        return None
    return getattr(engine._engine, "engine", None)


def _why_not(core: Any) -> str | None:
    """What forbids to park what runs now; None: nothing that can be seen from here."""
    owners = on_core(core).owners
    for name in core._output_collectors.keys() - core._finished_at.keys():
        if name in owners and owners[name] is None:
            return "it works for a job of the server's own"
    return rows.unknown_engine(core)


def parked_bytes(pool: Any) -> int:
    """What the parked answers of a pool hold."""
    state = state_of(pool)
    for parked in [p for p in state.parked if p.streams.keys() <= p.gone]:
        state.parked.discard(parked)  # all of its clients have left
    return sum(parked.bytes for parked in state.parked)


def park(pool: Any, model: str, most: int | None) -> None:
    """Begin to park ``model``, which drains."""
    engine = pool._entries[model].engine
    in_background(_park(pool, model, engine, most), f"admission-park:{model}")


async def _park(pool: Any, model: str, engine: Any, most: int | None) -> None:
    why = None
    try:
        while why is None and _drains(pool, model, engine):
            try:
                parked = await _take_out(pool, model, engine, most)
            except rows.NotNow:
                parked = None
            if parked is None:
                await asyncio.sleep(_LOOK_S)
            elif most is not None:
                most -= parked.bytes
    except rows.NotParkable as reason:
        why = str(reason)
    except Exception as error:  # noqa: BLE001 - it drains
        faults.note("parking", error)
        return
    if why is not None:
        logger.info("admission: '%s' is not parked, it drains on: %s", model, why)


def _drains(pool: Any, model: str, engine: Any) -> bool:
    """Whether ``engine`` is still in use, and told to leave by the queue."""
    entry = pool._entries.get(model)
    return (
        entry is not None
        and entry.engine is engine
        and lives(engine)
        and drains_for_us(entry)
        and entry.in_use > 0
    )


async def _take_out(pool: Any, model: str, engine: Any, most: int | None) -> Parked | None:
    """Take out what the engine has been given; None: nothing that runs.

    Raises:
        NotNow, NotParkable: nothing was changed.
    """
    core, state, entry = _core_of(engine), state_of(pool), pool._entries[model]
    admission = state.admission
    if core is None or admission is None or admission.broken:
        return None
    ask = _ask_for(admission.port, entry, model)
    names = core._output_collectors.keys() - core._finished_at.keys()
    if not names:
        return None
    owners = dict(on_core(core).owners)
    _check_owners(names, owners, model, engine)
    if (why := _why_not(core)) is not None:
        raise rows.NotParkable(why)
    parked = Parked(
        pool,
        model,
        entry.runtime_settings_signature,
        [weakref.ref(engine), *shells_of(engine)],
    )
    parked.detach_waiting(core, names)
    work = functools.partial(rows.take_out, core, names - parked.streams.keys(), most)
    try:
        parked.taken = await asyncio.get_running_loop().run_in_executor(
            core._mlx_executor, on_thread(core, "parking", work)
        )
    except BaseException:
        await _undo(core, parked)
        raise
    parked.detach_running(core)
    parked.name_owners(owners, engine)
    if not parked.answers:
        return None
    state.parked.add(parked)
    logger.info(
        "admission: %d answer(s) of '%s' parked, %.1f MB",
        len(parked.answers),
        model,
        parked.bytes / 1e6,
    )
    admission.parked(ask, parked.answers)
    return parked


def _ask_for(port: Any, entry: Any, model: str) -> Ask:
    """What loads ``model`` again as it is now.

    Raises:
        NotParkable: no request without settings of its own would.
    """
    target = port.target(model, False, None)
    if target.variant != entry.runtime_settings_signature:
        raise rows.NotParkable("it is loaded with other settings than its own")
    arguments = {"model_id": model}
    return Ask(target, port.size(arguments), arguments)


def _check_owners(
    names: set[str], owners: dict[str, requests.Request | None], model: str, engine: Any
) -> None:
    """Each answer has to belong to a request that holds one lease of the engine."""
    for name in names:
        if name not in owners:
            raise rows.NotNow("a request is on its way into the engine")
        owner = owners[name]
        if owner is None:
            raise rows.NotParkable("it works for a job of the server's own")
        if owner.cut is None:
            raise rows.NotParkable("it works for an open socket")
        held = owner.handed.get(model)
        if owner.ended or held is None or held.engine() is not engine:
            raise rows.NotNow("a request is on its way out")
        if holding.leases(held) != 1:
            raise rows.NotParkable("a request holds it more than once")


async def _undo(core: Any, parked: Parked) -> None:
    """What waited or was in prefill is given to the engine again."""
    parked.attach(core)
    again = [r for r in parked.again if r.request_id not in parked.gone]
    if not again:
        return
    work = functools.partial(rows.begin_again, core, again)
    refused = await asyncio.get_running_loop().run_in_executor(core._mlx_executor, work)
    for name in refused:
        await core.abort_request(name)
    core._wake_engine_loop()


def put_back(pool: Any, model: str, engine: Any, answers: Sequence[ParkedAnswer]) -> None:
    """Let them go on in ``engine``; one that cannot is ended."""
    state = state_of(pool)
    ours = [answer for answer in answers if isinstance(answer, Answer)]
    logger.info("admission: %d parked answer(s) of '%s' go on", len(ours), model)
    for parked in dict.fromkeys(answer.parked for answer in ours):
        state.parked.discard(parked)
        mine = [answer for answer in ours if answer.parked is parked]
        try:
            parked.put_back(engine, mine)
        except Exception as error:  # noqa: BLE001 - they end, the queue goes on
            faults.note("the return of parked answers", error)
            for answer in mine:
                answer.lost(error)


# -- wrappers ------------------------------------------------------------------------------


async def add_request(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """Note for whom the engine was given a request."""
    name = await wrapped(*args, **kwargs)
    try:
        note_owner(core, name)
    except Exception as error:  # noqa: BLE001 - it drains then
        faults.note("the owners of answers", error)
    return name


def cleanup_request(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """What was taken out is elsewhere."""
    name = args[0] if args else kwargs["request_id"]
    kept = on_core(core)
    parked = kept.moved.get(name)
    if parked is not None:
        return parked.cleanup(name)
    kept.owners.pop(name, None)
    return wrapped(*args, **kwargs)


async def abort_request(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """The same, also after the clean-up: on a cancel that comes first."""
    name = args[0] if args else kwargs["request_id"]
    parked = on_core(core).moved.get(name)
    if parked is not None:
        return await parked.abort(name)
    return await wrapped(*args, **kwargs)


async def stop(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Requests whose answers were taken out still ask the engine for its tokenizer."""
    let_shells_go(engine)
    tokenizer, core = engine._tokenizer, _core_of(engine)
    moved = core is not None and on_core(core).moved
    try:
        return await wrapped(*args, **kwargs)
    finally:
        if moved:
            engine._tokenizer = tokenizer


def apply_core(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the core: its entrance, and what it is told at an answer's end."""
    ledger.wrap(module, "EngineCore.add_request", add_request)
    ledger.wrap(module, "EngineCore._cleanup_request", cleanup_request)
    ledger.wrap(module, "EngineCore.abort_request", abort_request)


def apply_batched(module: Any, ledger: Ledger, _wanted: Wanted) -> None:
    """Wrap the end of text engines; from now on what they run may be parked."""
    ledger.wrap(module, "BatchedEngine.stop", stop)
    switches.parking = True


PARTS = (Part(CORE, apply_core), Part(BATCHED, apply_batched))
