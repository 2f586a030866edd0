"""The HTTP server.

Routes look their helpers up among this module's names at call time, so a test or
a plugin can replace them here.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ._version import __version__
from .admin.auth import _RedirectToLogin, init_auth, verify_any_api_key
from .admin.routes import router as admin_router
from .admin.routes import set_admin_getters
from .api import formats
from .api.audio_routes import realtime_router
from .api.audio_routes import router as audio_router
from .api.formats import (
    AnthropicMessagesRequest,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ResponsesRequest,
    plain_messages,
)
from .engine import BaseEngine, EmbeddingEngine, RerankerEngine
from .engine.base import GenerationOutput
from .engine_pool import EnginePool
from .exceptions import (
    EnginePoolError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelBusyError,
    ModelLoadingError,
    ModelNotFoundError,
    ModelTooLargeError,
    ModelUnavailableError,
    PrefillMemoryAbortedError,
    PrefillMemoryExceededError,
    SchedulerQueueFullError,
)
from .model_discovery import format_size

logger = logging.getLogger(__name__)
security = HTTPBearer(auto_error=False)

_KEEPALIVE_COMMENT = ": keep-alive\n\n"
_KEEPALIVE_CHAT_CHUNK = formats.chat_keepalive("chatcmpl-keepalive")
_KEEPALIVE_COMPLETION_CHUNK = formats.completion_keepalive("cmpl-keepalive")
_KEEPALIVE_ANTHROPIC_PING = formats.ANTHROPIC_PING
_SSE_HEADERS = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}


class EngineType(enum.Enum):
    """What a route needs an engine for."""

    LLM = "llm"
    EMBEDDING = "embedding"
    RERANKER = "reranker"


@dataclass
class ServerState:
    """Everything the routes share."""

    engine_pool: EnginePool | None = None
    default_model: str | None = None
    api_key: str | None = None
    settings_manager: Any = None
    global_settings: Any = None
    process_memory_enforcer: Any = None
    sampling: Any = None
    pinned_preload_complete: bool = True


_server_state = ServerState()


def get_server_state() -> ServerState:
    return _server_state


def get_engine_pool() -> EnginePool:
    if _server_state.engine_pool is None:
        raise HTTPException(status_code=503, detail="Server not initialized")
    return _server_state.engine_pool


async def verify_api_key(
    request: Request,
    credentials: HTTPAuthorizationCredentials | None = Depends(security),  # noqa: B008
) -> bool:
    """Dependency of API routes: Bearer token or ``x-api-key``; open without a key."""
    if _server_state.api_key is None:
        return True
    settings = _server_state.global_settings
    if settings is not None and settings.auth.skip_api_key_verification:
        return True
    given = credentials.credentials if credentials else request.headers.get("x-api-key")
    if given is None:
        raise HTTPException(status_code=401, detail="API key required")
    sub_keys = settings.auth.sub_keys if settings is not None else []
    if not verify_any_api_key(given, _server_state.api_key, sub_keys):
        raise HTTPException(status_code=401, detail="Invalid API key")
    return True


# -- start and end ----------------------------------------------------------


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Enforcer and preload around the life of the server."""
    pool = _server_state.engine_pool
    if pool is not None and _server_state.global_settings is not None:
        _start_enforcer(pool)
    preload = None
    if pool is not None:
        _server_state.pinned_preload_complete = False
        preload = asyncio.create_task(_preload(pool))
    yield
    if preload is not None:
        preload.cancel()
        with suppress(asyncio.CancelledError):
            await preload
    if _server_state.process_memory_enforcer is not None:
        await _server_state.process_memory_enforcer.stop()
        if pool is not None:
            pool._process_memory_enforcer = None
    if pool is not None:
        await pool.shutdown()


def _start_enforcer(pool: EnginePool) -> None:
    from .process_memory_enforcer import ProcessMemoryEnforcer

    memory = _server_state.global_settings.memory
    enforcer = ProcessMemoryEnforcer(
        engine_pool=pool,
        memory_guard_tier=memory.memory_guard_tier,
        memory_guard_custom_ceiling_gb=memory.memory_guard_custom_ceiling_gb,
        settings_manager=_server_state.settings_manager,
        prefill_memory_guard=memory.prefill_memory_guard,
        global_settings=_server_state.global_settings,
        soft_threshold=memory.soft_threshold,
        hard_threshold=memory.hard_threshold,
    )
    _server_state.process_memory_enforcer = enforcer
    pool._process_memory_enforcer = enforcer
    pool._get_final_ceiling = enforcer.get_final_ceiling
    pool._get_admission_ceiling = enforcer.get_admission_ceiling
    pool._get_admission_soft_target = enforcer.get_admission_soft_target
    enforcer.start()


