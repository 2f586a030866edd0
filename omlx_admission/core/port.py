"""What the queue asks of a pool; tests implement it on a fake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .footprint import Reading
from .held_models import NO_MODELS, HeldModels
from .load_work import LoadWork
from .policy.model import PoolView, Target
from .refusal import Refusal


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of ``get_engine``: what it wants and its arguments, passed on untouched.

    ``held`` is what the request that asks holds already. An ask that is ``unpaced`` wants
    nothing of the engine that it would have to wait its turn for.
    """

    target: Target
    size: int
    arguments: dict[str, Any]
    held: HeldModels = NO_MODELS
    unpaced: bool = False


class ParkedAnswer(Protocol):
    """One request whose answer was taken out of an engine."""

    def waits(self, leave: Callable[[], None]) -> None:
        """It waits from now on; ``leave`` is called where its client leaves meanwhile."""

    def lost(self, error: Exception) -> None:
        """It cannot go on, because of ``error``: end it, with an error of its route."""


class PoolPort(Protocol):
    """The pool as the admission runtime needs it. All methods but ``load`` are synchronous."""

    def target(self, model_id: str, force_lm: bool, runtime_settings: object | None) -> Target:
        """The queue key of a call: model and the variant it would be loaded in."""

    def raise_if_unavailable(self, model_id: str) -> None:
        """Raise what the pool would raise without looking at memory at all."""

    def wrong_kind(self, path: str, model: str) -> Refusal | None:
        """The refusal where a model is of a kind that the route cannot serve."""

    def view(self, targets: Sequence[Target], max_models: int) -> PoolView:
        """The pool at this instant, with ``ready`` and ``unknown`` told for ``targets``."""

    def reading(self, size: int) -> Reading:
        """The memory of the process; ``size`` bytes are to come."""

    def size(self, arguments: Mapping[str, Any]) -> int:
        """Bytes that a call with these arguments would load, as things are now."""

    def take(self, target: Target, leases: int) -> Any:
        """Take ``leases`` leases on the resident engine of ``target`` and return it.

        Raises:
            Exception: the pool's own error where the engine cannot be used.
        """

    def places(self, model: str) -> int | None:
        """How many leases the resident ``model`` may hold while requests wait for it."""

    def give_back(self, model: str, engine: Any) -> None:
        """Give one lease on ``engine`` back; none, where the model has another by now."""

    def still_serving(self, model: str, engine: Any) -> bool:
        """Whether ``engine`` is still the model's engine and not being torn down."""

    def in_use(self, model: str) -> bool:
        """Whether a loaded model is busy by the pool's own rule, or loads still."""

    def is_quiescent(self, model: str) -> bool:
        """Whether nothing of a loaded model runs, its engine's own queues included."""

    def mark(self, model: str, target: Target) -> None:
        """Mark a busy model: it leaves for ``target`` once it is idle."""

    def unmark(self, model: str) -> None:
        """Withdraw the mark, if it is the queue's."""

    async def load(self, ask: Ask, victims: Sequence[str], max_models: int) -> None:
        """Evict ``victims`` where needed and load. Raises the pool's own errors."""

    def park(self, model: str, most: int | None) -> None:
        """Begin to take what ``model`` runs out of its engine, as long as it drains.

        What was taken out is told to the queue (``Admission.parked``); what cannot be, or
        holds more than ``most`` bytes, drains on.
        """

    def put_back(self, model: str, engine: Any, answers: Sequence[ParkedAnswer]) -> None:
        """Let parked answers go on in ``engine``, on which a lease is held for each.

        Raises nothing: an answer that cannot go on is ended.
        """

    def work_of(self, model: str) -> LoadWork | None:
        """The work of a load of ``model`` that begins now; None where it cannot be seen."""

    def planned_victim(self) -> str | None:
        """The next model to leave for the load of this task; None outside of one."""

    def is_transient(self, error: Exception) -> bool:
        """Whether a load error is a shortage that passes."""

    def copy_error(self, error: Exception) -> Exception:
        """The same error without its traceback: frames of a failed load hold its weights."""

    def not_found(self, model: str) -> Exception:
        """The pool's own error for a model that is not registered."""

    def too_large(self, model: str, size: int, view: PoolView, text: str) -> Exception:
        """The pool's own error for a model that never fits; ``text`` says why."""

    def refused(self, refusal: Refusal) -> Exception:
        """The error that carries ``refusal`` through the server unharmed."""

    def seconds_per_byte(self) -> float | None:
        """The pool's own estimate of the load speed, None when it has none."""
