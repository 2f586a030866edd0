"""Keep-alives of streams that wait: their form, mode and interval are oMLX's own.

Whether a request streams is one word of its body. oMLX's framework has parsed that
before a handler asks for a model, and is listened to: the body is neither kept nor
read a second time.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from omlx_admission.core import faults, stream_hold
from omlx_admission.core import request as requests
from omlx_admission.hooks.patching.gate import Kind, Need
from omlx_admission.hooks.patching.ledger import Ledger
from omlx_admission.hooks.patching.part import Wanted
from omlx_admission.hooks.patching.switches import switches
from omlx_admission.hooks.server import requests as requests_hook

SERVER = requests_hook.SERVER
IDS = "omlx.api.shared_models"

#: What the id of a response begins with.
_RESPONSE = "resp"

NEEDS = (
    *requests_hook.NEEDS,
    Need(SERVER, "_resolve_keepalive", Kind.SYNC, ("protocol",), exact=True),
    Need(IDS, "generate_id", Kind.SYNC, ("prefix",)),
    Need(
        SERVER,
        "_with_sse_keepalive",
        Kind.ASYNC_GENERATOR,
        ("generator", "http_request", "interval"),
    ),
)


def keepalive(module: Any, protocol: str) -> stream_hold.Keepalive | None:
    """What oMLX would send on a stream of ``protocol`` now; None in its mode ``off``.

    Asked for each stream, because the mode can be changed while the server runs. In
    the mode ``chunk`` oMLX has nothing for Responses, whose clients take no event
    before ``response.created``, and not all of them a comment: there it is that event.
    """
    try:
        frame = module._resolve_keepalive(protocol)
        if frame is None and module._resolve_keepalive("openai_chat") is not None:
            frame = ""
        if frame is None:
            return None
        parameters = inspect.signature(module._with_sse_keepalive).parameters
        return stream_hold.Keepalive(frame.encode(), float(parameters["interval"].default))
    except Exception as error:  # noqa: BLE001 - the stream waits as it did before
        faults.note("asking for oMLX's keep-alive", error)
        return None


async def body(wrapped: Any, _request: Any, args: Any, kwargs: Any) -> Any:
    """``Request.json``: tell the hold of this request what its body says."""
    content = await wrapped(*args, **kwargs)
    request = requests.active()
    if request is not None and request.hold is not None:
        request.hold.asked(content)
    return content


def new_id(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    """``generate_id``: a response that was said to have begun keeps its id.

    It is stored under it, and asked for by it later.
    """
    request = requests.active()
    hold = None if request is None else request.hold
    prefix = args[0] if args else kwargs.get("prefix")
    if hold is not None and hold.response_id and getattr(prefix, "value", "") == _RESPONSE:
        return hold.response_id
    return wrapped(*args, **kwargs)


def apply(module: Any, ledger: Ledger, wanted: Wanted) -> None:
    """Keep streams alive that have waited long."""
    # Here and not above: a process that serves nothing has no Starlette.
    import omlx.api.shared_models
    import starlette.requests

    ledger.wrap(omlx.api.shared_models, "generate_id", new_id)
    ledger.wrap(starlette.requests, "Request.json", body)
    rule = stream_hold.Rule(wanted.settings.stream_hold_s, partial(keepalive, module))
    switches.handling.hold_for = rule.hold_for