async def _preload(pool: EnginePool) -> None:
    try:
        await pool.preload_pinned_models()
    finally:
        _server_state.pinned_preload_complete = True


app = FastAPI(title="oMLX API (stand-in)", version=__version__, lifespan=lifespan)
set_admin_getters(
    get_server_state,
    get_engine_pool,
    lambda: _server_state.settings_manager,
    lambda: _server_state.global_settings,
)
app.include_router(admin_router)
app.include_router(audio_router, dependencies=[Depends(verify_api_key)])
app.include_router(realtime_router)


def init_server(
    model_dirs: str | list[str],
    scheduler_config: Any = None,
    api_key: str | None = None,
    global_settings: Any = None,
) -> None:
    """Make the pool and find the models; called once, before the first request."""
    from .model_settings import ModelSettingsManager

    state = _server_state
    state.api_key, state.global_settings = api_key, global_settings
    if global_settings is not None:
        _init_secret(global_settings)
        state.sampling = global_settings.sampling
    origins = global_settings.server.cors_origins if global_settings else ["*"]
    app.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    base = Path(global_settings.base_path) if global_settings else Path.home() / ".omlx"
    manager = state.settings_manager = ModelSettingsManager(base)
    dirs = [model_dirs] if isinstance(model_dirs, str) else list(model_dirs)
    pool = state.engine_pool = EnginePool(scheduler_config=scheduler_config)
    pool._settings_manager = manager
    pool.discover_models(dirs, manager.get_pinned_model_ids())
    pool.apply_settings_overrides(manager)
    known = pool.get_model_ids()
    wanted = manager.get_default_model_id()
    state.default_model = wanted if wanted in known else next(iter(known), None)


def _init_secret(settings: Any) -> None:
    import secrets

    if not settings.auth.secret_key:
        settings.auth.secret_key = secrets.token_hex(32)
        settings.save()
    init_auth(settings.auth.secret_key, lambda: _server_state.global_settings)


# -- errors -----------------------------------------------------------------


def _status_to_error_type(status_code: int) -> str:
    names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    if status_code in names:
        return names[status_code]
    return "server_error" if status_code >= 500 else "invalid_request_error"


def _is_api_route(request: Request) -> bool:
    return request.url.path.startswith("/v1/")


def _openai_error_body(
    message: Any, status_code: int, param: Any = None, code: Any = None
) -> dict[str, Any]:
    kind = _status_to_error_type(status_code)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error(request: Request, status: int, detail: Any, **headers: str) -> JSONResponse:
    content = _error_content(request, status, detail)
    return JSONResponse(status_code=status, content=content, headers=headers or None)


def _error_content(request: Request, status: int, detail: Any) -> dict[str, Any]:
    logger.warning("%s %s: %d, %s", request.method, request.url.path, status, detail)
    api = _is_api_route(request)
    return _openai_error_body(detail, status) if api else {"detail": detail}


@app.exception_handler(_RedirectToLogin)
async def redirect_to_login_handler(request: Request, exc: Exception) -> Response:
    return RedirectResponse(url="/admin", status_code=302)


@app.exception_handler(HTTPException)
async def http_exception_handler(request: Request, exc: HTTPException) -> JSONResponse:
    """Every refusal. Headers of the exception are lost here, ``Retry-After`` too."""
    content = _error_content(request, exc.status_code, exc.detail)
    return JSONResponse(status_code=exc.status_code, content=content)


@app.exception_handler(RequestValidationError)
async def validation_exception_handler(
    request: Request, exc: RequestValidationError
) -> JSONResponse:
    errors = exc.errors()
    if not _is_api_route(request):
        return JSONResponse(status_code=422, content={"detail": errors})
    text = "; ".join(
        f"{' -> '.join(str(part) for part in error['loc'])}: {error['msg']}" for error in errors
    )
    param = errors[0]["loc"][-1] if errors else None
    return JSONResponse(status_code=422, content=_openai_error_body(text, 422, param=param))


