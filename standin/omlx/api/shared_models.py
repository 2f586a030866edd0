"""Ids of what the API answers with."""

from __future__ import annotations

import enum
import uuid


class IDPrefix(enum.StrEnum):
    """What an id begins with, by what it names."""

    MESSAGE = "msg"
    RESPONSE = "resp"


def generate_id(prefix: IDPrefix, length: int = 24) -> str:
    return f"{prefix.value}_{uuid.uuid4().hex[:length]}"
