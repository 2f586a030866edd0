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

from omlx_admission.hooks.pool.state import state_of  # noqa: E402
from standin import launch  # noqa: E402

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


if hasattr(STTEngine, "create_realtime_session"):
    # Of the model that is not there; the session on it is oMLX's own.
    STTEngine.supports_realtime_stt = lambda self: True


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


class Socket:
    """A realtime transcription, accepted and started."""

    def __init__(self):
        self.inbox, self.sent = asyncio.Queue(), []
        self.inbox.put_nowait({"type": "websocket.connect"})
        self.say({"type": "start", "model": "stt"})

        async def send(message):
            self.sent.append(message)

        scope = scope_of("/v1/audio/transcriptions/realtime", "websocket")
        self.task = asyncio.ensure_future(server.app(scope, self.inbox.get, send))

    def say(self, what):
        self.inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(what)})

    def said(self, words):
        return any(words in str(m.get("text")) for m in self.sent)

    async def ready(self):
        await until(lambda: self.said("ready"))

    async def end(self, how):
        if how == "stop":
            self.say({"type": "stop"})
        else:
            self.inbox.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await self.task


async def story_a_socket_holds_its_model(pool):
    """Leased from hand-out to the end of the socket, however it ends."""
    if not has_realtime():
        return None
    more_headers.clear()
    found = {}
    for end in ("stop", "disconnect"):
        socket = Socket()
        await socket.ready()
        entry = pool._entries["stt"]
        other = somebody_else(pool.get_engine("text"))
        for _ in range(50):
            await asyncio.sleep(0.001)
        during = [entry.in_use, entry.engine is not None, other.done()]
        await socket.end(end)
        await other
        found[end] = {
            "during": during,
            "leases": entry.in_use,
            "done": socket.said("transcript.done"),
        }
    return found


async def request(path, content, content_type, max_wait):
    """One POST of a client of its own; status, headers and body."""
    sent = []
    queue = [{"type": "http.request", "body": content, "more_body": False}]
    scope = scope_of(path)
    wait = (b"x-omlx-max-wait", max_wait)
    scope["headers"] = [(b"content-type", content_type), wait]

    async def receive():
        return queue.pop() if queue else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await server.app(scope, receive, send)
    return {
        "status": sent[0]["status"],
        "headers": {k.decode(): v.decode() for k, v in sent[0]["headers"]},
        "body": b"".join(m.get("body", b"") for m in sent).decode(),
    }


def embed(max_wait):
    body = json.dumps({"model": "embed", "input": "hello"}).encode()
    return request("/v1/embeddings", body, b"application/json", max_wait)


def transcribe(max_wait=b"20"):
    parts = {'name="model"': "stt", 'name="file"; filename="a.wav"': "RIFF"}
    body = "".join(
        f"--x\r\nContent-Disposition: form-data; {name}\r\n\r\n{value}\r\n"
        for name, value in parts.items()
    )
    body += "--x--\r\n"
    content_type = b"multipart/form-data; boundary=x"
    return request("/v1/audio/transcriptions", body.encode(), content_type, max_wait)


async def story_an_idle_socket_closes_no_gate(pool):
    """C19: nothing is said on it; a client of another model returns again and again."""
    if not has_realtime():
        return None
    socket = Socket()
    await socket.ready()
    entry, tries = pool._entries["stt"], []
    for _ in range(3):
        waits = somebody_else(embed(b"0.5"))
        beside = []
        while not waits.done():
            heard = await transcribe()
            beside.append([heard["status"], waits.done(), bool(entry.pending_unload_reason)])
            await asyncio.sleep(0.02)
        tries.append({"answer": waits.result(), "beside": beside})
    more = [somebody_else(embed(b"20")), somebody_else(transcribe())]
    heard = await more[1]
    waits = not more[0].done()
    await socket.end("disconnect")
    served = await more[0]
    again = await transcribe()
    return {
        "tries": tries,
        "at its end": [heard["status"], waits, served["status"], again["status"]],
        "leases": [pool._entries[m].in_use for m in ("stt", "embed")],
    }


async def story_beside_an_idle_socket_another_model_leaves(pool):
    """C19: also where that one was used later than the socket's."""
    if not has_realtime():
        return None
    one_fits = pool._get_final_ceiling
    pool._get_final_ceiling = lambda: CEILING * 3 // 2  # two fit
    socket = Socket()
    await socket.ready()
    await pool.get_engine("text", _lease=True)
    waits = somebody_else(embed(b"20"))
    await until(lambda: is_leaving(pool, "text") or is_leaving(pool, "stt") or waits.done())
    leave = [m for m in ("stt", "text") if is_leaving(pool, m)]
    await pool.release_engine("text")
    served = await waits
    loaded = sorted(m for m, e in pool._entries.items() if e.engine is not None)
    await socket.end("stop")
    pool._get_final_ceiling = one_fits
    return [leave, served["status"], loaded]


async def story_a_refused_socket_says_why(pool):
    if not has_realtime():
        return None
    more_headers[:] = [(b"x-omlx-max-wait", b"0")]
    await pool.get_engine("text", _lease=True)
    socket = Socket()
    await socket.task
    await pool.release_engine("text")
    texts = [json.loads(m["text"]) for m in socket.sent if m.get("text")]
    return {
        "types": [t["type"] for t in texts],
        "why": "'stt' is not loaded" in str(texts),
        "closed": [m.get("code") for m in socket.sent if m["type"] == "websocket.close"],
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