@app.exception_handler(InvalidRequestError)
async def invalid_request_error_handler(
    request: Request, exc: InvalidRequestError
) -> JSONResponse:
    return _error(request, 400, str(exc))


@app.exception_handler(SchedulerQueueFullError)
async def scheduler_queue_full_handler(
    request: Request, exc: SchedulerQueueFullError
) -> JSONResponse:
    """The one refusal with ``Retry-After``."""
    detail = f"{exc.current_depth} of {exc.max_depth} places in the queue are taken"
    return _error(request, 503, detail, **{"Retry-After": "1"})


def _prefill_memory_openai_error_body(exc: PrefillMemoryExceededError) -> dict[str, Any]:
    aborted = isinstance(exc, PrefillMemoryAbortedError)
    code = "prefill_memory_aborted" if aborted else "prefill_memory_exceeded"
    body = {"type": "error", **_openai_error_body(str(exc), 400, code=code)}
    body["error"]["omlx_code"] = code
    for name in ("estimated_bytes", "limit_bytes"):
        if getattr(exc, name) is not None:
            body["error"][name] = getattr(exc, name)
    return body


@app.exception_handler(PrefillMemoryExceededError)
async def prefill_memory_exceeded_handler(
    request: Request, exc: PrefillMemoryExceededError
) -> JSONResponse:
    body = _prefill_memory_openai_error_body(exc)
    if not _is_api_route(request):
        body = {"detail": str(exc), "omlx_code": body["error"]["omlx_code"]}
    return JSONResponse(status_code=400, content=body)


