"""Loading, unloading and rescanning by the operator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from .auth import (
    SESSION_COOKIE_NAME,
    SESSION_MAX_AGE,
    create_session_token,
    require_admin,
    verify_any_api_key,
    verify_api_key,
    verify_session,
)

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/admin", tags=["admin"])

_get_server_state: Callable[[], Any] = lambda: None  # noqa: E731
_get_engine_pool: Callable[[], Any] = lambda: None  # noqa: E731
_get_settings_manager: Callable[[], Any] = lambda: None  # noqa: E731
_get_global_settings: Callable[[], Any] = lambda: None  # noqa: E731


def set_admin_getters(
    state: Callable[[], Any],
    pool: Callable[[], Any],
    settings_manager: Callable[[], Any],
    global_settings: Callable[[], Any],
) -> None:
    global _get_server_state, _get_engine_pool, _get_settings_manager, _get_global_settings
    _get_server_state, _get_engine_pool = state, pool
    _get_settings_manager, _get_global_settings = settings_manager, global_settings


class LoginRequest(BaseModel):
    """The main API key."""

    api_key: str
    remember: bool = False


@router.post("/api/login")
async def login(request: LoginRequest, response: Response) -> dict[str, Any]:
    settings = _get_global_settings()
    key = settings.auth.api_key if settings else None
    if not key:
        raise HTTPException(status_code=400, detail="No API key is set")
    if not verify_api_key(request.api_key, key):
        raise HTTPException(status_code=401, detail="Invalid API key")
    response.set_cookie(
        SESSION_COOKIE_NAME,
        create_session_token(),
        httponly=True,
        samesite="lax",
        max_age=SESSION_MAX_AGE,
    )
    return {"success": True}


async def _require_admin_or_bearer(request: Request) -> bool:
    """Dependency of routes that the command line uses too."""
    settings = _get_global_settings()
    if settings is not None and settings.auth.skip_api_key_verification:
        return True
    if verify_session(request):
        return True
    header = request.headers.get("Authorization", "")
    if header.startswith("Bearer ") and settings is not None:
        auth = settings.auth
        if verify_any_api_key(header[7:], auth.api_key or "", auth.sub_keys):
            return True
    raise HTTPException(status_code=401, detail="Admin authentication required")


def _entry(model_id: str) -> tuple[Any, Any]:
    pool = _get_engine_pool()
    entry = pool.get_entry(model_id)
    if entry is None:
        raise HTTPException(status_code=404, detail=f"Model not found: {model_id}")
    return pool, entry


@router.get("/api/models")
async def list_models(is_admin: bool = Depends(require_admin)) -> dict[str, Any]:
    return {"models": _get_engine_pool().get_status()["models"]}


@router.post("/api/models/{model_id}/unload")
async def unload_model(model_id: str, is_admin: bool = Depends(require_admin)) -> Any:
    """Unload; 202 when requests had to be ended first."""
    pool, entry = _entry(model_id)
    if entry.engine is None:
        raise HTTPException(status_code=400, detail=f"Model not loaded: {model_id}")
    if entry.is_loading:
        raise HTTPException(status_code=409, detail=f"Model still loading: {model_id}")
    if not await pool.request_unload(model_id, reason="manual admin unload"):
        return JSONResponse(
            status_code=202, content={"status": "unloading", "model_id": model_id}
        )
    return {"status": "ok", "model_id": model_id, "message": f"Unloaded {model_id}"}


@router.post("/api/models/{model_id}/load")
async def load_model(
    model_id: str, is_admin: bool = Depends(_require_admin_or_bearer)
) -> dict[str, Any]:
    """Load; every failure is a 500."""
    pool, entry = _entry(model_id)
    if entry.engine is not None:
        return {"status": "ok", "model_id": model_id, "message": f"Already loaded: {model_id}"}
    if entry.is_loading:
        raise HTTPException(status_code=409, detail=f"Model is already loading: {model_id}")
    try:
        await pool.get_engine(model_id)
    except Exception as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    return {"status": "ok", "model_id": model_id, "message": f"Loaded {model_id}"}


@router.post("/api/reload")
async def reload_models(is_admin: bool = Depends(require_admin)) -> dict[str, Any]:
    """Read settings and folders anew; everything loaded is unloaded."""
    success, message = await _reload_models()
    if not success:
        raise HTTPException(status_code=500, detail=message)
    return {"status": "ok", "message": message}


async def _reload_models() -> tuple[bool, str]:
    settings = _get_global_settings()
    manager = _get_settings_manager()
    if settings is None or manager is None:
        return False, "Not initialized"
    manager._load()
    dirs = [str(folder) for folder in settings.get_effective_model_dirs()]
    success, message = await _apply_model_dirs_runtime(dirs)
    if success:
        await _get_engine_pool().preload_pinned_models()
    return success, message


async def _apply_model_dirs_runtime(model_dirs: list[str]) -> tuple[bool, str]:
    """Unload everything without the lock, forget all entries, scan."""
    pool, manager = _get_engine_pool(), _get_settings_manager()
    for model_id in pool.get_loaded_model_ids():
        try:
            await pool._unload_engine(model_id)
        except Exception:
            logger.warning("unloading %s failed", model_id, exc_info=True)
    pool._entries.clear()
    pool._current_model_memory = 0
    pool.discover_models(model_dirs, manager.get_pinned_model_ids())
    pool.apply_settings_overrides(manager)
    return True, f"{pool.model_count} models"
