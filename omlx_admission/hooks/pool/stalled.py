"""C9: an answer that its client does not read keeps no model in memory.

A server stops sending when the client's buffers are full, and the handler of the request
stands in its ``send`` with its lease, for as long as the client likes. What the engine has
made for it by then is buffered outside of the engine, and is delivered whenever the client
reads on. So when nothing of an engine runs any more, and all who hold it have not got rid
of what they send for a moment, its leases are taken back. A client that is slow, but
reads, loses nothing by that either.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.pool import leases

logger = logging.getLogger("omlx.admission")

CORE = "omlx.engine_core"

#: Without them an engine that has finished an answer counts as at work until it is read.
NEEDS = (
    Need(CORE, "EngineCore._output_collectors", Kind.VALUE, optional=True),
    Need(CORE, "EngineCore._finished_at", Kind.VALUE, optional=True),
    Need(
        CORE,
        "EngineCore._reap_orphaned_collectors",
        Kind.SYNC,
        ("now", "grace"),
        optional=True,
    ),
)

#: Seconds that a client may leave what is sent to it unread.
AFTER_S = 5.0


def holders(model: str, engine: Any) -> dict[requests.Request, holding.Holding]:
    """The requests that hold ``engine``, and whose clients do not read."""
    found: dict[requests.Request, holding.Holding] = {}
    if requests.blocked:
        latest = time.monotonic() - AFTER_S
        for request, since in requests.blocked.items():
            held: holding.Holding | None = request.handed.get(model)
            if since <= latest and held is not None and held.engine() is engine:
                found[request] = held
    return found


def unread(model: str, entry: Any) -> int:
    """How many leases of ``entry`` are held for answers that are not read."""
    if not requests.blocked or entry.in_use <= 0:
        return 0
    return sum(holding.leases(h) for h in holders(model, entry.engine).values())


def sessions(model: str, entry: Any) -> int:
    """How many open sockets hold the engine of ``entry``, at work or not (C19)."""
    return sum(holding.holds(r, model, entry.engine) for r in requests.sockets)


def let_go(pool: Any, model: str, entry: Any) -> None:
    """Take the leases of ``model`` back where nothing but such answers holds it."""
    if not requests.blocked or entry.in_use <= 0 or entry.engine is None:
        return
    if unread(model, entry) < entry.in_use or works(pool, entry):
        return
    stalled = holders(model, entry.engine)
    logger.info(
        "admission: '%s' is kept no longer for %d answer(s) that the client does not read",
        model,
        len(stalled),
    )
    keep_what_is_made(entry.engine)
    for held in stalled.values():
        leases.lapse(entry, held)


def works(pool: Any, entry: Any) -> bool:
    """Whether an engine has anything to run for anybody.

    What it has finished is not work, though a text engine names it active for some
    seconds, or until it is read.
    """
    engine = entry.engine
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    collectors = getattr(core, "_output_collectors", None)
    finished = getattr(core, "_finished_at", None)
    try:
        if isinstance(collectors, dict) and isinstance(finished, dict):
            if not collectors.keys() <= finished.keys():
                return True
        elif engine.has_active_requests() is True:
            return True
        has_work = getattr(pool, "_entry_has_scheduler_work", None)
        return has_work is not None and bool(has_work(entry))
    except Exception:  # noqa: BLE001 - a check that cannot answer takes nothing from anybody
        return True


def keep_what_is_made(engine: Any) -> None:
    """Have an engine forget the answers that it has finished, unread.

    Its end clears what it knows of, and who reads on then would wait for ever.
    """
    core = getattr(getattr(engine, "_engine", None), "engine", None)
    forget = getattr(core, "_reap_orphaned_collectors", None)
    try:
        if callable(forget):
            forget(time.monotonic(), 0.0)
    except Exception as error:  # noqa: BLE001 - what is done next does not depend on it
        faults.note("the keeping of finished answers", error)