@app.exception_handler(Exception)
async def unhandled_exception_handler(request: Request, exc: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
    return _error(request, 500, "Internal server error")


# -- engines ----------------------------------------------------------------


def _wake_process_memory_enforcer(*, active: bool = False) -> None:
    wake = getattr(_server_state.process_memory_enforcer, "wake", None)
    if callable(wake):
        wake(active=active)


def resolve_model_id(model_id: str | None) -> str | None:
    pool = _server_state.engine_pool
    if pool is None or model_id is None:
        return model_id
    return pool.resolve_model_id(model_id, _server_state.settings_manager)


async def get_engine(
    model_id: str | None = None,
    engine_type: EngineType = EngineType.LLM,
    _lease: bool = False,
    _leased_out: list[str] | None = None,
) -> Any:
    """The engine a route asked for, or an HTTPException.

    The pool's own kinds of error become 404, 507, 409 or 500; any other exception
    passes through untouched. ``_leased_out`` receives the model whose lease is held.
    """
    pool = get_engine_pool()
    if model_id is None and engine_type is EngineType.LLM:
        model_id = _server_state.default_model
    if model_id is None:
        raise HTTPException(status_code=400, detail="No model specified")
    manager = _server_state.settings_manager
    options: dict[str, Any] = {"_lease": True} if _lease else {}
    profile = None
    if engine_type is EngineType.LLM and manager is not None:
        profile = manager.get_exposed_profile_runtime_settings_for_request(model_id)
    if profile is not None:
        model_id, options["runtime_settings"] = profile
    else:
        model_id = pool.resolve_model_id(model_id, manager)
    _wake_process_memory_enforcer(active=True)
    leased = model_id
    try:
        engine = await pool.get_engine(model_id, **options)
    except ModelNotFoundError as error:
        if engine_type is EngineType.LLM and _fallback_is_on():
            # Whatever goes wrong with the default model, the answer is the 404.
            with suppress(Exception):
                _wake_process_memory_enforcer(active=True)
                leased = str(_server_state.default_model)
                engine = await pool.get_engine(leased, **({"_lease": True} if _lease else {}))
                if _leased_out is not None and _lease:
                    _leased_out.append(leased)
                return engine
        known = ", ".join(error.available_models) or "(none)"
        detail = f"Model '{model_id}' not found. Available models: {known}"
        raise HTTPException(status_code=404, detail=detail) from error
    except (ModelTooLargeError, InsufficientMemoryError) as error:
        raise HTTPException(status_code=507, detail=str(error)) from error
    except (ModelUnavailableError, ModelLoadingError, ModelBusyError) as error:
        raise HTTPException(status_code=409, detail=str(error)) from error
    except EnginePoolError as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    if _lease and _leased_out is not None:
        _leased_out.append(leased)
    try:
        _check_kind(model_id, engine, engine_type)
    except BaseException:
        if _lease and _leased_out:
            await pool.release_engine(_leased_out.pop())
        raise
    return engine


def _fallback_is_on() -> bool:
    settings = _server_state.global_settings
    return bool(settings and settings.model.model_fallback and _server_state.default_model)


def _check_kind(model_id: str, engine: Any, wanted: EngineType) -> None:
    kinds: dict[EngineType, tuple[type, str]] = {
        EngineType.LLM: (BaseEngine, "an LLM / chat model"),
        EngineType.EMBEDDING: (EmbeddingEngine, "an embedding model"),
        EngineType.RERANKER: (RerankerEngine, "a reranker model"),
    }
    kind, name = kinds[wanted]
    if not isinstance(engine, kind):
        raise HTTPException(status_code=400, detail=f"Model '{model_id}' is not {name}")


@dataclass
class _LLMEngineLease:
    """A lease that is given back once, however often it is released."""

    model_id: str | None = None
    released: bool = False

    async def release(self) -> None:
        if self.released:
            return
        self.released = True
        if self.model_id is not None:
            await get_engine_pool().release_engine(self.model_id)

    def abort_reason(self) -> str | None:
        if self.model_id is None or self.released or _server_state.engine_pool is None:
            return None
        return _server_state.engine_pool.get_abort_requested_reason(self.model_id)

    def abort_requested(self) -> bool:
        return self.abort_reason() is not None


async def _raise_if_llm_lease_abort_requested(lease: _LLMEngineLease) -> None:
    reason = lease.abort_reason()
    if reason == "manual admin unload":
        raise HTTPException(status_code=409, detail="The model is being unloaded")
    if reason is not None:
        raise HTTPException(status_code=507, detail="The model must go: memory is short")


async def _release_after_stream(
    generator: AsyncIterator[str], lease: _LLMEngineLease
) -> AsyncIterator[str]:
    """A body that gives its lease back before its last frame goes out."""
    try:
        await _raise_if_llm_lease_abort_requested(lease)
        async for chunk in generator:
            yield chunk
    finally:
        await lease.release()


async def get_engine_for_model(
    model: str | None = None, *, lease: _LLMEngineLease | None = None
) -> Any:
    """The text engine of a model, under ``lease`` when one is given."""
    if lease is None:
        return await get_engine(model, EngineType.LLM)
    leased: list[str] = []
    engine = await get_engine(model, EngineType.LLM, _lease=True, _leased_out=leased)
    if leased:
        lease.model_id = leased[0]
    return engine


async def get_embedding_engine(model: str) -> Any:
    """The embedder of a model, without a lease."""
    return await get_engine(model, EngineType.EMBEDDING)


async def get_reranker_engine(model: str) -> Any:
    """The reranker of a model, without a lease."""
    return await get_engine(model, EngineType.RERANKER)


@asynccontextmanager
async def acquire_embedding_engine(model: str) -> AsyncIterator[Any]:
    """The embedder of a model under a lease."""
    async with _acquired(model, EngineType.EMBEDDING) as engine:
        yield engine


@asynccontextmanager
async def acquire_reranker_engine(model: str) -> AsyncIterator[Any]:
    """The reranker of a model under a lease."""
    async with _acquired(model, EngineType.RERANKER) as engine:
        yield engine


@asynccontextmanager
async def _acquired(model: str, kind: EngineType) -> AsyncIterator[Any]:
    leased: list[str] = []
    engine = await get_engine(model, kind, _lease=True, _leased_out=leased)
    try:
        yield engine
    finally:
        if leased:
            await get_engine_pool().release_engine(leased[0])


# -- keep-alives ------------------------------------------------------------


def _resolve_keepalive(protocol: str) -> str | None:
    """The frame of a protocol in the mode that is set; None where nothing is sent."""
    settings = _server_state.global_settings
    mode = settings.server.sse_keepalive_mode if settings is not None else "chunk"
    if mode == "off":
        return None
    if mode == "comment":
        return _KEEPALIVE_COMMENT
    frames = {
        "openai_chat": _KEEPALIVE_CHAT_CHUNK,
        "openai_completion": _KEEPALIVE_COMPLETION_CHUNK,
        "anthropic": _KEEPALIVE_ANTHROPIC_PING,
    }
    return frames.get(protocol)


def _chat_keepalive_chunk(response_id: str) -> str:
    """The frame with a stream's own id."""
    return formats.chat_keepalive(response_id)


def _completion_keepalive_chunk(response_id: str) -> str:
    return formats.completion_keepalive(response_id)


async def _gone(http_request: Request | None) -> bool:
    if http_request is None:
        return False
    try:
        return await http_request.is_disconnected()
    except Exception:  # noqa: BLE001 - a closed scope cannot tell
        return False


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, StopAsyncIteration):
        await task


