"""Calls the server's routes on a pool that answers as told, and prints what came back.

The app is called directly, message by message, so that a body cut off after its
status, or a client that has left, can be told apart from a normal answer.
"""

import asyncio
import json
import logging
from types import SimpleNamespace

logging.disable(logging.CRITICAL)

from fastapi import HTTPException  # noqa: E402
from omlx import exceptions, server  # noqa: E402
from omlx.engine.embedding import EmbeddingEngine  # noqa: E402
from stories import ends, tell  # noqa: E402

TEXT_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
MAPPED = {
    "not found": [404, None],
    "too large": [507, None],
    "no room": [507, None],
    "unavailable": [409, None],
    "loading": [409, None],
    "busy": [409, None],
    "other of the pool": [500, None],
}

#: 4.2: what goes over the wire while nothing else does; Responses have no chunk.
KEEPALIVES = {
    "openai_chat": 'data: {"id":"chatcmpl-keepalive","object":"chat.completion.chunk",'
    '"created":0,"model":"keepalive","choices":[{"index":0,'
    '"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    "openai_completion": 'data: {"id":"cmpl-keepalive","object":"text_completion",'
    '"created":0,"model":"keepalive","choices":[{"index":0,"text":"","logprobs":null,'
    '"finish_reason":null}]}\n\n',
    "anthropic": 'event: ping\ndata: {"type":"ping"}\n\n',
    "openai_responses": None,
}

ALL = (*MAPPED, "queue full", "own queue full", "with header", "unknown")


class QueueFull(exceptions.SchedulerQueueFullError):
    """A subclass, as the plugin has one."""


def errors():
    return {
        "not found": exceptions.ModelNotFoundError("m", ["a"]),
        "too large": exceptions.ModelTooLargeError("m", 2, 1),
        "no room": exceptions.InsufficientMemoryError(1, 1, "no room"),
        "unavailable": exceptions.ModelUnavailableError("m", "broken"),
        "loading": exceptions.ModelLoadingError("m"),
        "busy": exceptions.ModelBusyError("m", "reload"),
        "other of the pool": exceptions.EnginePoolError("what"),
        "queue full": exceptions.SchedulerQueueFullError(1, 1),
        "own queue full": QueueFull(1, 1),
        "with header": HTTPException(503, "later", headers={"Retry-After": "7"}),
        "unknown": RuntimeError("what"),
    }


class Pool:
    """Answers ``get_engine`` with what the story put into ``answers``, in turn."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []
        self.released = []
        self.unloaded = []
        self.entry = SimpleNamespace(
            engine=None, is_loading=False, in_use=0, model_context_length=512
        )
        self._entries = {}
        self._lock = asyncio.Lock()

    def resolve_model_id(self, name, manager):
        return name

    def get_entry(self, name):
        return self.entry

    def get_abort_requested_reason(self, name):
        return None

    async def get_engine(self, name, **keywords):
        self.calls.append([name, keywords])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            raise exceptions.ModelBusyError(name, "go on")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def release_engine(self, name):
        self.released.append(name)

    async def _unload_engine(self, name):
        self.unloaded.append(name)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/embeddings": {"model": "m", "input": "hi"},
}


def set_up(pool, *, fallback=False, api_key=None, open_admin=False):
    state = server._server_state
    state.engine_pool = pool
    state.default_model = "default"
    state.api_key = api_key
    state.global_settings = SimpleNamespace(
        model=SimpleNamespace(model_fallback=fallback, hide_helper_models=False),
        auth=SimpleNamespace(
            skip_api_key_verification=open_admin, api_key=api_key, sub_keys=[]
        ),
        server=SimpleNamespace(sse_keepalive_mode="chunk"),
    )
    # Admin routes reach the settings in a way of their own.
    from omlx.admin import auth, routes

    auth._get_global_settings = lambda: state.global_settings
    routes._get_global_settings = lambda: state.global_settings
    routes._get_engine_pool = lambda: pool
    return pool


async def call(path, body=None, *, method="POST", headers=(), leave=False):
    """One request; ``leave`` hangs up right after it was sent."""
    content = b"" if body is None else json.dumps(body).encode()
    sent, queue = [], [{"type": "http.request", "body": content, "more_body": False}]
    if leave:
        queue.append({"type": "http.disconnect"})

    async def receive():
        if queue:
            return queue.pop(0) if len(queue) > 1 or not leave else queue[0]
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    raised = None
    try:
        await server.app(scope, receive, send)
    except Exception as error:
        raised = type(error).__name__
    start = next((message for message in sent if message["type"].endswith("start")), {})
    text = b"".join(message.get("body", b"") for message in sent).decode()
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    ended = sent and sent[-1].get("more_body") is False
    return SimpleNamespace(
        status=start.get("status"),
        retry_after=dict(start.get("headers", [])).get(b"retry-after", b"").decode() or None,
        text=text,
        json=parsed,
        whole=bool(ended),
        raised=raised,
    )


@ends(
    "4.2, 4.3: a Retry-After of ours would be dropped",
    {
        **MAPPED,
        "queue full": [503, "1"],
        "own queue full": [503, "1"],
        "with header": [503, None],
        "unknown": [500, None],
    },
)
async def story_status_of_each_error():
    found = {}
    for name, error in errors().items():
        set_up(Pool(error))
        answer = await call("/v1/chat/completions", CHAT)
        found[name] = [answer.status, answer.retry_after]
    return found


@ends(
    "4.3: one body for all routes, Anthropic's too",
    {
        f"{path} {stream}": [507, ["code", "message", "param", "type"], "server_error"]
        for path in (*TEXT_ROUTES, "/v1/embeddings")
        for stream in (False, True)
    },
)
async def story_every_route_maps_alike():
    found = {}
    for path, body in ROUTES.items():
        for stream in (False, True):
            set_up(Pool(errors()["no room"]))
            answer = await call(path, {**body, "stream": stream})
            error = (answer.json or {}).get("error", {})
            found[f"{path} {stream}"] = [answer.status, sorted(error), error.get("type")]
    return found


@ends("4.2: whatever happens to the fallback", {"status": 404, "asked": ["m", "default"]})
async def story_failed_fallback_is_a_404():
    known = errors()
    pool = set_up(Pool(known["not found"], known["no room"]), fallback=True)
    answer = await call("/v1/chat/completions", CHAT)
    return {"status": answer.status, "asked": [name for name, _ in pool.calls]}


@ends("4.2", {"status": 404, "asked": ["m"]})
async def story_unknown_name_without_fallback():
    pool = set_up(Pool(errors()["not found"]))
    answer = await call("/v1/chat/completions", CHAT)
    return {"status": answer.status, "asked": [name for name, _ in pool.calls]}


@ends(
    "4.2: everything the pool does not own is 500",
    {
        **MAPPED,
        "queue full": [500, None],
        "own queue full": [500, None],
        "with header": [500, None],
        "unknown": [500, None],
    },
)
async def story_public_load_route():
    found = {}
    for name, error in errors().items():
        set_up(Pool(error))
        answer = await call("/v1/models/m/load")
        found[name] = [answer.status, answer.retry_after]
    return found


@ends("4.2", {name: [500, ["detail"]] for name in ALL})
async def story_admin_load_route():
    found = {}
    for name, error in errors().items():
        set_up(Pool(error), open_admin=True)
        answer = await call("/admin/api/models/m/load")
        found[name] = [answer.status, sorted(answer.json or {})]
    return found


@ends("1.4", {"status": 200, "unloaded": ["m"]})
async def story_public_unload_takes_no_lock():
    pool = set_up(Pool(None))
    pool.entry.engine, pool.entry.in_use = object(), 1
    async with pool._lock:
        answer = await call("/v1/models/m/unload")
    return {"status": answer.status, "unloaded": pool.unloaded}


@ends(
    "1.8, 4.2: no lease, and 500 for all but 404",
    {
        **{name: [500, False] for name in ALL},
        "not found": [404, False],
    },
)
async def story_audio_route():
    found = {}
    for name, error in errors().items():
        pool = set_up(Pool(error))
        answer = await call("/v1/audio/speech", {"model": "m", "input": "hi"})
        found[name] = [answer.status, pool.calls[0][1].get("_lease", False)]
    return found


@ends("1.8", {**{path: [True] for path in TEXT_ROUTES}, "/v1/embeddings": [False]})
async def story_text_routes_take_a_lease():
    found = {}
    for path, body in ROUTES.items():
        pool = set_up(Pool(errors()["busy"]))
        await call(path, body)
        found[path] = [keywords.get("_lease", False) for _, keywords in pool.calls]
    return found


@ends(
    "4.2: the second refusal comes after the 200",
    {
        "status": 200,
        "leases": [False, True],
        "first byte": " ",
        "whole": False,
        "json": False,
    },
)
async def story_embeddings_acquire_twice():
    pool = set_up(Pool(EmbeddingEngine("nowhere"), errors()["no room"]))
    answer = await call("/v1/embeddings", ROUTES["/v1/embeddings"])
    return {
        "status": answer.status,
        "leases": [keywords.get("_lease", False) for _, keywords in pool.calls],
        "first byte": answer.text[:1],
        "whole": answer.whole,
        "json": answer.json is not None,
    }


@ends("4.2", {"status": 400, "released": ["m"]})
async def story_wrong_kind_of_model_gives_its_lease_back():
    pool = set_up(Pool(EmbeddingEngine("nowhere")))
    answer = await call("/v1/chat/completions", CHAT)
    return {"status": answer.status, "released": pool.released}


@ends("4.4", {"waiting": True, "status": 409})
async def story_client_that_left_is_waited_for():
    go = asyncio.Event()
    pool = set_up(Pool(go))
    request = asyncio.ensure_future(call("/v1/chat/completions", CHAT, leave=True))
    for _ in range(200):
        await asyncio.sleep(0)
    waiting = bool(pool.calls) and not request.done()
    go.set()
    answer = await request
    return {"waiting": waiting, "status": answer.status}


@ends("8", {"none": 401, "wrong": 401, "bearer": 409, "x-api-key": 409})
async def story_keys():
    found = {}
    cases = {
        "none": (),
        "wrong": ((b"authorization", b"Bearer nope"),),
        "bearer": ((b"authorization", b"Bearer sesame"),),
        "x-api-key": ((b"x-api-key", b"sesame"),),
    }
    for name, headers in cases.items():
        set_up(Pool(errors()["busy"]), api_key="sesame")
        answer = await call("/v1/chat/completions", CHAT, headers=headers)
        found[name] = answer.status
    return found


@ends("8", {"status": 401, "body": ["detail"]})
async def story_paths_outside_the_api_have_plain_bodies():
    set_up(Pool(None), api_key="sesame")
    answer = await call("/api/status", method="GET")
    return {"status": answer.status, "body": sorted(answer.json)}


@ends("4.2", {"chunks": [" "], "raised": "RuntimeError"})
async def story_json_body_is_cut_off_by_an_error():
    async def build():
        raise RuntimeError("too late")

    chunks, raised = [], None
    try:
        async for chunk in server._with_json_keepalive(None, build()):
            chunks.append(chunk)
    except Exception as error:
        raised = type(error).__name__
    return {"chunks": chunks, "raised": raised}


@ends("4.3", {"first": True, "frames": "data: 1\n\n", "error": True, "end": True})
async def story_stream_starts_with_a_keepalive_and_reports_errors():
    async def frames():
        yield "data: 1\n\n"
        raise RuntimeError("too late")

    chunks = [chunk async for chunk in server._with_sse_keepalive(frames())]
    return {
        "first": chunks[0].startswith(":"),
        "frames": chunks[1],
        "error": "too late" in "".join(chunks[2:]),
        "end": "".join(chunks).endswith("data: [DONE]\n\n"),
    }


@ends(
    "4.2",
    {
        "chunk": KEEPALIVES,
        "comment": dict.fromkeys(KEEPALIVES, ": keep-alive\n\n"),
        "off": dict.fromkeys(KEEPALIVES),
    },
)
async def story_keepalives_by_mode():
    set_up(None)
    found = {}
    for mode in ("chunk", "comment", "off"):
        server._server_state.global_settings.server.sse_keepalive_mode = mode
        found[mode] = {
            protocol: server._resolve_keepalive(protocol)
            for protocol in (
                "openai_chat",
                "openai_completion",
                "anthropic",
                "openai_responses",
            )
        }
    return found


@ends("2.1", ["frame", "released", "end"])
async def story_lease_is_released_before_the_last_frame():
    events = []

    class Lease(server._LLMEngineLease):
        async def release(self):
            events.append("released")

    async def frames():
        yield "frame"

    async for frame in server._release_after_stream(frames(), Lease()):
        events.append(frame)
    events.append("end")
    return events


if __name__ == "__main__":
    tell()
