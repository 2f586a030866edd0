# SPDX-License-Identifier: Apache-2.0
"""The queue on a pool of plain numbers: which model leaves, which is loaded, who is refused."""

import asyncio

import pytest

from omlx.admission import variables
from omlx.admission.config import Config
from omlx.admission.events import Events
from omlx.admission.held_models import HeldModels, conflicts_with_held
from omlx.admission.policy.model import ModelView, PoolView, Target
from omlx.admission.policy.planner import PlanKind, never_fits, plan
from omlx.admission.port import Ask
from omlx.admission.queue import Admission, QueueBroken
from omlx.admission.refusal import retry_after

SIZES = {"a": 6, "b": 6, "c": 6, "small": 3, "huge": 20}


class Refused(Exception):
    def __init__(self, refusal):
        super().__init__(refusal.message)
        self.refusal = refusal


class Shortage(Exception):
    pass


class Broken(Exception):
    pass


class NotFound(Exception):
    pass


class TooLarge(Exception):
    pass


class Pool:
    """The port of a pool that holds 10; a load ends when ``may_load`` is set."""

    def __init__(self):
        self.engines = {}
        self.leases = dict.fromkeys(SIZES, 0)
        self.marked = set()
        self.pinned = set()
        self.loading = None
        self.log = []
        self.error = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    def view(self, targets, max_models):
        present = {*self.engines, *filter(None, [self.loading])}
        models = {
            name: ModelView(
                name,
                SIZES[name],
                busy=self.leases[name] > 0,
                leases=self.leases[name],
                pinned=name in self.pinned,
                loading=name == self.loading,
            )
            for name in present
        }
        used = sum(SIZES[name] for name in present)
        return PoolView(
            models,
            ready=frozenset(t for t in targets if t.model in self.engines),
            unknown=frozenset(t for t in targets if t.model not in SIZES),
            ceiling=10,
            fixed_ceiling=10,
            used=used,
            committed=used,
            max_models=max_models,
        )

    def size(self, arguments):
        return SIZES.get(arguments["model_id"], 0)

    def take(self, target, leases):
        self.leases[target.model] += leases
        return self.engines[target.model]

    def places(self, model):
        return None

    def give_back(self, model, engine):
        assert self.leases[model] > 0, "given back twice"
        self.leases[model] -= 1

    def still_serving(self, model, engine):
        return self.engines.get(model) is engine

    def mark(self, model, target):
        self.marked.add(model)

    def unmark(self, model):
        self.marked.discard(model)

    async def load(self, ask, victims, max_models):
        model = ask.target.model
        for victim in victims:
            assert self.leases[victim] == 0, "what runs is never cut off"
            self.marked.discard(victim)
            del self.engines[victim]
        self.loading = model
        try:
            await self.may_load.wait()
            if self.error is not None:
                raise self.error
            self.engines[model] = object()
            self.log.append(model)
        finally:
            self.loading = None

    def is_transient(self, error):
        return isinstance(error, Shortage)

    def copy_error(self, error):
        return type(error)(*error.args)

    def not_found(self, model):
        return NotFound(model)

    def too_large(self, model, size, view, text):
        return TooLarge(text)

    def refused(self, refusal):
        return Refused(refusal)

    def seconds_per_byte(self):
        return None


class House:
    """A queue, its pool and what a request does."""

    def __init__(self, events=None, **config):
        self.pool = Pool()
        settings = Config(**{"max_age_s": 0, "linger_s": 0, **config})
        self.queue = Admission(self.pool, settings, events=events or Events())

    def ask(self, model, held=None):
        ask = Ask(Target(model), SIZES.get(model, 0), {"model_id": model}, held or HeldModels())
        return asyncio.ensure_future(self.queue.acquire(ask))

    async def serve(self, model):
        return await asyncio.wait_for(self.ask(model), 5)

    def done(self, model):
        self.pool.leases[model] -= 1
        self.queue.released(model)

    def assert_idle(self):
        assert not any(self.pool.leases.values())
        assert not self.queue.policy.active
        assert not self.pool.marked
        assert self.queue.gated == frozenset()


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