async def _next(iterator: Any) -> Any:
    return await anext(iterator, None)


async def _with_sse_keepalive(
    generator: AsyncIterator[str],
    http_request: Request | None = None,
    interval: float = 10.0,
    disconnect_poll: float = 2.0,
    keepalive_chunk: str | None = _KEEPALIVE_COMMENT,
) -> AsyncIterator[str]:
    """A stream with a frame at once and then every ``interval`` s of silence.

    Looks every ``disconnect_poll`` s whether the client is still there. An error in
    the generator becomes a frame: the status line is long out.
    """
    if keepalive_chunk is not None:
        yield keepalive_chunk
    iterator = aiter(generator)
    task: asyncio.Future[Any] | None = None
    next_check = time.monotonic() + disconnect_poll
    try:
        while True:
            task = asyncio.ensure_future(_next(iterator))
            silent = 0.0
            while True:
                wait = disconnect_poll if http_request is not None else interval
                done, _ = await asyncio.wait({task}, timeout=wait)
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + disconnect_poll
                    if await _gone(http_request):
                        return
                if done:
                    break
                silent += wait
                if silent >= interval:
                    silent = 0.0
                    if keepalive_chunk is not None:
                        yield keepalive_chunk
            try:
                chunk = task.result()
            except PrefillMemoryExceededError as error:
                yield formats.data(_prefill_memory_openai_error_body(error)) + formats.DONE
                return
            except Exception as error:  # noqa: BLE001 - every kind must reach the client
                logger.error("a stream failed: %s", error)
                yield formats.error_frames(error)
                return
            if chunk is None:
                return
            yield chunk
    finally:
        if task is not None and not task.done():
            await _cancelled(task)
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


async def _with_json_keepalive(
    http_request: Request | None,
    coro: Awaitable[str | None],
    interval: float = 10.0,
    disconnect_poll: float = 2.0,
) -> AsyncIterator[str]:
    """A JSON body behind spaces: one at once, one every ``interval`` s.

    The status is 200 from the first space on, so only memory errors of the prompt
    still get a JSON body; any other error cuts the body off.
    """
    task = asyncio.ensure_future(coro)
    yield " "
    waited = 0.0
    try:
        while not task.done():
            done, _ = await asyncio.wait({task}, timeout=disconnect_poll)
            if done:
                break
            if await _gone(http_request):
                return
            waited += disconnect_poll
            if waited >= interval:
                waited = 0.0
                yield " "
        try:
            body = task.result()
        except PrefillMemoryExceededError as error:
            body = formats.dump(_prefill_memory_openai_error_body(error))
        if body is not None:
            yield body
    finally:
        if not task.done():
            await _cancelled(task)


# -- status -----------------------------------------------------------------


def _ceiling() -> int | None:
    enforcer = _server_state.process_memory_enforcer
    return enforcer.get_final_ceiling() if enforcer is not None else None


@app.get("/health")
async def health(response: Response) -> dict[str, Any]:
    """503 while pinned models are loading; never takes the pool's lock."""
    pool = _server_state.engine_pool
    loading = not _server_state.pinned_preload_complete
    if loading:
        response.status_code = 503
    return {
        "status": "loading" if loading else "healthy",
        "default_model": _server_state.default_model,
        "engine_pool": None
        if pool is None
        else {
            "model_count": pool.model_count,
            "loaded_count": pool.loaded_model_count,
            "final_ceiling": _ceiling() or 0,
            "current_model_memory": pool.current_model_memory,
        },
        "mcp": None,
    }


