"""Facts and an observer in a state that a test chooses, made by the real policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import ModelView, PoolView, Target
from omlx_admission.observation.observe import Observer
from omlx_admission.observation.pool_snapshot import CacheBudget, Facts, Registered
from omlx_admission.settings import Settings

GB = 1024**3
DAY = 1_700_000_000.0


class Sample:
    """Time is 1000 s; the ceiling is 10 GB; ``a`` and ``b`` have 6 GB each, ``d`` 2 GB."""

    def __init__(self, *, max_age: float | None = 5.0) -> None:
        self.now = 1000.0
        self.observer = Observer(lambda: self.now, lambda: DAY + self.now)
        self.policy = AdmissionPolicy(Dials(max_age=max_age, linger=1.0))
        self.sizes = {"a": 6 * GB, "b": 6 * GB, "d": 2 * GB, "x": 20 * GB}
        self.held: dict[str, ModelView] = {}
        self.ready: set[str] = set()
        self.broken = False
        self.cache: CacheBudget | None = None
        self.queue = True

    def view(self) -> PoolView:
        used = sum(m.size for m in self.held.values())
        return PoolView(
            models=self.held,
            ready=frozenset(t for t in self.policy.targets if t.model in self.ready),
            ceiling=10 * GB,
            fixed_ceiling=10 * GB,
            used=used,
            committed=used,
        )

    def resident(self, model: str, **values: Any) -> None:
        self.held[model] = ModelView(model, self.sizes[model], **values)
        self.ready.add(model)

    def loading(self, model: str) -> None:
        self.held[model] = ModelView(model, self.sizes[model], loading=True)

    def unloading(self, model: str) -> None:
        self.held[model] = ModelView(model, self.sizes[model], unloading=True)
        self.ready.discard(model)

    def wait(self, model: str, request: str | None = None, budget: float = 300.0) -> Any:
        named = None if request is None else SimpleNamespace(id=request, waited_s=0.0)
        waiter = self.policy.enqueue(
            Target(model),
            self.sizes[model],
            self.now,
            self.now + budget,
            SimpleNamespace(request=named),
        )
        self.observer.enqueued(waiter, self.policy.waiting)
        return waiter

    def step(self) -> list[Any]:
        return self.policy.step(self.view(), self.now)

    def facts(self) -> Facts:
        admission: Any = SimpleNamespace(
            policy=self.policy,
            now=lambda: self.now,
            gated=self.policy.gated,
            broken=self.broken,
            config=Settings(),
        )
        marked = self.policy.marked
        return Facts(
            view=self.view(),
            registered=[
                Registered(m, size, draining=m in marked, last_used=DAY + 10)
                for m, size in self.sizes.items()
            ],
            admission=admission if self.queue else None,
            cache=self.cache,
            omlx="0.6.3",
            features=[
                {
                    "name": "queue",
                    "state": "applied",
                    "variable": "OMLX_ADMISSION_QUEUE",
                    "reasons": [],
                    "hooks": ["omlx.engine_pool:EnginePool.get_engine"],
                }
            ],
        )


def draining() -> Sample:
    """``a`` finishes two requests to make room for ``b``; a newcomer for ``a`` waits too."""
    sample = Sample()
    sample.resident("a", busy=True, leases=2)
    for i in range(3):
        sample.wait("b", f"agent-{i}")
    sample.now += 6
    sample.step()
    sample.observer.drain_began(("a",), "b")
    sample.wait("a", "chat-1")
    sample.step()
    sample.now += 1
    return sample


def loading() -> Sample:
    """The same a little later: ``b`` loads in place of ``a``."""
    sample = draining()
    sample.resident("a")
    sample.step()
    sample.observer.swap_began("b", ("a",), "age", 2.0, 4.0)
    sample.observer.unload_began("a", 0.0)
    sample.observer.unload_ended("a", resident=False)
    del sample.held["a"]
    sample.ready.clear()
    sample.loading("b")
    sample.observer.load_began("b", 4.0)
    sample.now += 1.5
    return sample
