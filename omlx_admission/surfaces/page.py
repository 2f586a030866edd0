"""The page: one file, no build step, nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources


@cache
def content() -> bytes:
    """The page as it is sent."""
    return resources.files(__package__).joinpath("page.html").read_bytes()


@cache
def headers() -> dict[str, str]:
    """Headers of the page. Its own script and style may run, by hash, and nothing else."""
    text = content().decode()
    policy = [
        "default-src 'none'",
        f"script-src {_hashes(text, 'script')}",
        f"style-src {_hashes(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(text: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = (hashlib.sha256(block.encode()).digest() for block in blocks)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