# --- requests and loads ---------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_busy_model_drains_and_leaves_and_comes_back():
    house = House()
    await house.serve("a")
    for_b = house.ask("b")
    await settle()
    assert house.pool.marked == {"a"}
    newcomer = house.ask("a")
    await settle()
    assert not newcomer.done(), "a draining model takes no new request"
    house.done("a")
    await asyncio.wait_for(for_b, 5)
    house.done("b")
    await asyncio.wait_for(newcomer, 5)
    house.done("a")
    assert house.pool.log == ["a", "b", "a"]
    await settle()
    house.assert_idle()


@pytest.mark.asyncio
async def test_models_that_fit_together_stay_together():
    house = House()
    await house.serve("a")
    await house.serve("small")
    assert set(house.pool.engines) == {"a", "small"}
    assert not house.pool.marked


@pytest.mark.asyncio
async def test_the_loaded_model_serves_until_the_oldest_waiter_is_old():
    house = House(max_age_s=1000)
    await house.serve("a")
    for_b = house.ask("b")
    await settle()
    assert not house.pool.marked
    await house.serve("a")
    house.done("a")
    house.done("a")
    await asyncio.wait_for(for_b, 5)


@pytest.mark.asyncio
async def test_one_load_serves_all_that_wait_for_it():
    house = House()
    house.pool.may_load.clear()
    asked = [house.ask("b") for _ in range(250)]
    await settle()
    house.pool.may_load.set()
    engines = await asyncio.wait_for(asyncio.gather(*asked), 5)
    assert set(engines) == {house.pool.engines["b"]}
    assert house.pool.leases["b"] == 250
    assert house.pool.log == ["b"]


@pytest.mark.asyncio
async def test_models_are_served_in_the_order_in_which_they_were_wanted():
    house = House()
    await house.serve("a")
    waiting = {}
    for model in ("b", "c"):
        waiting[model] = house.ask(model)
        await settle()
    house.done("a")
    await asyncio.wait_for(waiting["b"], 5)
    assert not waiting["c"].done()
    house.done("b")
    await asyncio.wait_for(waiting["c"], 5)
    assert house.pool.log == ["a", "b", "c"]


@pytest.mark.asyncio
async def test_a_request_that_is_cancelled_leaves_nothing_behind():
    house = House()
    await house.serve("a")
    for_b = house.ask("b")
    await settle()
    for_b.cancel()
    await settle()
    await house.serve("a")
    house.done("a")
    house.done("a")
    await settle()
    house.assert_idle()
    assert house.pool.log == ["a"]


@pytest.mark.asyncio
async def test_a_load_that_fails_is_told_to_all_that_wait_once():
    house = House()
    house.pool.may_load.clear()
    house.pool.error = Broken("a shard is missing")
    asked = [house.ask("b") for _ in range(3)]
    await settle()
    house.pool.may_load.set()
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in errors] == ["a shard is missing"] * 3
    assert len({id(error) for error in errors}) == 3, "each with a traceback of its own"
    house.pool.error = None
    await house.serve("b")


@pytest.mark.asyncio
async def test_a_shortage_that_passes_is_waited_for():
    house = House()
    house.pool.error = Shortage("no room now")
    for_b = house.ask("b")
    await settle()
    assert not for_b.done()
    house.pool.error = None
    await asyncio.wait_for(for_b, 5)


# --- refusals --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_wait_ends_with_its_budget_and_says_when_to_come_back():
    house = House(max_wait_s=0.05)
    await house.serve("a")
    with pytest.raises(Refused) as caught:
        await house.serve("b")
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code) == (503, "model_swap_timeout")
    assert "'a' (1 running) in use" in refusal.message
    assert 1 <= refusal.retry_after <= 60
    assert house.pool.leases["a"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("config", "code"),
    [({"max_wait_s": 0}, None), ({"max_queue": 0}, "admission_queue_full")],
)
async def test_without_a_wait_only_what_is_loaded_is_served(config, code):
    house = House(**config)
    await house.serve("a") if code is None else house.pool.engines.update(a=object())
    await house.serve("a")
    house.pool.pinned.add("a")
    if code is not None:
        with pytest.raises(Refused) as caught:
            await house.serve("small")
        assert caught.value.refusal.code == code


@pytest.mark.asyncio
async def test_what_never_fits_and_what_is_unknown_costs_no_other_model_anything():
    house = House()
    await house.serve("a")
    house.done("a")
    with pytest.raises(TooLarge):
        await house.serve("huge")
    with pytest.raises(NotFound):
        await house.serve("nobody")
    assert set(house.pool.engines) == {"a"}
    house.assert_idle()


