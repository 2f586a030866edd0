"""The rules that our policy is compared with; each is ours with its dials at an end."""

from __future__ import annotations

from collections.abc import Callable

from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials

#: A wait budget that never ends, for comparisons without refusals.
_FOREVER_S = 1e12

#: By name: how to make one. "exhaustive" is the rule of Ollama, llama-swap and the
#: llama.cpp router: the loaded model serves until nobody uses it. "gated": it serves what
#: waits when its turn begins, and no more.
POLICIES: dict[str, Callable[[], AdmissionPolicy]] = {
    "ours": lambda: AdmissionPolicy(Dials()),
    "exhaustive": lambda: AdmissionPolicy(
        Dials(max_age=_FOREVER_S, linger=0.0, budget=_FOREVER_S)
    ),
    "gated": lambda: AdmissionPolicy(Dials(max_age=0.0, linger=0.0, budget=_FOREVER_S)),
}