@app.get("/api/status")
async def server_status(_: bool = Depends(verify_api_key)) -> dict[str, Any]:
    """Counters; never takes the pool's lock."""
    pool = get_engine_pool()
    cores = [
        core
        for entry in pool._entries.values()
        if (core := getattr(getattr(entry.engine, "_engine", None), "engine", None)) is not None
    ]
    used, most = pool.current_model_memory, _ceiling()
    return {
        "status": "ok",
        "version": __version__,
        "models_discovered": pool.model_count,
        "models_loaded": pool.loaded_model_count,
        "models_loading": sum(entry.is_loading for entry in pool._entries.values()),
        "default_model": _server_state.default_model,
        "loaded_models": pool.get_loaded_model_ids(),
        "active_requests": sum(len(core._output_collectors) for core in cores),
        "waiting_requests": sum(
            len(core.scheduler.waiting) for core in cores if core.scheduler is not None
        ),
        "model_memory_used": used,
        "model_memory_max": most,
        "model_memory_used_formatted": format_size(used) if used else "0B",
        "model_memory_max_formatted": format_size(most) if most else "unlimited",
    }


@app.get("/v1/models")
async def list_models(_: bool = Depends(verify_api_key)) -> dict[str, Any]:
    """Every model that may be asked for, loaded or not."""
    pool, manager = get_engine_pool(), _server_state.settings_manager
    names: dict[str, Any] = {}
    for model in pool.get_status()["models"]:
        settings = manager.get_settings(model["id"])
        if not settings.is_hidden:
            names[settings.model_alias or model["id"]] = model["model_context_length"]
    for profile in manager.list_exposed_profile_models():
        source = pool.get_entry(profile["source_model_id"])
        if source is not None:
            names.setdefault(profile["model_id"], source.model_context_length)
    now = int(time.time())
    return {
        "object": "list",
        "data": [
            {
                "id": n,
                "object": "model",
                "created": now,
                "owned_by": "omlx",
                "max_model_len": length,
            }
            for n, length in names.items()
        ],
    }


@app.get("/v1/models/status")
async def list_models_status(_: bool = Depends(verify_api_key)) -> dict[str, Any]:
    """The pool's own view of its models."""
    return get_engine_pool().get_status()


@app.post("/v1/models/{model_id}/unload")
async def unload_model(model_id: str, _: bool = Depends(verify_api_key)) -> dict[str, Any]:
    """Tear a model down at once: no lock, no drain, whoever is using it."""
    pool = get_engine_pool()
    entry = pool.get_entry(model_id)
    if entry is None:
        raise HTTPException(status_code=404, detail=f"Model not found: {model_id}")
    if entry.engine is None:
        raise HTTPException(status_code=400, detail=f"Model not loaded: {model_id}")
    await pool._unload_engine(model_id)
    return {"status": "ok", "model_id": model_id}


@app.post("/v1/models/{model_id}/load")
async def load_model_public(model_id: str, _: bool = Depends(verify_api_key)) -> dict[str, Any]:
    pool = get_engine_pool()
    entry = pool.get_entry(model_id)
    if entry is None:
        raise HTTPException(status_code=404, detail=f"Model not found: {model_id}")
    if entry.engine is not None:
        return {"status": "ok", "model_id": model_id, "message": f"Already loaded: {model_id}"}
    try:
        await pool.get_engine(model_id)
    except ModelNotFoundError as error:
        raise HTTPException(status_code=404, detail=str(error)) from error
    except (ModelTooLargeError, InsufficientMemoryError) as error:
        raise HTTPException(status_code=507, detail=str(error)) from error
    except (ModelUnavailableError, ModelLoadingError, ModelBusyError) as error:
        raise HTTPException(status_code=409, detail=str(error)) from error
    except Exception as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    return {"status": "ok", "model_id": model_id, "message": f"Loaded {model_id}"}


# -- embeddings and reranking -----------------------------------------------


