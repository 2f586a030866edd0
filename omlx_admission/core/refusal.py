"""What a refused request is told: status, headers and a body in the route's own shape."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

#: Longest Retry-After in seconds. Anthropic's own client ignores longer
#: ones and OpenAI's stops retrying above 120.
LONGEST_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal.

    Attributes:
        status: HTTP status: 503 (passing), 507 (permanent), 500 (a load that failed), 400
            (the client's own mistake) or 409 (its own condition is not met).
        code: stable machine-readable reason.
        message: for people: what is in the way, how long, what to do.
        retry_after: whole seconds, 1 to 60; None where a retry cannot help.
    """

    status: int
    code: str
    message: str
    retry_after: int | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers beside content type and length. The usual clients obey both."""
        if self.retry_after is None:
            return [(b"x-should-retry", b"false")]
        return [(b"retry-after", str(self.retry_after).encode())]

    def body(self, path: str) -> bytes:
        """JSON body for the route at ``path``: OpenAI, Anthropic or plain ``detail``."""
        content: dict[str, object]
        if path.startswith("/v1/messages"):
            kind = "overloaded_error" if self.retry_after is not None else "api_error"
            if self.status < 500:
                kind = "invalid_request_error"
            content = {
                "type": "error",
                "error": {"type": kind, "message": self.message, "code": self.code},
            }
        elif path.startswith("/v1/"):
            content = {
                "error": {
                    "message": self.message,
                    "type": "server_error" if self.status >= 500 else "invalid_request_error",
                    "param": None,
                    "code": self.code,
                }
            }
        else:
            content = {"detail": self.message, "code": self.code}
        return json.dumps(content).encode()


def retry_after(seconds: float) -> int:
    """Whole seconds for ``Retry-After`` from an estimate, jittered upwards by up to a fifth.

    The jitter spreads clients that were refused together; it only lengthens, so
    that no client comes back before the estimate.
    """
    jittered = max(1.0, seconds) * random.uniform(1.0, 1.2)
    return max(1, min(LONGEST_RETRY_S, math.ceil(jittered)))
