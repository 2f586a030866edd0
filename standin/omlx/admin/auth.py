"""Keys and admin sessions."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Request

SESSION_COOKIE_NAME = "omlx_admin_session"
SESSION_MAX_AGE = 24 * 3600

_secret = secrets.token_hex(32)
_get_global_settings: Callable[[], Any] | None = None


class _RedirectToLogin(Exception):
    """A browser without a session."""


def init_auth(secret_key: str, get_global_settings: Callable[[], Any]) -> None:
    global _secret, _get_global_settings
    _secret, _get_global_settings = secret_key, get_global_settings


def compare_keys(provided_key: str, expected_key: str) -> bool:
    return secrets.compare_digest(provided_key.encode(), expected_key.encode())


def verify_api_key(api_key: str, server_api_key: str) -> bool:
    return bool(api_key and server_api_key) and compare_keys(api_key, server_api_key)


def verify_any_api_key(api_key: str, main_key: str, sub_keys: list[Any]) -> bool:
    """Whether this is the main key or one of the sub keys."""
    others = [key.get("key") if isinstance(key, dict) else str(key) for key in sub_keys]
    return any(verify_api_key(api_key, str(key or "")) for key in (main_key, *others))


def _sign(text: str) -> str:
    return hmac.new(_secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def create_session_token() -> str:
    until = str(int(time.time()) + SESSION_MAX_AGE)
    return f"{until}.{_sign(until)}"


def verify_session(request: Request) -> bool:
    """Whether the request carries a valid session cookie."""
    until, _, signature = request.cookies.get(SESSION_COOKIE_NAME, "").partition(".")
    if not until.isdigit() or not compare_keys(signature, _sign(until)):
        return False
    return int(until) > time.time()


async def require_admin(request: Request) -> bool:
    """Dependency of admin routes: a session, or 401 (browsers: the login page)."""
    settings = _get_global_settings() if _get_global_settings is not None else None
    if settings is not None and settings.auth.skip_api_key_verification:
        return True
    if verify_session(request):
        return True
    if "text/html" in request.headers.get("accept", ""):
        raise _RedirectToLogin
    raise HTTPException(status_code=401, detail="Admin authentication required")