@app.post("/v1/embeddings")
async def create_embeddings(
    request: EmbeddingRequest, http_request: Request, _: bool = Depends(verify_api_key)
) -> Response:
    """Vectors. The engine is asked for twice, the second time after the 200 is out."""
    await get_embedding_engine(request.model)
    given = request.input
    texts = [given] if isinstance(given, str) else list(given or [])
    if not texts:
        raise HTTPException(status_code=400, detail="Input cannot be empty")

    async def _build_embeddings() -> str:
        async with acquire_embedding_engine(request.model) as engine:
            output = await engine.embed(texts, max_length=request.max_length)
        vectors = [vector[: request.dimensions] for vector in output.embeddings]
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        counts = {"prompt_tokens": output.total_tokens, "total_tokens": output.total_tokens}
        return formats.dump(
            {"object": "list", "data": data, "model": request.model, "usage": counts}
        )

    return StreamingResponse(
        _with_json_keepalive(http_request, _build_embeddings()), media_type="application/json"
    )


@app.post("/v1/rerank")
async def create_rerank(
    request: RerankRequest, _: bool = Depends(verify_api_key)
) -> dict[str, Any]:
    """Documents by nearness to the query. The engine is asked for twice here too."""
    await get_reranker_engine(request.model)
    if not request.documents or not request.query:
        raise HTTPException(status_code=400, detail="Documents and query cannot be empty")
    async with acquire_reranker_engine(request.model) as engine:
        output = await engine.rerank(request.query, request.documents, request.top_n)
    results = [
        {
            "index": index,
            "relevance_score": output.scores[index],
            "document": request.documents[index] if request.return_documents else None,
        }
        for index in output.indices
    ]
    counts = {"total_tokens": output.total_tokens}
    return {"model": request.model, "results": results, "usage": counts}


# -- text -------------------------------------------------------------------


def _sampling(request: Any, **more: Any) -> dict[str, Any]:
    """Options of a generation: the request's, the model's, the server's."""
    manager, defaults = _server_state.settings_manager, _server_state.sampling
    settings = manager.get_settings_for_request(request.model, resolve_model_id(request.model))
    options: dict[str, Any] = {"seed": request.seed, **more}
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
    for name in names:
        given = options.get(name, getattr(request, name, None))
        for source in (settings, defaults):
            given = getattr(source, name, None) if given is None else given
        options[name] = given
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return options


def _sse(
    http_request: Request,
    lease: _LLMEngineLease,
    frames: AsyncIterator[str],
    keepalive: str | None,
) -> StreamingResponse:
    body = _with_sse_keepalive(frames, http_request=http_request, keepalive_chunk=keepalive)
    return StreamingResponse(
        _release_after_stream(body, lease),
        media_type="text/event-stream",
        headers=_SSE_HEADERS,
    )


def _json(
    http_request: Request,
    lease: _LLMEngineLease,
    run: Callable[[], Awaitable[list[GenerationOutput]]],
    render: Callable[[list[GenerationOutput], float], str],
) -> StreamingResponse:
    async def build() -> str:
        await _raise_if_llm_lease_abort_requested(lease)
        started = time.perf_counter()
        outputs = await run()
        seconds = time.perf_counter() - started
        return render(outputs, seconds)

    return StreamingResponse(
        _release_after_stream(_with_json_keepalive(http_request, build()), lease),
        media_type="application/json",
    )


async def _chat_preflight(
    engine: Any, lease: _LLMEngineLease, messages: list[dict[str, str]], request: Request
) -> int:
    try:
        tokens = int(engine.count_chat_tokens(messages))
    except Exception as error:
        detail = f"Chat template error: {error}"
        raise HTTPException(status_code=400, detail=detail) from error
    await _raise_if_llm_lease_abort_requested(lease)
    await engine.preflight_chat(messages, request_id=request.headers.get("x-request-id"))
    await _raise_if_llm_lease_abort_requested(lease)
    return tokens


