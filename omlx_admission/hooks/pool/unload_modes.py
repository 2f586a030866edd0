"""``?mode=`` of the unload routes, and what an unload by hand is answered."""

from __future__ import annotations

import enum
import inspect
import logging
from typing import Any
from urllib.parse import parse_qs

from omlx_admission.core import faults
from omlx_admission.core import request as requests
from omlx_admission.core.pool import holding
from omlx_admission.core.refusal import Refusal, retry_after
from omlx_admission.hooks.pool.port import admission_refused
from omlx_admission.hooks.pool.state import state_of

logger = logging.getLogger("omlx.admission")


class Mode(enum.Enum):
    """What an unload route does with a model that is in use."""

    DRAIN = "drain"  # wait for what runs, within the budget
    NOW = "now"  # end what runs with an error event
    IF_IDLE = "if-idle"  # 409, nothing happens


#: What an answer that is cut off says, and when it is worth another try, in seconds.
_ENDED = (
    "Model '{model}' was unloaded by hand before this answer was complete. "
    "The next request for it loads it again."
)
_RETRY_S = 1

_NAMES = ", ".join(mode.value for mode in Mode)


def is_unload(request: requests.Request) -> bool:
    """Whether the route exists to unload a model."""
    return request.path.endswith("/unload") and request.method == "POST"


def mode_of(request: requests.Request) -> Mode:
    """The wanted mode; :attr:`Mode.DRAIN` for routes that unload as a side effect.

    Raises:
        Exception: our refusal (400) of a mode that does not exist.
    """
    if not is_unload(request) or not request.query:
        return Mode.DRAIN
    given = parse_qs(request.query.decode("latin-1"), keep_blank_values=True).get("mode")
    if given is None:
        return Mode.DRAIN
    try:
        return Mode(given[-1])
    except ValueError:
        text = f"mode={given[-1]!r} is not known; it is one of {_NAMES}"
        raise _refused(Refusal(400, "invalid_unload_mode", text), request) from None


def refuse_unless_idle(pool: Any, request: requests.Request, model: str) -> None:
    """Raise our refusal (409) where the model is in use, loading, pinned or waited for."""
    why = _in_the_way(pool, model)
    if why is not None:
        text = f"Model '{model}' was not unloaded: {why}."
        raise _refused(Refusal(409, "model_not_idle", text), request)


def _in_the_way(pool: Any, model: str) -> str | None:
    entry, admission = pool._entries[model], state_of(pool).admission
    if entry.is_loading:
        return "it is loading"
    if entry.engine is not None and entry.is_pinned:
        return "it is pinned"
    if admission is None:
        return "it is in use" if entry.in_use > 0 else None
    policy = admission.policy
    waiting = sum(len(policy.waiters(t)) for t in policy.targets if t.model == model)
    if waiting:
        return f"{waiting} request{'s wait' if waiting > 1 else ' waits'} for it"
    port = admission.port
    if entry.engine is not None and not port.is_quiescent(model):
        return f"it is in use ({entry.in_use} running)" if entry.in_use else "it is in use"
    return None


def expired(pool: Any, model: str, request: requests.Request | None) -> Exception:
    """Our refusal (503) where the model did not come to rest within the budget."""
    entry, admission = pool._entries.get(model), state_of(pool).admission
    assert admission is not None
    running = entry.in_use if entry is not None else 0
    hint = retry_after(admission.policy.estimates.drain(model))
    text = (
        f"Model '{model}' is still in use ({running} running). It was not unloaded and "
        f"serves on. Try again in about {hint} s, or unload it with mode=now, which ends "
        f"what runs."
    )
    return _refused(Refusal(503, "model_busy", text, hint), request)


def client_left() -> Exception:
    """What ends an unload whose client has gone; it is not read."""
    gone = Refusal(503, "client_left", "The client left while it waited.", 1)
    return admission_refused()(gone)


def is_refusal(error: Exception) -> bool:
    """Whether ``error`` is what we answer, and no fault of ours."""
    return isinstance(error, admission_refused())


def _refused(refusal: Refusal, request: requests.Request | None) -> Exception:
    if request is not None and is_unload(request):
        request.refusal = refusal
    return admission_refused()(refusal)


def end_holders(engine: Any, model: str, own: requests.Request | None) -> None:
    """End every request that holds ``engine``, but the one that wants it gone.

    To be called again while they leave: a request that was granted the engine holds it
    when it wakes, some turns of the loop later.
    """
    refusal = Refusal(503, "model_unloading", _ENDED.format(model=model), _RETRY_S)
    ended = [
        request
        for request in tuple(requests.live)
        if request is not own
        and request.cut.refusal is None
        and holding.holds(request, model, engine)
    ]
    for request in ended:
        request.cut.end_with(refusal)
    if ended:
        logger.info("admission: %d running of '%s' ended for its unload", len(ended), model)


async def abort(engine: Any, model: str) -> None:
    """Have the engine end what it still runs: work of jobs, or of no request at all."""
    abort_all = getattr(engine, "abort_all_requests", None)
    if not callable(abort_all):
        return
    arguments: dict[str, str] = {}
    try:
        if "reason" in inspect.signature(abort_all).parameters:
            arguments = {
                "reason": f"Model '{model}' was unloaded by hand",
                "error_code": "model_unloading",
            }
    except (TypeError, ValueError) as error:
        # Not every callable has a signature; it is called all the same.
        faults.note("the look at an engine's abort", error)
    try:
        await abort_all(**arguments)
    except Exception:
        logger.warning("admission: ending the work of '%s' failed", model, exc_info=True)
