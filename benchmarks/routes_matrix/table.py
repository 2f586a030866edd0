"""Replies as cells, judged and set side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from benchmarks.routes_matrix.outcomes import Outcome
from benchmarks.routes_matrix.routes import COUNT, Reply

#: Agents that read these words in an error take it for their own input being too long,
#: and delete their history.
_MISREAD = re.compile("prompt|context|token", re.IGNORECASE)

_DONE = ("data: [DONE]", "event: message_stop", "response.completed", "response.incomplete")

Found = Mapping[str, Mapping[str, Mapping[str, Reply]]]


def cell(reply: Reply | None) -> str:
    """Status, headers and body of one reply, in one line."""
    if reply is None:
        return ""
    if reply.status == 0:
        return f"no answer ({reply.body.partition(':')[0]})"
    parts = [str(reply.status)]
    if "retry-after" in reply.headers:
        parts.append("Retry-After")
    if "x-should-retry" in reply.headers:
        parts.append(f"x-should-retry: {reply.headers['x-should-retry']}")
    parts.append(shape(reply))
    return ", ".join(part for part in parts if part)


def shape(reply: Reply) -> str:
    """What the body is: complete, cut off, or an error of one of three shapes."""
    if reply.status == 200 and "event-stream" in reply.headers.get("content-type", ""):
        whole = any(mark in reply.body for mark in _DONE)
        failed = '"error":{' in reply.body.replace(" ", "") or "event: error" in reply.body
        return "stream" if whole and not failed else "broken stream"
    if reply.status == 200 and "json" not in reply.headers.get("content-type", ""):
        return ""
    try:
        content = json.loads(reply.body)
    except ValueError:
        return "body cut off"
    if not isinstance(content, dict):
        return "no object"
    error = content.get("error")
    if isinstance(error, dict):
        name = "Anthropic" if content.get("type") == "error" else "OpenAI"
        code = error.get("code")
        return f"{name} {error.get('type')}" + (f", `{code}`" if code else "")
    if "detail" in content:
        code = content.get("code")
        return "detail" + (f", `{code}`" if code else "")
    return ""


def _code(reply: Reply) -> object:
    content = json.loads(reply.body)
    error = content.get("error")
    return error.get("code") if isinstance(error, dict) else content.get("code")


def problems(outcome: Outcome, replies: Mapping[str, Reply]) -> list[str]:
    """What a patched server did not do as it should."""
    found = []
    for route in outcome.routes:
        reply = replies[route.name]
        at = f"{outcome.name}: {route.name}: {cell(reply)}"
        status, code = outcome.status, outcome.code
        if outcome.waits and route.name == COUNT:
            status, code = 503, "model_busy"
        if reply.status != status:
            found.append(at)
            continue
        if reply.status == 200:
            if "broken" in shape(reply) or "cut off" in shape(reply):
                found.append(at)
            continue
        hint = reply.headers.get("retry-after")
        if (reply.status == 503) != (hint is not None and 1 <= int(hint) <= 60):
            found.append(f"{at}: Retry-After is {hint}")
        if code is not None and _code(reply) != code:
            found.append(f"{at}: the code should be {code}")
        if status != 404 and _MISREAD.search(reply.body):
            found.append(f"{at}: {reply.body}")
    return found


def render(found: Found, outcomes: Mapping[str, Outcome]) -> str:
    """One table an outcome: ``found`` is outcome to server to route to reply."""
    parts = []
    for name, servers in found.items():
        outcome = outcomes[name]
        lines = ["| route | stock | patched |", "|---|---|---|"]
        for route in outcome.routes:
            stock, patched = (cell(servers[s].get(route.name)) for s in ("stock", "patched"))
            lines.append(f"| `{route.name}` | {stock} | {patched} |")
        heading = f"## {name[0].upper()}{name[1:]}\n\n{outcome.text[0].upper()}"
        parts.append(heading + outcome.text[1:] + ".\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
