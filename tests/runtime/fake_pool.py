"""A pool without oMLX for the runtime's tests: models, leases, loads that the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omlx_admission.core.policy.model import ModelView, PoolView, Target
from omlx_admission.core.port import Ask
from omlx_admission.core.refusal import Refusal


class Refused(Exception):
    """What the queue answers through the port."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Shortage(Exception):
    """A load error that passes."""


class Broken(Exception):
    """A load error that stays."""


class NotFound(Exception):
    """An unknown model."""


class TooLarge(Exception):
    """A model that never fits."""


@dataclass
class Model:
    """One registered model. ``engine`` is an opaque object while it is resident."""

    size: int
    engine: object | None = None
    leases: int = 0
    loading: bool = False
    pinned: bool = False
    marked: bool = False
    places: int | None = None


@dataclass
class FakePool:
    """Implements the port. Loads end when the test calls :meth:`end_load`."""

    models: dict[str, Model]
    ceiling: int
    loads: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    evictions: list[tuple[str, int]] = field(default_factory=list)
    auto: bool = False
    most: int = 0

    def ask(self, model: str) -> Ask:
        return Ask(Target(model), self.models[model].size, {"model_id": model})

    def used(self) -> int:
        return sum(m.size for m in self.models.values() if m.engine or m.loading)

    # -- the port -----------------------------------------------------------

    def view(self, targets: Sequence[Target], max_models: int) -> PoolView:
        return PoolView(
            models={
                name: ModelView(
                    name,
                    m.size,
                    busy=m.leases > 0,
                    leases=m.leases,
                    pinned=m.pinned,
                    loading=m.loading,
                    places=m.places,
                    most=None if m.places is None else 4 * m.places,
                )
                for name, m in self.models.items()
                if m.engine or m.loading
            },
            ready=frozenset(
                t
                for t in targets
                if t.model in self.models
                and self.models[t.model].engine
                and not self.models[t.model].loading
            ),
            unknown=frozenset(t for t in targets if t.model not in self.models),
            ceiling=self.ceiling,
            fixed_ceiling=self.ceiling,
            used=self.used(),
            committed=self.used(),
            max_models=max_models,
        )

    def size(self, arguments: Mapping[str, Any]) -> int:
        model = self.models.get(arguments["model_id"])
        return model.size if model is not None else 0

    def take(self, target: Target, leases: int) -> Any:
        model = self.models[target.model]
        assert model.engine is not None
        model.leases += leases
        return model.engine

    def places(self, model: str) -> int | None:
        return self.models[model].places

    def give_back(self, model: str, engine: Any) -> None:
        if not self.still_serving(model, engine):
            return
        assert self.models[model].leases > 0, "a lease was given back twice"
        self.models[model].leases -= 1

    def still_serving(self, model: str, engine: Any) -> bool:
        return model in self.models and self.models[model].engine is engine

    def mark(self, model: str, target: Target) -> None:
        self.models[model].marked = True

    def unmark(self, model: str) -> None:
        if model in self.models:
            self.models[model].marked = False

    async def load(self, ask: Ask, victims: Sequence[str], max_models: int) -> None:
        name = ask.target.model
        for victim in victims:
            self.evict(victim)
        if self.used() + self.models[name].size > self.ceiling:
            raise Shortage(f"no room for {name}")
        model = self.models[name]
        model.loading = True
        self.most = max(self.most, self.used())
        try:
            if not self.auto:
                self.loads[name] = asyncio.get_running_loop().create_future()
                await self.loads[name]
            model.engine = object()
        finally:
            model.loading = False
            self.loads.pop(name, None)

    def is_transient(self, error: Exception) -> bool:
        return isinstance(error, Shortage)

    def copy_error(self, error: Exception) -> Exception:
        return type(error)(*error.args)

    def not_found(self, model: str) -> Exception:
        return NotFound(model)

    def too_large(self, model: str, size: int, view: PoolView, text: str) -> Exception:
        return TooLarge(text)

    def refused(self, refusal: Refusal) -> Exception:
        return Refused(refusal)

    def seconds_per_byte(self) -> float | None:
        return None

    # -- what the test does -------------------------------------------------

    def evict(self, name: str) -> None:
        """A model leaves at once; it must be idle (K4)."""
        model = self.models[name]
        assert model.leases == 0, f"{name} was evicted with {model.leases} running requests"
        self.evictions.append((name, model.leases))
        model.engine, model.marked = None, False

    def end_load(self, name: str, error: Exception | None = None) -> None:
        future = self.loads[name]
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