@app.post("/v1/completions")
async def create_completion(
    request: CompletionRequest, http_request: Request, _: bool = Depends(verify_api_key)
) -> Response:
    lease = _LLMEngineLease()
    try:
        engine = await get_engine_for_model(request.model, lease=lease)
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        options = _sampling(request, stop=request.stop)
        await _raise_if_llm_lease_abort_requested(lease)
        for prompt in prompts:
            await engine.preflight_completion(
                prompt, request_id=http_request.headers.get("x-request-id")
            )
        await _raise_if_llm_lease_abort_requested(lease)
        if request.stream:
            response_id = formats.new_id("cmpl-")
            stream = formats.Stream(engine.stream_generate(prompt=prompts[0], **options))
            include = bool(request.stream_options and request.stream_options.include_usage)
            frames = formats.completion_stream(request.model, stream, response_id, include)
            keepalive = _resolve_keepalive("openai_completion")
            if keepalive == _KEEPALIVE_COMPLETION_CHUNK:
                keepalive = _completion_keepalive_chunk(response_id)
            return _sse(http_request, lease, frames, keepalive)

        async def run() -> list[GenerationOutput]:
            return [await engine.generate(prompt=prompt, **options) for prompt in prompts]

        return _json(
            http_request,
            lease,
            run,
            lambda outputs, s: formats.completion_body(request.model, outputs, s),
        )
    except BaseException:
        await lease.release()
        raise


async def _converse(
    request: Any,
    http_request: Request,
    messages: list[dict[str, str]],
    sampling: dict[str, Any],
    frames: Callable[[formats.Stream, int], AsyncIterator[str]],
    body: Callable[[GenerationOutput, float], str],
    keepalive: str | None,
) -> Response:
    """The next turn of a conversation, whatever API it came through."""
    lease = _LLMEngineLease()
    try:
        engine = await get_engine_for_model(request.model, lease=lease)
        options = _sampling(request, **sampling)
        tokens = await _chat_preflight(engine, lease, messages, http_request)
        if request.stream:
            stream = formats.Stream(engine.stream_chat(messages=messages, **options))
            return _sse(http_request, lease, frames(stream, tokens), keepalive)

        async def run() -> list[GenerationOutput]:
            return [await engine.chat(messages=messages, **options)]

        return _json(http_request, lease, run, lambda outputs, s: body(outputs[0], s))
    except BaseException:
        await lease.release()
        raise


@app.post("/v1/chat/completions")
async def create_chat_completion(
    request: ChatCompletionRequest, http_request: Request, _: bool = Depends(verify_api_key)
) -> Response:
    response_id = formats.new_id("chatcmpl-")
    include = bool(request.stream_options and request.stream_options.include_usage)
    limit = request.max_tokens or request.max_completion_tokens
    keepalive = _resolve_keepalive("openai_chat")
    if keepalive == _KEEPALIVE_CHAT_CHUNK:
        keepalive = _chat_keepalive_chunk(response_id)
    return await _converse(
        request,
        http_request,
        plain_messages(request.messages),
        {"stop": request.stop, "max_tokens": limit},
        lambda stream, _: formats.chat_stream(request.model, stream, response_id, include),
        lambda output, s: formats.chat_body(request.model, output, s),
        keepalive,
    )


@app.post("/v1/messages")
async def create_anthropic_message(
    request: AnthropicMessagesRequest, http_request: Request, _: bool = Depends(verify_api_key)
) -> Response:
    return await _converse(
        request,
        http_request,
        plain_messages(request.messages, request.system),
        {"stop": request.stop_sequences},
        lambda stream, tokens: formats.message_stream(request.model, stream, tokens),
        lambda output, _: formats.message_body(request.model, output),
        _resolve_keepalive("anthropic"),
    )


@app.post("/v1/messages/count_tokens")
async def count_anthropic_tokens(
    request: AnthropicMessagesRequest, _: bool = Depends(verify_api_key)
) -> dict[str, int]:
    """Prompt length of a conversation; loads the model for it."""
    lease = _LLMEngineLease()
    try:
        engine = await get_engine_for_model(request.model, lease=lease)
        messages = plain_messages(request.messages, request.system)
        return {"input_tokens": int(engine.count_chat_tokens(messages))}
    finally:
        await lease.release()


@app.post("/v1/responses")
async def create_response(
    request: ResponsesRequest, http_request: Request, _: bool = Depends(verify_api_key)
) -> Response:
    """Nothing is stored."""
    given = request.input or ""
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    limit = request.max_output_tokens
    return await _converse(
        request,
        http_request,
        plain_messages(turns, request.instructions),
        {"max_tokens": limit},
        lambda stream, _: formats.response_stream(request.model, stream, limit),
        lambda output, _: formats.response_body(request.model, output, limit),
        _resolve_keepalive("openai_responses"),
    )