@pytest.mark.asyncio
async def test_a_request_does_not_wait_for_its_own_end():
    house = House()
    await house.serve("a")
    with pytest.raises(TooLarge):
        await asyncio.wait_for(house.ask("b", HeldModels(frozenset({"a"}))), 5)
    given = []

    def hand_back():
        given.append("a")
        house.done("a")

    held = HeldModels(frozenset(), frozenset({"a"}), hand_back)
    await asyncio.wait_for(house.ask("b", held), 5)
    assert given == ["a"]


@pytest.mark.asyncio
async def test_shutdown_ends_every_wait_and_lets_none_begin():
    house = House()
    await house.serve("a")
    for_b = house.ask("b")
    await settle()
    house.queue.shut_down()
    for waiting in (for_b, house.ask("a")):
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(waiting, 5)
        assert caught.value.refusal.code == "shutting_down"
    assert not house.pool.marked


@pytest.mark.asyncio
async def test_a_fault_of_the_queue_leaves_the_decision_to_the_pool(monkeypatch):
    house = House()
    await house.serve("a")
    for_b = house.ask("b")
    await settle()

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(house.queue.policy, "step", broken)
    house.queue.step()
    for waiting in (for_b, house.ask("c")):
        with pytest.raises(QueueBroken):
            await asyncio.wait_for(waiting, 5)
    assert not house.pool.marked


# --- what it says of itself ------------------------------------------------------------


@pytest.mark.asyncio
async def test_events_tell_of_a_swap_from_the_drain_to_the_end():
    class Log(Events):
        def __init__(self):
            self.said = []

        def drain_began(self, models, target):
            self.said.append(("drain", *models, target))

        def swap_began(self, target, victims, reason, drain_s, estimate_s):
            self.said.append(("swap", target, *victims))

        def swap_ended(self, target, result, served=0):
            self.said.append((result, target, served))

    log = Log()
    house = House(events=log)
    await house.serve("a")
    for_b = house.ask("b")
    await settle()
    house.done("a")
    await asyncio.wait_for(for_b, 5)
    assert log.said[-3:] == [("drain", "a", "b"), ("swap", "b", "a"), ("loaded", "b", 1)]


# --- plans -----------------------------------------------------------------------------


def view(*models, ceiling=10):
    used = sum(model.size for model in models)
    return PoolView(
        {model.model: model for model in models},
        ceiling=ceiling,
        fixed_ceiling=ceiling,
        used=used,
        committed=used,
    )


def test_never_is_what_no_eviction_makes_room_for():
    loaded = ModelView("a", 6)
    assert not never_fits(Target("b"), 10, view(loaded))
    assert never_fits(Target("b"), 11, view(loaded))
    pinned = ModelView("a", 6, pinned=True)
    assert never_fits(Target("b"), 5, view(pinned))


def test_an_idle_model_leaves_before_a_busy_one():
    busy = ModelView("busy", 4, busy=True, leases=1)
    idle = ModelView("idle", 4)
    found = plan(Target("b"), 5, view(busy, idle))
    assert found.kind is PlanKind.EVICT
    assert found.victims == ("idle",)


def test_a_request_cannot_have_what_it_holds_itself_evicted():
    held = view(ModelView("a", 6, busy=True, leases=1))
    assert conflicts_with_held(Target("b"), 6, held, {"a"})
    assert not conflicts_with_held(Target("small"), 3, held, {"a"})


# --- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.4, 12.0, 59.0, 1e9])
def test_a_client_is_never_told_to_come_back_too_early_or_after_a_minute(seconds):
    told = retry_after(seconds)
    assert 1 <= told <= 60
    assert told >= min(60, seconds)


def test_a_variable_that_does_not_parse_costs_a_line_and_keeps_the_default():
    config, problems = variables.load(
        {
            "OMLX_ADMISSION_QUEUE": "off",
            "OMLX_ADMISSION_MAX_WAIT_S": "soon",
            "OMLX_ADMISSION_MAX_MODELS": "2",
            "OMLX_ADMISSION_LINGER_S": " ",
            "OMLX_ADMISSION_MAX_AGE_S": "auto",
        }
    )
    assert config == Config(queue=False, max_models=2)
    (line,) = problems
    assert line == (
        "OMLX_ADMISSION_MAX_WAIT_S='soon' is not a number of seconds, 0 or more; "
        "using the default 300"
    )
