"""A patched server's application in this process, called message by message.

Usage: ``held.py MODELS``. Something happens between the first byte of an answer and
the rest of it, or between two frames of a socket: no client could time that. Prints
what came of each story as JSON.
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import sys

from omlx_admission import _startup

_startup.main()
logging.disable(logging.CRITICAL)

from omlx import server  # noqa: E402
from omlx.engine.stt import STTEngine  # noqa: E402

from omlx_admission.hooks.pool_state import state_of  # noqa: E402
from omlx_admission.surfaces.demo import launch  # noqa: E402

launch.slow_down({"load_s": 0.01, "pretend_audio": True})

#: One of the models fits.
CEILING = 2_700_000_000

BODIES = {
    "/v1/embeddings": {"model": "embed", "input": "hello"},
    "/v1/rerank": {"model": "rerank", "query": "a", "documents": ["a", "b"]},
}


def somebody_else(call):
    """``call`` in a task that belongs to no request, least of all to the current one."""
    context = contextvars.Context()
    return asyncio.get_running_loop().create_task(call, context=context)


async def until(condition):
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


def is_leaving(pool, model):
    return model in state_of(pool).unloading or pool._entries[model].pending_unload_reason


class Session:
    """What a real engine's realtime session does, on no model."""

    def feed_pcm16(self, data):
        pass

    async def poll(self):
        return []

    async def close(self):
        return ["something"]

    async def release(self):
        pass


if hasattr(STTEngine, "create_realtime_session"):

    async def create(self, language=None):
        return Session()

    STTEngine.supports_realtime_stt = lambda self: True
    STTEngine.create_realtime_session = create


#: Headers of the requests to come.
more_headers = []


def set_up(models):
    server.init_server(models)
    pool = server._server_state.engine_pool
    pool._get_final_ceiling = lambda: CEILING
    return pool


def scope_of(path, kind="http"):
    return {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "headers": [(b"content-type", b"application/json"), *more_headers],
        "subprotocols": [],
    }


async def post(path, body, after_validation=None):
    """One POST; ``after_validation`` runs when the engine was handed out once."""
    pool, sent = server._server_state.engine_pool, []
    first, content = True, json.dumps(body).encode()
    queue = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        return queue.pop() if queue else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    # The route's own helper asks first; what happens after it happens before the second.
    name = "get_embedding_engine" if "embed" in path else "get_reranker_engine"
    helper = getattr(server, name)

    async def validated(model):
        nonlocal first
        engine = await helper(model)
        if first and after_validation is not None:
            first = False
            await after_validation(pool)
        return engine

    setattr(server, name, validated)
    try:
        await server.app(scope_of(path), receive, send)
    finally:
        setattr(server, name, helper)
    text = b"".join(m.get("body", b"") for m in sent).decode()
    whole = bool(sent) and sent[-1].get("more_body", False) is False
    try:
        valid = "error" not in json.loads(text)
    except ValueError:
        valid = False
    return {"status": sent[0]["status"], "whole": whole and valid}


async def story_the_second_question(pool):
    """Whatever happens between the two, the second is answered at once."""
    found = {}
    for path, body in BODIES.items():
        for what in ("nothing", "drain", "settings", "admin unload"):
            for budget in (None, b"0"):
                model, waiting = body["model"], []
                await pool.get_engine(model)

                async def between(pool, what=what, model=model, waiting=waiting):
                    if what == "drain":
                        waiting.append(somebody_else(pool.get_engine("text")))
                        await until(lambda: pool._entries[model].pending_unload_reason)
                    elif what == "settings":
                        pool._entries[model].runtime_settings_signature = (("other", "1"),)
                    elif what == "admin unload":
                        pool._mark_pending_unload_locked(model, "manual admin unload")

                more_headers.clear()
                if budget is not None:
                    more_headers.append((b"x-omlx-max-wait", budget))
                answer = await post(path, body, between)
                answer["waited for it"] = [not task.done() for task in waiting]
                for task in waiting:
                    await task
                await until(lambda model=model: not is_leaving(pool, model))
                answer["leases"] = pool._entries[model].in_use
                found[f"{path}, {what}, {'0 s' if budget else 'any'}"] = answer
    return found


def has_realtime():
    return any(
        getattr(route, "path", "").endswith("/realtime") for route in all_routes(server.app)
    )


def all_routes(router):
    for route in router.routes:
        yield route
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from all_routes(inner)


async def story_a_socket_holds_its_model(pool):
    """Leased from hand-out to the end of the socket, however it ends."""
    if not has_realtime():
        return None
    more_headers.clear()
    found = {}
    for end in ("stop", "disconnect"):
        inbox, sent = asyncio.Queue(), []
        inbox.put_nowait({"type": "websocket.connect"})
        start = {"type": "start", "model": "stt"}
        inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(start)})

        async def send(message, sent=sent):
            sent.append(message)

        path = "/v1/audio/transcriptions/realtime"
        socket = asyncio.ensure_future(server.app(scope_of(path, "websocket"), inbox.get, send))
        await until(lambda sent=sent: any("ready" in str(m.get("text")) for m in sent))
        entry = pool._entries["stt"]
        other = somebody_else(pool.get_engine("text"))
        for _ in range(50):
            await asyncio.sleep(0.001)
        during = [entry.in_use, entry.engine is not None, other.done()]
        if end == "stop":
            stop = {"type": "websocket.receive", "text": json.dumps({"type": "stop"})}
            inbox.put_nowait(stop)
        else:
            inbox.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await socket
        await other
        done = any("transcript.done" in str(m.get("text")) for m in sent)
        found[end] = {"during": during, "leases": entry.in_use, "done": done}
    return found


async def story_a_refused_socket_says_why(pool):
    if not has_realtime():
        return None
    more_headers[:] = [(b"x-omlx-max-wait", b"0")]
    await pool.get_engine("text", _lease=True)
    inbox, sent = asyncio.Queue(), []
    inbox.put_nowait({"type": "websocket.connect"})
    start = {"type": "start", "model": "stt"}
    inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(start)})

    async def send(message):
        sent.append(message)

    path = "/v1/audio/transcriptions/realtime"
    await server.app(scope_of(path, "websocket"), inbox.get, send)
    await pool.release_engine("text")
    texts = [json.loads(m["text"]) for m in sent if m.get("text")]
    return {
        "types": [t["type"] for t in texts],
        "why": "'stt' is not loaded" in str(texts),
        "closed": [m.get("code") for m in sent if m["type"] == "websocket.close"],
    }


async def main():
    found = {}
    pool = set_up(sys.argv[1])
    for name, story in list(globals().items()):
        if name.startswith("story_"):
            async with asyncio.timeout(200):
                found[name.removeprefix("story_")] = await story(pool)
    with contextlib.suppress(Exception):
        await pool.shutdown()
    print(json.dumps(found), flush=True)
    # oMLX's threads do not all end with the interpreter.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
