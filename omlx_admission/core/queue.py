"""The admission queue: futures and one loader round :mod:`.policy`.

Loop thread only. The policy decides in one synchronous step from a fresh view
of the pool; this module carries the decisions out and waits. The caller that releases
a lease hands over: a granted waiter finds its own already taken.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import request as requests
from .config import Config
from .events import SILENT, Events
from .held_models import HeldModels, conflicts_with_held
from .policy.admission import AdmissionPolicy
from .policy.estimates import Dials
from .policy.model import (
    Action,
    CancelLoad,
    Drain,
    Grant,
    Load,
    Outcome,
    Park,
    PoolView,
    RefusalReason,
    Refuse,
    Target,
    Undrain,
    Waiter,
)
from .policy.planner import never_fits, too_large_now
from .port import Ask, ParkedAnswer, PoolPort
from .refusal import Refusal, retry_after
from .refusal_text import explain, in_use_text, leaves_text, too_large_text

logger = logging.getLogger("omlx.admission")

#: A busy model without a lease (speech, an aborted request that is still in the
#: scheduler) announces nothing when it falls idle: look this often, in seconds.
_BUSY_POLL_S = 0.01

#: While a request waits or a load goes on, look at least this often, in seconds: whatever
#: changes the pool without telling the queue is found then.
_SAFETY_POLL_S = 1.0

#: Steps that are not urgent take at most one part in so many of the loop's time.
_STEPS_SHARE = 20

#: A timer that rings so many seconds late tells of a standstill: the process was stopped,
#: or the loop was blocked. Deadlines that come due in it are prolonged by its length, up
#: to the second figure.
_LATE_S = 0.5
_PATIENT_S = 10.0

#: Waiters released in one go. A thousand wake-ups take some milliseconds, so
#: thousands are released over several turns of the event loop.
_SLICE = 100

#: Repetitions of one step until nothing more follows from it.
_MOST_STEPS = 16

#: Wait budget in seconds of callers that are no request (pinned preload), and
#: of load routes, where ``MAX_WAIT_S`` is 0.
_DEFAULT_BUDGET_S = 300.0


class QueueBroken(Exception):
    """The queue failed by a fault of its own; the caller asks the pool directly."""


@dataclass(slots=True, eq=False)
class _Pending:
    ask: Ask
    future: asyncio.Future[Any]
    request: requests.Request | None
    #: The engine on which its lease is taken in the pool.
    leased: Any = None
    #: Ends the wait at the deadline, while it waits.
    timer: asyncio.TimerHandle | None = None
    #: It got more time once, after a standstill.
    prolonged: bool = False
    #: Of a parked answer: what goes on, or ends.
    answer: ParkedAnswer | None = None


class Admission:
    """The queue of one pool.

    Attributes:
        gated: models that take no new requests now; the hot path reads it.
        paced: models that serve, and whose requests wait for a place; the same.
        broken: this queue failed by a fault of its own; callers ask the pool directly.
    """

    def __init__(
        self,
        port: PoolPort,
        config: Config,
        clock: Callable[[], float] | None = None,
        events: Events = SILENT,
    ) -> None:
        self.port = port
        self.config = config
        self.events = events
        self.gated: frozenset[str] = frozenset()
        self.paced: frozenset[str] = frozenset()
        self.broken = False
        self.policy = AdmissionPolicy(
            Dials(
                config.max_age_s,
                config.linger_s,
                config.max_wait_s or _DEFAULT_BUDGET_S,
                config.park,
            )
        )
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loads: dict[Target, asyncio.Task[None]] = {}
        self._shortages: dict[Target, Exception] = {}
        self._holders: set[Waiter] = set()
        #: Every waiter whose wait has not ended, whatever the policy thinks of it.
        self._open: dict[Waiter, None] = {}
        self._stepping = False
        self._again = False
        self._stepped_at = float("-inf")
        self._step_cost = 0.0
        self._wake_at = float("inf")
        self._patient_until = float("-inf")
        self._closing = False

    # -- for the pool ---------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down."""
        return self._closing

    def budget(self, request: requests.Request | None) -> float:
        """Seconds that an operation which is no request for a model may wait."""
        budget = self.config.max_wait_s or _DEFAULT_BUDGET_S
        if request is not None and request.max_wait is not None:
            budget = min(budget, request.max_wait)
        return budget

    async def acquire(self, ask: Ask) -> Any:
        """Wait for the engine of ``ask`` and return it, one lease held.

        Raises:
            QueueBroken: this queue failed; ask the pool itself.
            Exception: the pool's own error of a failed load or a permanent refusal,
                or the port's refusal (wait budget spent, queue full, shutting down).
        """
        self._loop = asyncio.get_running_loop()
        request = requests.active()
        if self.broken:
            raise QueueBroken
        if request is not None:
            request.refusal = None
        enqueued = self.now()
        budget = self._budget(request)
        try:
            engine, refused = self._at_the_door(ask, budget, request)
            if engine is None and refused is None and ask.held:
                ask, refused = self._out_of_own_way(ask, request)
        except Exception as error:  # a fault of the queue costs no request
            self._break(error)
            raise QueueBroken from None
        if engine is not None:
            return engine
        if refused is not None:
            raise refused
        while True:
            try:
                waiter = self._enqueue(ask, enqueued, enqueued + budget, request)
            except Exception as error:  # the same
                self._break(error)
                raise QueueBroken from None
            engine = await self._wait(waiter)
            if self.port.still_serving(ask.target.model, engine):
                return engine
            # An unlocked unload overtook the grant: this engine is dying.
            self._give_back(ask.target.model, engine)

    def released(self, model: str) -> None:
        """A lease of ``model`` was released: hand over if a request waits for that."""
        try:
            self.policy.used(model, self.now())
        except Exception as error:  # the release itself has happened
            self._break(error)
        if not self.policy.active:
            return
        if self.policy.concerns(model):
            self.step()
        else:
            self._step_soon()

    def loaded_by_hand(self, model: str) -> None:
        """A caller asked for ``model`` itself, and it serves: it stays for its first use."""
        self.policy.keep_for_first_use(model, self.now())
        if self.policy.active:
            self.step()

    def changed(self) -> None:
        """Something in the pool changed (a load, an unload, a rescan). From any thread."""
        if self._loop is None or not self.policy.active:
            return
        if asyncio._get_running_loop() is self._loop:
            self.step()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.step)

    def parked(self, ask: Ask, answers: Sequence[ParkedAnswer]) -> None:
        """``answers`` were taken out of the engine of ``ask``'s target: they wait for it.

        A lease was given back for each.
        """
        if self.broken or self._closing:
            for answer in answers:
                answer.lost(self.port.refused(self._shutting_down()))
            return
        now = self.now()
        for answer in answers:
            future = asyncio.get_running_loop().create_future()
            pending = _Pending(ask, future, None, answer=answer)
            waiter = self.policy.enqueue(
                ask.target, ask.size, now, float("inf"), pending, parked=True
            )
            self._open[waiter] = None
            answer.waits(functools.partial(self._guarded, self._parked_left, waiter))
        self.events.parked(ask.target.model, len(answers))
        self.step()

    def _parked_left(self, waiter: Waiter) -> None:
        if self.policy.leave(waiter, Outcome.CANCELLED, self.now()):
            self._close(waiter)
            self.step()

    def _close(self, waiter: Waiter) -> None:
        """The wait of a parked answer has ended."""
        self._open.pop(waiter, None)
        self.events.parked_ended(waiter, self.now())

    def shut_down(self) -> None:
        """End every wait; requests that come later are refused."""
        if self._closing:
            return
        self._closing = True
        self._refuse_all(self.policy.shut_down(), self._shutting_down())
        for model in self.policy.marked:
            self.port.unmark(model)
        self.gated = self.paced = frozenset()
        self._arm(None)

    # -- one request --------------------------------------------------------

    def _budget(self, request: requests.Request | None) -> float:
        if request is not None and request.only_counts:
            return 0.0  # no model is moved for it
        budget = self.config.max_wait_s
        if budget == 0 and (request is None or request.explicit_load):
            budget = _DEFAULT_BUDGET_S
        if request is not None and request.max_wait is not None:
            budget = min(budget, request.max_wait)
        return budget

    def _at_the_door(
        self, ask: Ask, budget: float, request: requests.Request | None
    ) -> tuple[Any, Exception | None]:
        """The engine, or the refusal, that a request gets which must not wait.

        With neither it may: the step that follows refuses what never fits.
        """
        target = ask.target
        if self._closing:
            self._announce_refusal(ask, self._shutting_down(), 0.0, request)
            return None, self._refused(self._shutting_down(), request)
        # A request that has the model already must not wait for its own end.
        unpaced = ask.unpaced or target.model in ask.held.leased | ask.held.kept
        full = self.policy.waiting - self.policy.parked >= self.config.max_queue
        if budget > 0 and not unpaced and not full:
            return None, None
        view = self.port.view((*self.policy.targets, target), self.config.max_models)
        if target in view.ready and target.model not in self.gated:
            most = view.models[target.model].most
            no_wait = budget == 0 or self.config.max_queue == 0
            if unpaced or (
                no_wait and (most is None or view.models[target.model].leases < most)
            ):
                return self._taken(target)
        elif target not in view.ready and never_fits(target, ask.size, view):
            return None, self._too_large(ask, view, request)
        if budget > 0 and not (full and self._is_full_for(target, view)):
            return None, None
        code = "model_busy" if budget == 0 else "admission_queue_full"
        refusal = self._refusal(ask, code, view, waited=0.0)
        self._announce_refusal(ask, refusal, 0.0, request)
        return None, self._refused(refusal, request)

    def _taken(self, target: Target) -> tuple[Any, Exception | None]:
        try:
            return self.port.take(target, 1), None
        except Exception as error:  # it is the caller's answer
            return None, self.port.copy_error(error)

    def _is_full_for(self, target: Target, view: PoolView) -> bool:
        """Whether as many as may wait do so for models that are as ``target`` is: in
        memory, or not. A batch for a model that is not turns away no request for one
        that is."""
        alike = sum(
            len(queue.waiters) - queue.parked
            for other, queue in self.policy.queues.items()
            if (other in view.ready) == (target in view.ready)
        )
        return alike >= self.config.max_queue

    def _enqueue(
        self,
        ask: Ask,
        enqueued: float,
        deadline: float,
        request: requests.Request | None,
    ) -> Waiter:
        pending = _Pending(ask, asyncio.get_running_loop().create_future(), request)
        return self.policy.enqueue(
            ask.target,
            ask.size,
            self.now(),
            deadline,
            pending,
            since=enqueued,
            keep=ask.held.leased | ask.held.kept,
            unpaced=ask.unpaced,
        )

    async def _wait(self, waiter: Waiter) -> Any:
        pending = _pending(waiter)
        ask, request = pending.ask, pending.request
        self._open[waiter] = None
        if ask.held:
            self._holders.add(waiter)
        queued = False
        watch: requests.Watch | None = None
        hold = request.hold if request is not None else None
        try:
            if self.policy.head(ask.target) is waiter:
                self.step()
            if not pending.future.done():
                queued = True
                self.events.enqueued(waiter, self.policy.waiting)
                self._expire_at(waiter, waiter.deadline)
                watch = requests.Watch(
                    request, lambda: self._guarded(self._client_left, waiter)
                )
                if hold is not None:
                    hold.wait_began()
            return await pending.future
        except BaseException:
            if self.policy.leave(waiter, Outcome.CANCELLED, self.now()):
                self.step()
            elif pending.leased is not None:
                # Granted and cancelled in the same turn of the loop: the lease is
                # the waiter's, so it gives it back.
                self._give_back(ask.target.model, pending.leased)
            raise
        finally:
            if pending.timer is not None:
                pending.timer.cancel()
            if watch is not None:
                watch.stop()
            if hold is not None:
                hold.wait_ended()
            if request is not None:
                request.waited_s = max(request.waited_s, self.now() - waiter.enqueued)
            self._open.pop(waiter, None)
            self._holders.discard(waiter)
            self.events.left(waiter, self.now(), self.policy.waiting, queued)

    def _guarded(self, call: Callable[[Waiter], None], waiter: Waiter) -> None:
        """What the loop calls: a fault of the queue must not let a request wait for ever."""
        try:
            call(waiter)
        except Exception as error:
            self._break(error)

    def _expire_at(self, waiter: Waiter, deadline: float) -> None:
        _pending(waiter).timer = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self.now()), self._guarded, self._expire, waiter
        )

    def _expire(self, waiter: Waiter) -> None:
        now = self.now()
        pending = _pending(waiter)
        self._stood_still(now - waiter.deadline)
        if now < self._patient_until and not pending.prolonged:
            # Nothing went on meanwhile, the load that it waits for neither.
            pending.prolonged = True
            self._expire_at(waiter, self._patient_until)
            return
        self._measure(waiter)
        view = self.port.view(self.policy.targets, self.config.max_models)
        waited = now - waiter.enqueued
        refusal = self._refusal(pending.ask, "model_swap_timeout", view, waited, waiter)
        if not self.policy.leave(waiter, Outcome.EXPIRED, now, refusal.retry_after):
            return
        self._announce_refusal(pending.ask, refusal, waited, pending.request)
        shortage = self._shortages.get(waiter.target)
        explained = too_large_now(waiter.target, pending.ask.size, view) or any(
            m.busy or m.loading for m in view.models.values()
        )
        if shortage is not None and not explained:
            # None of the models is in the way: the pool's own words name what is.
            text = f"{shortage} Try again in about {refusal.retry_after} s."
            refusal = replace(refusal, message=text)
            self._refused(refusal, pending.request)
            self._end(waiter, self.port.copy_error(shortage))
        else:
            self._end(waiter, self._refused(refusal, pending.request))
        self.step()

    def _client_left(self, waiter: Waiter) -> None:
        if self.policy.leave(waiter, Outcome.CANCELLED, self.now()):
            gone = Refusal(503, "client_left", "The client left while it waited.", 1)
            self._end(waiter, self.port.refused(gone))
            self.step()

    def _out_of_own_way(
        self, ask: Ask, request: requests.Request | None
    ) -> tuple[Ask, Exception | None]:
        """The refusal of what the models that the request holds itself rule out.

        What is only kept for it is handed back instead: without the queue it could be evicted.
        """
        view = self.port.view((ask.target,), self.config.max_models)
        leased, kept = ask.held.leased, ask.held.kept
        if conflicts_with_held(ask.target, ask.size, view, leased):
            text = in_use_text(ask, view, leased)
            return ask, self._permanent(ask, view, text, request)
        if kept and (
            conflicts_with_held(ask.target, ask.size, view, leased | kept)
            or conflicts_with_held(ask.target, ask.size, view, leased | kept, too_large_now)
        ):
            ask.held.hand_back()
            ask = replace(ask, held=HeldModels(leased))
        return ask, None

    def _review_holder(self, waiter: Waiter, view: PoolView) -> None:
        """What a waiter holds drains for others: it must not wait for its own end."""
        pending, swap = _pending(waiter), self.policy.swap
        if waiter.outcome is not Outcome.WAITING or self.policy.is_loading(waiter.target):
            return
        if swap is None or swap.loading or swap.target == waiter.target:
            return
        held, leaving = pending.ask.held, frozenset(swap.victims)
        if leaving & held.kept:
            held.hand_back()
            pending.ask = replace(pending.ask, held=HeldModels(held.leased))
            waiter.keep = held.leased
            self._again = True
        if not leaving & held.leased:
            return
        waited = self.now() - waiter.enqueued
        refusal = self._refusal(pending.ask, "model_busy", view, waited, waiter)
        text = leaves_text(pending.ask, leaving & held.leased, refusal.retry_after or 1)
        refusal = replace(refusal, message=text)
        if self.policy.leave(waiter, Outcome.REFUSED, self.now()):
            self._announce_refusal(pending.ask, refusal, waited, pending.request)
            self._end(waiter, self._refused(refusal, pending.request))
            self._again = True

    def _give_back(self, model: str, engine: Any) -> None:
        self.port.give_back(model, engine)
        self.released(model)

    # -- carrying decisions out ---------------------------------------------

    def step(self) -> None:
        """Let the policy decide on a fresh view until nothing more follows."""
        if self._stepping:
            self._again = True
            return
        if self.broken:
            return
        self._stepping = True
        began = self.now()
        try:
            for _ in range(_MOST_STEPS):
                self._again = False
                for target in self.policy.targets:
                    self._measure(self.policy.queues[target].head)
                view = self.port.view(self.policy.targets, self.config.max_models)
                actions = self.policy.step(view, self.now())
                self.gated = self.policy.gated
                self.paced = self.policy.paced
                for action in actions:
                    self._apply(action, view)
                for holder in tuple(self._holders):
                    self._review_holder(holder, view)
                if not actions and not self._again:
                    break
            self._stepped_at = self.now()
            self._step_cost = self._stepped_at - began
            self._arm(view)
        except Exception as error:  # it must not cost a request
            self._break(error)
        finally:
            self._stepping = False

    def _measure(self, waiter: Waiter) -> None:
        """What it wants may have another size by now: by its settings, or by a rescan."""
        pending = _pending(waiter)
        size = self.port.size(pending.ask.arguments)
        if size != waiter.size:
            waiter.size = size
            pending.ask = replace(pending.ask, size=size)

    def _break(self, error: BaseException) -> None:
        """The queue's own failure: log it once; all who wait ask the pool directly."""
        if self.broken:
            return
        logger.error(
            "admission: the queue failed; from now on the pool decides alone", exc_info=error
        )
        self.broken = True
        self.gated = self.paced = frozenset()
        # All open waits, not the policy's: it may have ended some whose futures are not set.
        for waiter in tuple(self._open):
            self._end(waiter, QueueBroken())
        self._arm(None)
        for model in self.policy.marked:
            self.port.unmark(model)
        self.policy.shut_down()

    def _apply(self, action: Action, view: PoolView) -> None:
        match action:
            case Grant(target, waiters):
                self._grant(target, waiters)
            case Drain(models, target):
                logger.info("admission: %s drains for '%s'", _names(models), target.model)
                self.events.drain_began(models, target.model)
                for model in models:
                    self.port.mark(model, target)
            case Park(models, target, most):
                for model in models:
                    self.port.park(model, most)
            case Undrain(models):
                logger.info("admission: the drain of %s is withdrawn", _names(models))
                self.events.drain_withdrawn(models)
                for model in models:
                    self.port.unmark(model)
            case Load(target, victims):
                self._start_load(target, victims)
            case CancelLoad(target):
                logger.warning(
                    "admission: no thread works for the load of '%s'; giving it up",
                    target.model,
                )
                if target in self._loads:
                    self._loads[target].cancel()
            case Refuse(target, waiters, RefusalReason.NOT_FOUND):
                self._fail_all(waiters, self.port.not_found(target.model))
            case Refuse(target, waiters, RefusalReason.NEVER_FITS):
                for waiter in waiters:
                    pending = _pending(waiter)
                    self._end(waiter, self._too_large(pending.ask, view, pending.request))

    def _grant(self, target: Target, waiters: Sequence[Waiter]) -> None:
        """Take all leases in this step, then wake their owners in slices."""
        if not waiters:
            return
        try:
            engine = self.port.take(target, len(waiters))
        except Exception as error:  # it is the waiters' answer
            for waiter in waiters:
                waiter.outcome = Outcome.FAILED
            self._fail_all(waiters, error)
            return
        self._put_back(target, waiters, engine)
        waiters = [waiter for waiter in waiters if not waiter.parked]
        if not waiters:
            return
        for waiter in waiters:
            _pending(waiter).leased = engine
        asked_by = [_pending(waiter).request for waiter in waiters]
        if all(request is not None and request.explicit_load for request in asked_by):
            self.policy.keep_for_first_use(target.model, self.now())
            self._again = True
        else:
            self.policy.first_use(target.model)
        self._wake(list(waiters), engine, 0)

    def _put_back(self, target: Target, waiters: Sequence[Waiter], engine: Any) -> None:
        """Parked answers go on before any newcomer reaches the engine."""
        answers: list[ParkedAnswer] = []
        for waiter in waiters:
            answer = _pending(waiter).answer
            if answer is not None:
                answers.append(answer)
                self._close(waiter)
        if answers:
            self.port.put_back(target.model, engine, answers)
            self.policy.first_use(target.model)

    def _wake(self, waiters: list[Waiter], engine: Any, start: int) -> None:
        for waiter in waiters[start : start + _SLICE]:
            future = _pending(waiter).future
            if not future.done():
                future.set_result(engine)
        if start + _SLICE < len(waiters):
            asyncio.get_running_loop().call_soon(self._wake, waiters, engine, start + _SLICE)

    def _start_load(self, target: Target, victims: Sequence[str]) -> None:
        head = self.policy.head(target)
        assert head is not None
        ask = _pending(head).ask
        self._announce_swap(ask, victims)
        # A fresh context: the load belongs to no single request, and whatever
        # it meets must not be recorded as the refusal of the one that came first.
        task = asyncio.get_running_loop().create_task(
            self._load(ask, victims),
            name=f"admission-load:{target.model}",
            context=contextvars.Context(),
        )
        self._loads[target] = task
        task.add_done_callback(lambda done: self._forget_load(target, done))

    def _announce_swap(self, ask: Ask, victims: Sequence[str]) -> None:
        for swap in (self.policy.swap, self.policy.concurrent_load):
            if swap is not None and swap.target == ask.target:
                self.events.swap_began(
                    ask.target.model,
                    victims,
                    swap.reason,
                    swap.load_started - swap.started,
                    self.policy.estimates.swap(ask.target.model, ask.size),
                )

    def _forget_load(self, target: Target, task: asyncio.Task[None]) -> None:
        if self._loads.get(target) is task:
            del self._loads[target]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._break(error)

    async def _load(self, ask: Ask, victims: Sequence[str]) -> None:
        target = ask.target
        started = self.now()
        if self.policy.head(target) is None:
            # Everybody left between the decision and this task's first turn.
            self.events.swap_ended(target.model, "cancelled")
            self.policy.load_refused(target, started)
            self.step()
            return
        logger.info(
            "admission: swapping to '%s'%s",
            target.model,
            f", evicting {_names(victims)}" if victims else "",
        )
        try:
            await self.port.load(ask, victims, self.config.max_models)
        except asyncio.CancelledError:
            self.events.swap_ended(target.model, "cancelled")
            self.policy.load_refused(target, self.now())
            if not self._closing:
                self.step()
            raise
        except Exception as error:  # it is the waiters' answer
            if self.port.is_transient(error):
                logger.debug("admission: no room yet for '%s': %s", target.model, error)
                self.events.swap_ended(target.model, "no room")
                self.policy.load_refused(target, self.now())
                self._shortages[target] = self.port.copy_error(error)
            else:
                self.events.swap_ended(target.model, "failed")
                waiters = self.policy.load_failed(target)
                logger.warning("admission: '%s' failed to load: %s", target.model, error)
                self._fail_all(waiters, error)
        else:
            # No await since the pool set the engine: the model is granted in the
            # very step that made it resident, before anybody can see it idle.
            now = self.now()
            self._shortages.pop(target, None)
            waiters = self.policy.load_succeeded(target, now, self.port.places(target.model))
            self.events.swap_ended(target.model, "loaded", len(waiters))
            logger.info(
                "admission: '%s' resident after %.2f s, %d served",
                target.model,
                now - started,
                len(waiters),
            )
            self.policy.estimates.seconds_per_byte = (
                self.port.seconds_per_byte() or self.policy.estimates.seconds_per_byte
            )
            self._grant(target, waiters)
        if not self._closing:
            self.step()

    # -- refusals -----------------------------------------------------------

    def _end(self, waiter: Waiter, error: Exception) -> None:
        pending = _pending(waiter)
        if pending.answer is not None:
            self._close(waiter)
            pending.answer.lost(error)
        elif not pending.future.done():
            pending.future.set_exception(error)

    def _fail_all(self, waiters: Iterable[Waiter], error: Exception) -> None:
        for waiter in waiters:
            self._end(waiter, self.port.copy_error(error))

    def _refuse_all(self, waiters: Iterable[Waiter], refusal: Refusal) -> None:
        for waiter in waiters:
            pending = _pending(waiter)
            waited = self.now() - waiter.enqueued
            self._announce_refusal(pending.ask, refusal, waited, pending.request)
            self._end(waiter, self._refused(refusal, pending.request))

    def _refused(self, refusal: Refusal, request: requests.Request | None) -> Exception:
        if request is not None and self.config.errors:
            request.refusal = refusal
        return self.port.refused(refusal)

    def _refusal(
        self,
        ask: Ask,
        code: str,
        view: PoolView,
        waited: float,
        waiter: Waiter | None = None,
    ) -> Refusal:
        now = self.now()
        patience = waiter.deadline - waiter.enqueued if waiter is not None else 0.0
        seconds = self.policy.retry_in(ask.target, ask.size, view, now, patience)
        hint = retry_after(seconds)
        text = explain(self.policy, view, ask, code, waited, hint, now, waiter)
        return Refusal(503, code, text, hint)

    def _announce_refusal(
        self, ask: Ask, refusal: Refusal, waited: float, request: requests.Request | None
    ) -> None:
        self.events.refused(ask.target.model, refusal.code, refusal.message, waited, request)

    def _shutting_down(self) -> Refusal:
        return Refusal(503, "shutting_down", "The server is shutting down.", retry_after(5))

    def _too_large(
        self, ask: Ask, view: PoolView, request: requests.Request | None
    ) -> Exception:
        return self._permanent(ask, view, too_large_text(ask, view), request)

    def _permanent(
        self, ask: Ask, view: PoolView, text: str, request: requests.Request | None
    ) -> Exception:
        refusal = Refusal(507, "model_too_large", text)
        self._announce_refusal(ask, refusal, 0.0, request)
        if request is not None and self.config.errors:
            request.refusal = refusal
        return self.port.too_large(ask.target.model, ask.size, view, text)

    # -- time ---------------------------------------------------------------

    def now(self) -> float:
        """Seconds of the clock that waits and deadlines are told in."""
        return self._clock() if self._clock else asyncio.get_running_loop().time()

    def _arm(self, view: PoolView | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if view is None or not self.policy.active:
            return
        now = self.now()
        wake = now + _SAFETY_POLL_S
        if self.policy.wake_at is not None:
            wake = min(wake, self.policy.wake_at)
        if any(m.busy and m.leases == 0 for m in view.models.values()):
            wake = min(wake, now + max(_BUSY_POLL_S, self._pause))
        self._ring_at(wake)

    def _ring_at(self, wake: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = wake
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, wake - self.now()), self._tick
        )

    @property
    def _pause(self) -> float:
        """Seconds between steps of which none is urgent."""
        return _STEPS_SHARE * self._step_cost

    def _step_soon(self) -> None:
        """Step now, or with all that follows within a moment."""
        due = self._stepped_at + self._pause
        if self.now() >= due:
            self.step()
        elif self._timer is None or self._wake_at > due:
            self._ring_at(due)

    def _stood_still(self, late: float) -> None:
        """A timer rang ``late``: what comes due now gets as much more time, once."""
        if late >= _LATE_S:
            until = self.now() + min(late, _PATIENT_S)
            self._patient_until = max(self._patient_until, until)

    def _tick(self) -> None:
        self._timer = None
        self._stood_still(self.now() - self._wake_at)
        if self.policy.active:
            self.step()


def _pending(waiter: Waiter) -> _Pending:
    pending = waiter.context
    assert isinstance(pending, _Pending)
    return pending


def _names(models: Iterable[str]) -> str:
    return ", ".join(f"'{m}'" for m in models)
