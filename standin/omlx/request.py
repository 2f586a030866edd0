"""What one generation asks for and gives back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SamplingParams:
    """How to choose tokens; ``top_k=0`` and ``seed=None`` mean unset."""

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    stop: list[str] | None = None
    seed: int | None = None


@dataclass
class Request:
    """A prompt on its way through one scheduler."""

    request_id: str
    prompt: str | list[int]
    sampling_params: SamplingParams
    prompt_token_ids: list[int] | None = None
    num_prompt_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    #: Set once its prompt did not fit and an eviction was asked for on its behalf.
    eviction_tried: bool = False


@dataclass
class RequestOutput:
    """New tokens of one request; ``error_code`` names a structured failure."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    output_text: str = ""
    finished: bool = False
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    generated_at: float | None = None
    generated_until: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    error_metadata: dict[str, Any] | None = None
