"""What the jobs of oMLX's global executor pass on their way: layers, and a way past it."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

from omlx_admission.core import faults, load_work
from omlx_admission.hooks.gpu.jobs import SUBMIT, Job, recognise
from omlx_admission.hooks.patching.ledger import Ledger, named

Layer = Callable[[Job, Callable[[], Any]], Any]
#: Given the executor's own ``submit`` and a job: where it goes instead, None: nowhere else.
Route = Callable[[Callable[..., Any], Any, Any, Any], concurrent.futures.Future[Any] | None]


class Executors:
    """Layers round the jobs of the global executor, shared by the features that need them,
    a way past it, and whose load they belong to.

    The executor object stays oMLX's own, with one instance attribute more, so that its
    replacement or shutdown by oMLX works unchanged.
    """

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._route: Route | None = None
        self._changed: list[Any] = []

    def add(self, module: Any, ledger: Ledger, layer: Layer) -> None:
        """Put ``layer`` outside those that are there."""
        self._watch(module, ledger)
        self._layers.append(layer)

    def send(self, module: Any, ledger: Ledger, route: Route) -> None:
        """Ask ``route`` where a job goes before anything else is done with it."""
        self._watch(module, ledger)
        self._route = route

    def _watch(self, module: Any, ledger: Ledger) -> None:
        """The first one wraps the getter."""
        if not self._layers and self._route is None:
            ledger.wrap(module, "get_mlx_executor", self._get)
            if module._global_mlx_executor is not None:
                self.prepare(module._global_mlx_executor)
        ledger.while_in_use(SUBMIT, named(self.prepare))

    def _get(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        executor = wrapped(*args, **kwargs)
        # Modules that imported the getter by name keep this wrapper after undo.
        if self._layers or self._route is not None:
            self.prepare(executor)
        return executor

    def may_prepare(self, ledger: Ledger) -> None:
        """Executors may be changed from now on without layers: to see whose load runs."""
        ledger.while_in_use(SUBMIT, named(self.prepare))

    def prepare(self, executor: Any) -> bool:
        """See to it that the jobs of ``executor`` pass here; whether they do."""
        if not isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            return False
        if executor in self._changed:
            return True
        if "submit" in vars(executor):
            return False
        stock = executor.submit

        def submit(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            future = self._submit(stock, function, args, kwargs)
            load_work.note(future)
            return future

        executor.submit = submit  # type: ignore[method-assign]
        self._changed.append(executor)
        return True

    def _submit(self, stock: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if self._route is not None:
            elsewhere = self._route(stock, function, args, kwargs)
            if elsewhere is not None:
                return elsewhere
        job = known(function) if self._layers else None
        if job is None:
            return stock(function, *args, **kwargs)
        return stock(self._run, job, function, args, kwargs)

    def _run(self, job: Job, function: Any, args: Any, kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        for layer in self._layers:
            call = functools.partial(layer, job, call)
        return call()

    def reset(self) -> None:
        """Neither layers nor a way past it any more; every executor is as it was."""
        self._layers.clear()
        self._route = None
        for executor in self._changed:
            vars(executor).pop("submit", None)
        self._changed.clear()


def known(function: Any) -> Job | None:
    """What ``function`` is to `recognise`; None also where it cannot be looked at."""
    try:
        return recognise(function)
    except Exception as error:  # noqa: BLE001 - any callable may be handed in
        faults.note("a job of the global thread", error)
        return None
