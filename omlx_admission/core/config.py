"""What the owner of a server may set about admission."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Durations in seconds; ``None`` means automatic.

    Attributes:
        queue: requests for models that are not loaded wait; without it the pool decides
            alone.
        errors: the HTTP answer to a refused request is the refusal itself; without it,
            what its route makes of the exception.
        max_wait_s: wait budget of one request, its load included; 0 serves only what
            is loaded.
        max_queue: most requests that may wait for models not in memory, and as many
            for those that are.
        max_models: most text and vision models in memory at any instant; 0 is no limit.
        max_age_s: age of the oldest waiter at which the loaded model stops taking new
            requests.
        linger_s: how long an idle model that keeps coming back is kept while requests
            for others wait.
        park: what a busy model runs may be taken out of its engine, where the pool can do
            that, so that the model leaves at once; it goes on when the model is back.
    """

    queue: bool = True
    errors: bool = True
    max_wait_s: float = 300.0
    max_queue: int = 512
    max_models: int = 0
    max_age_s: float | None = None
    linger_s: float | None = None
    park: bool = False
