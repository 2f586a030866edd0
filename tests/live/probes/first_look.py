"""What the first look at each surface does on the event loop, in a fresh process.

Usage: ``first_look.py MODELS``. Prints, by path, the status and what was imported,
compiled or read from disk on the loop's thread while it was answered.
"""

import asyncio
import json
import logging
import sys
import threading

from omlx_admission import _startup

_startup.main()
logging.disable(logging.CRITICAL)

from omlx import server  # noqa: E402

PATHS = (
    "/admission",
    "/admission/status?timeline=1",
    "/admission/status/schema",
    "/admission/metrics",
)

seen = []
watched = None


def audit(event, args):
    # A number is open already; a compiled text has its name second.
    name = args[1] if event == "compile" else args[0] if args else None
    if event in ("import", "compile", "open") and threading.get_ident() == watched:
        seen.append([event, str(name)])


async def get(address):
    path, _, query = address.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"here")],
        "scheme": "http",
        "server": ("here", 80),
        "client": ("127.0.0.1", 1),
        "root_path": "",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await server.app(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent)


async def look():
    global watched
    # What any server has done before somebody looks at it.
    await get("/health")
    await asyncio.to_thread(int)
    found = {}
    for path in PATHS:
        seen.clear()
        watched = threading.get_ident()
        status, _ = await get(path)
        watched = None
        found[path] = {"status": status, "on the loop": list(seen)}
    _, body = await get("/admission/status")
    found["sites"] = len(json.loads(body)["gpu_turn"]["sites"])
    return found


sys.addaudithook(audit)
server.init_server(sys.argv[1])
print(json.dumps(asyncio.run(look())))
