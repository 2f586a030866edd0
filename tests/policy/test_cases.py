"""Public cases that the policy alone decides, in virtual time, each under its id.

Fixture of all of them: the ceiling is 100, A and B need 60 (they do not fit together),
D 30, E and W 10, P 30 and may be pinned, X 120 (never fits). A load takes 3 s, an
unload 0.5 s, a short request 0.3 s, a long one 5 s. Every contract is checked in
every step by the world itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.sim_types import Broken, Mark, Request
from benchmarks.simulation.simulator import Job, Simulator, Spec
from omlx_admission.core.policy.admission import AdmissionPolicy
from omlx_admission.core.policy.estimates import Dials
from omlx_admission.core.policy.model import Outcome, Target

SIZES = {"A": 60, "B": 60, "C": 60, "D": 30, "E": 10, "W": 10, "P": 30, "X": 120}
SHORT, LONG = 0.3, 5.0


class House(Simulator):
    """The fixture; ``ask`` sends a request at a time, ``warm`` starts with models loaded."""

    def __init__(
        self,
        *,
        warm: str = "",
        pinned: str = "",
        exclusive: str = "",
        max_age: float | None = None,
        linger: float | None = None,
        budget: float = 30.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        specs = [
            Spec(
                name,
                size,
                load_s=3.0,
                unload_s=0.5,
                pinned=name in pinned,
                exclusive="hooks" if name in exclusive else None,
            )
            for name, size in SIZES.items()
        ]
        policy = AdmissionPolicy(Dials(max_age, linger, budget))
        super().__init__(policy, specs, 100, seed, **kwargs)
        self.policy = policy
        self.budget = budget
        self.asked: list[Request] = []
        for name in warm:
            self.world.models[name].resident = True

    def ask(
        self,
        time: float,
        name: str,
        service: float = SHORT,
        *,
        variant: str | None = None,
        leaves_after: float | None = None,
        budget: float | None = None,
    ) -> int:
        """Send one request; the number finds it in :attr:`asked` once time has come."""
        number = len(self.asked)
        self.asked.append(None)  # type: ignore[arg-type]

        def send() -> None:
            self.asked[number] = self.submit(
                Target(name, variant),
                Job(service, leaves_after),
                budget=self.budget if budget is None else budget,
            )

        self.at(time, send)
        return number

    def served(self, *numbers: int) -> bool:
        """Whether all of these were granted."""
        return all(self.asked[n].outcome is Outcome.GRANTED for n in numbers)

    def story(self) -> list[str]:
        """What happened to models, in order: ``"load A"`` stands for a completed load."""
        words = {"loaded": "load", "unload": "unload"}
        return [f"{words[k]} {m}" for _, k, m in self.world.log if k in words]

    def end(self) -> None:
        """Run to the end; nothing may be left (K7, K8)."""
        self.run()
        self.world.check_idle()


def test_b01_the_evicted_resident_is_loaded_again_after_the_other_was_served() -> None:
    house = House(warm="A")
    b, a = house.ask(0, "B"), house.ask(0.5, "A")
    house.end()
    assert house.served(a, b)
    assert house.story() == ["unload A", "load B", "unload B", "load A"]
    assert house.asked[b].ended < house.asked[a].ended


def test_b02_the_busy_model_serves_on_then_the_other_is_served() -> None:
    house = House(warm="A")
    stream, b, late = house.ask(0, "A", LONG), house.ask(0.5, "B"), house.ask(1, "A")
    house.end()
    assert house.served(stream, b, late)
    assert house.asked[late].waited == 0, "within the bypass bound it is served at once"
    assert house.asked[b].waited == pytest.approx(4.5 + 0.5 + 3)
    assert house.story() == ["unload A", "load B"]


def test_b04_nothing_is_unloaded_before_its_last_user_is_done() -> None:
    house = House(warm="A", max_age=0.0)
    house.ask(0, "A", LONG)
    house.ask(1, "B")
    house.end()
    unloads = [t for t, kind, m in house.world.log if (kind, m) == ("unload", "A")]
    assert unloads == [pytest.approx(LONG)]


@pytest.mark.parametrize("seed", range(10))
def test_b05_simultaneous_cold_requests_load_one_after_another(seed: int) -> None:
    house = House(seed=seed)
    numbers = [house.ask(0, name) for name in "ABDABDABDA"]
    house.end()
    assert house.served(*numbers)
    assert sorted(house.story()).count("load D") == 1


@pytest.mark.parametrize("seed", range(10))
def test_b06_three_cold_requests_are_served_in_turn(seed: int) -> None:
    house = House(seed=seed)
    numbers = [house.ask(0.001 * i, name) for i, name in enumerate("ABC")]
    house.end()
    assert house.served(*numbers)
    ended = [house.asked[n].ended for n in numbers]
    assert ended == sorted(ended)


def test_b07_a_loaded_model_serves_its_requester_before_it_can_be_evicted() -> None:
    house = House()
    a, b = house.ask(0, "A"), house.ask(0.1, "B")
    house.end()
    assert house.served(a, b)
    assert house.story() == ["load A", "unload A", "load B"]
    assert house.asked[a].ended == pytest.approx(3)
    assert [t for t, k, _ in house.world.log if k == "unload"] == [pytest.approx(3 + SHORT)]


def test_b08_a_request_during_an_unload_waits_for_a_proper_load() -> None:
    house = House(warm="A")
    house.at(0, lambda: house.world.begin_unload("A"))
    a = house.ask(0.1, "A")
    house.end()
    assert house.served(a)
    assert house.story() == ["unload A", "load A"]
    assert house.asked[a].ended == pytest.approx(0.5 + 3, abs=0.06)


def test_b10_no_newcomer_revives_the_victim() -> None:
    house = House(warm="AD", max_age=3.0)
    first, b = house.ask(0, "A", 2.0), house.ask(0, "B")
    later = [house.ask(0.5 + 0.4 * i, "A", 0.5) for i in range(50)]
    house.end()
    assert house.served(first, b, *later)
    assert house.asked[b].waited <= 3.0 + 0.5 + 0.5 + 3 + 0.01


def test_b11_loaded_models_are_served_at_once_during_a_load() -> None:
    house = House(warm="DE")
    house.ask(0, "A")
    both = [house.ask(0.2 + 0.1 * i, name) for i in range(20) for name in "DE"]
    house.end()
    assert [house.asked[n].waited for n in both] == [0.0] * 40


def test_b12_a_model_handed_out_is_no_victim() -> None:
    house = House(warm="EA")
    e, big = house.ask(0, "E", 4.0), house.ask(0, "D")
    more = house.ask(0.1, "B")
    house.end()
    assert house.served(e, big, more)
    unloads = [t for t, k, m in house.world.log if (k, m) == ("unload", "E")]
    assert all(t >= 4.0 for t in unloads)


class TestB13Variants:
    def test_b13_the_other_variant_waits_for_the_drain(self) -> None:
        house = House()
        fast, slow = (
            house.ask(0, "A", LONG, variant="fast"),
            house.ask(3.5, "A", variant="slow"),
        )
        house.end()
        assert house.served(fast, slow)
        assert house.story() == ["load A", "unload A", "load A"]

    def test_b13_alternating_variants_are_batched(self) -> None:
        house = House(budget=300.0)
        numbers = [house.ask(0.01 * i, "A", variant=("fast", "slow")[i % 2]) for i in range(20)]
        house.end()
        assert house.served(*numbers)
        assert house.story().count("load A") == 2


def test_b14_steady_traffic_on_one_variant_does_not_freeze_the_other() -> None:
    house = House(max_age=5.0, budget=300.0)

    def client(_request: Request | None = None) -> None:
        if house.now < 60:
            house.submit(Target("A", "fast"), Job(1.0, then=client), budget=300.0)

    for index in range(4):
        house.at(0.25 * index, client)
    slow, other = house.ask(8, "A", variant="slow"), house.ask(9, "D")
    house.end()
    assert house.served(slow, other)
    assert house.asked[slow].waited <= 5.0 + 1.0 + 0.5 + 3 + 0.01
    assert house.asked[other].waited <= 3.01


def test_b16_clients_that_leave_everywhere_leave_nothing() -> None:
    house = House()
    for round_ in range(5):
        for offset, name in enumerate("ABD"):
            house.ask(round_ * 2 + offset * 0.3, name, LONG, leaves_after=0.5)
    last = [house.ask(20 + i, name) for i, name in enumerate("ABD")]
    house.end()
    assert house.served(*last)


def test_b17_b33_requests_all_through_a_load_are_served_by_it() -> None:
    house = House()
    gone = [house.ask(t, "A", leaves_after=2 - t) for t in (0, 0.5)]
    rest = [house.ask(t, "A") for t in (1.5, 2.99, 3.01)]
    house.end()
    assert [house.asked[n].outcome for n in gone] == [Outcome.CANCELLED] * 2
    assert house.served(*rest)
    assert house.story() == ["load A"]


class TestB19Rescan:
    def test_b19_a_removed_model_ends_its_waiters(self) -> None:
        house = House(warm="A")
        house.ask(0, "A", LONG)
        b = house.ask(0.5, "B")

        def rescan() -> None:
            house.world.models["B"].registered = False
            house.world.changed()

        house.at(1, rescan)
        house.end()
        assert house.asked[b].outcome is Outcome.REFUSED
        assert house.asked[b].ended == pytest.approx(1)
        assert house.story() == [], "and A is left in peace"

    def test_b19_a_rescan_that_keeps_the_model_changes_nothing(self) -> None:
        house = House()
        a = house.ask(0, "A")
        house.at(1, house.world.changed)
        house.end()
        assert house.served(a)


@pytest.mark.parametrize("variant", [None, "fast"])
def test_b13_b23_ten_requests_for_a_cold_model_load_it_once(variant: str | None) -> None:
    house = House()
    numbers = [house.ask(0, "D", variant=variant) for _ in range(10)]
    house.end()
    assert house.served(*numbers)
    assert house.story() == ["load D"]


@pytest.mark.parametrize("seed", range(10))
def test_b24_two_waiters_for_one_victim_are_both_served(seed: int) -> None:
    house = House(warm="A", seed=seed, budget=25.0)
    b, c = house.ask(0, "B"), house.ask(0, "C")
    house.end()
    assert house.served(b, c)


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [({}, "X"), ({"pinned": "PD"}, "A"), ({"warm": "A"}, "X")],
    ids=["idle", "pinned", "idle resident"],
)
def test_b28_what_never_fits_is_refused_at_once(kwargs: dict[str, Any], name: str) -> None:
    kwargs = {"warm": kwargs.get("pinned", kwargs.get("warm", "")), **kwargs}
    house = House(**kwargs)
    number = house.ask(0, name)
    house.end()
    assert house.asked[number].outcome is Outcome.REFUSED
    assert house.asked[number].waited == 0
    assert house.story() == [], "and nothing was evicted for it"


def test_b29_the_queue_is_bounded_and_the_loaded_model_is_not_queued() -> None:
    house = House(warm="A", max_queue=3)
    house.ask(0, "A", 20.0)
    told: list[float] = []

    def refusing(request: Request) -> None:
        view = house.world.view((*house.policy.targets, request.target))
        told.append(house.policy.retry_in(request.target, 60, view, house.now, 0.0))

    house.world.refusing = refusing
    for_b = [house.ask(1 + 0.01 * i, "B") for i in range(6)]
    for_a = [house.ask(2 + 0.01 * i, "A") for i in range(6)]
    house.end()
    outcomes = [house.asked[n].outcome for n in for_b]
    assert outcomes == [Outcome.GRANTED] * 3 + [Outcome.REFUSED] * 3
    assert all(house.asked[n].waited == 0 for n in for_b[3:])
    assert house.served(*for_a)
    assert len(told) == 3
    assert min(told) >= house.policy.estimates.swap("B", 60) - 3.0


class TestB32Abandoned:
    def test_b32_only_those_who_still_wait_are_served(self) -> None:
        house = House(warm="A")
        house.ask(0, "A", 9.0)
        for round_ in range(4):
            for _ in range(5):
                house.ask(1 + 2 * round_, "B", leaves_after=2.0 if round_ < 3 else None)
        house.end()
        assert sum(r.outcome is Outcome.GRANTED for r in house.asked) == 6
        assert house.story() == ["unload A", "load B"]

    def test_b32_no_budget_no_wait_and_no_eviction(self) -> None:
        house = House(warm="A")
        b = house.ask(0, "B", budget=0.0)
        house.end()
        assert house.asked[b].outcome is Outcome.REFUSED
        assert house.asked[b].waited == 0
        assert house.story() == []


def test_b33_if_all_leave_the_model_is_idle_and_can_be_evicted() -> None:
    house = House()
    for time in (0, 0.5, 1):
        house.ask(time, "A", leaves_after=2 - time)
    b = house.ask(10, "B")
    house.end()
    assert house.served(b)
    assert house.story() == ["load A", "unload A", "load B"]


def test_b43_work_without_a_lease_keeps_its_model() -> None:
    """A cancelled transcription stays busy until its thread returns."""
    house = House(warm="WA")
    house.world.models["A"].pinned = True
    house.at(0, lambda: house.world.stray_begins("W"))
    house.at(4, lambda: house.world.stray_ends("W"))
    d = house.ask(0.2, "D")
    p = house.ask(5, "P")
    house.end()
    assert house.served(d)
    assert house.asked[p].outcome is not None
    assert all(t >= 4 for t, k, m in house.world.log if (k, m) == ("unload", "W"))


class TestB44Exclusive:
    def test_b44_one_of_the_group_drains_for_the_other(self) -> None:
        house = House(warm="D", exclusive="DE")
        d, e = house.ask(0, "D", LONG), house.ask(0.5, "E")
        house.end()
        assert house.served(d, e)
        assert house.story() == ["unload D", "load E"]

    def test_b44_a_pinned_member_makes_it_permanent(self) -> None:
        house = House(warm="P", pinned="P", exclusive="PE")
        e = house.ask(0, "E")
        house.end()
        assert house.asked[e].outcome is Outcome.REFUSED
        assert house.story() == []


def test_b46_background_calls_for_a_default_model_are_batched() -> None:
    house = House(budget=300.0)
    numbers = []
    for turn in range(10):
        numbers.append(house.ask(turn * 6.0, "A", LONG))
        numbers += [house.ask(turn * 6.0 + 0.1 * i, "B") for i in (1, 2, 3)]
    house.end()
    assert house.served(*numbers)
    assert house.world.counts.swaps <= 10, "20 without batching"


def test_b50_residue_of_a_failed_load_is_a_wait() -> None:
    house = House()
    house.load_result = lambda model: "failed" if model == "B" else "ok"
    b, a = house.ask(0, "B"), house.ask(3.5, "A")
    house.at(3, lambda: house.world.add_residue(soft=50))
    house.at(6, lambda: house.world.settle(soft=50))
    refused = iter(["refused"] * 3)
    ok = house.load_result
    house.load_result = lambda model: (
        next(refused, "ok") if model == "A" and house.now < 6 else ok(model)
    )
    house.end()
    assert house.asked[b].outcome is Outcome.FAILED
    assert house.served(a)


def test_b51_a_broken_model_does_not_disturb_the_others() -> None:
    house = House(warm="A")
    house.load_result = lambda model: "failed" if model == "D" else "ok"
    broken = [house.ask(0.5 * i, "D") for i in range(10)]
    good = [house.ask(0.25 + 0.5 * i, "A") for i in range(10)]
    house.end()
    assert all(house.asked[n].outcome is Outcome.FAILED for n in broken)
    assert [house.asked[n].waited for n in good] == [0.0] * 10
    assert "unload A" not in house.story()


def test_b52_a_request_during_a_forced_unload_waits() -> None:
    house = House(warm="A")
    stream = house.ask(0, "A", LONG)

    def unload_when_idle() -> None:
        house.world.models["A"].mark = Mark.FOREIGN

    house.at(1, unload_when_idle)
    a, b = house.ask(1.2, "A"), house.ask(1.3, "B")
    house.end()
    assert house.served(stream, a, b)
    assert house.story()[0] == "unload A"
    unloads = [t for t, k, _ in house.world.log if k == "unload"]
    assert unloads[0] == pytest.approx(LONG)


class TestB57SameSwapEachWay:
    def test_b57_guard_off(self) -> None:
        house = House(warm="A", never_refuse=True)
        a, b = house.ask(0, "A", LONG), house.ask(0.5, "B")
        x = house.ask(20, "X")
        house.end()
        assert house.served(a, b, x)
        assert house.story() == ["unload A", "load B", "unload B", "load X"]

    def test_b57_one_model_mode_with_room_for_two(self) -> None:
        house = House(warm="D", max_models=1)
        d, e = house.ask(0, "D", LONG), house.ask(0.5, "E")
        house.end()
        assert house.served(d, e)
        assert house.story() == ["unload D", "load E"]


class TestC1Dips:
    """The ceiling falls for a while, and what fitted fits again: nobody is told never."""

    @staticmethod
    def dip(house: House, begins: float, lasts: float, to: int = 59) -> None:
        house.world.fixed_ceiling = 100
        house.at(begins, lambda: house.world.set_ceiling(to))
        house.at(begins + lasts, lambda: house.world.set_ceiling(100))

    #: While B: arrives, stands behind A, sees A drain, loads, and is served.
    MOMENTS = (0.4, 3.0, 21.0, 33.5, 36.0)

    @pytest.mark.parametrize("begins", MOMENTS)
    @pytest.mark.parametrize("lasts", [0.1, 1.0, 5.0, 30.0])
    def test_c1_at_each_moment_of_a_wait(self, begins: float, lasts: float) -> None:
        house = House(warm="A", max_age=20.0, budget=300.0)
        stream, b = house.ask(0, "A", 32.0), house.ask(0.5, "B", LONG)
        late = house.ask(22.0, "A")
        self.dip(house, begins, lasts)
        house.end()
        assert house.served(stream, b, late)
        assert house.story()[:2] == ["unload A", "load B"]
        away = next(t for t, kind, m in house.world.log if (kind, m) == ("unload", "A"))
        assert away >= 32.0, "nothing that runs is cut"
        assert not begins <= away < begins + lasts, "nothing leaves for what cannot come"

    def test_c1_a_short_dip_does_not_open_the_gate(self) -> None:
        house = House(warm="A", max_age=2.0, budget=300.0)
        house.ask(0, "A", 20.0)
        b, a = house.ask(0.5, "B"), house.ask(6.0, "A")
        self.dip(house, 5.0, 5.0)
        house.end()
        assert house.served(a, b)
        assert house.story() == ["unload A", "load B", "unload B", "load A"]

    def test_c1_a_long_one_does_not_keep_the_loaded_model_from_its_clients(self) -> None:
        house = House(warm="A", max_age=2.0, budget=300.0)
        house.ask(0, "A", 4.0)
        b = house.ask(0.5, "B")
        later = [house.ask(5.0 + i, "A") for i in range(60)]
        self.dip(house, 3.0, 100.0)
        house.end()
        assert house.served(b, *later)
        assert max(house.asked[n].waited for n in later) <= 10.0
        assert house.story() == ["unload A", "load B"]

    def test_c1_the_wait_ends_at_its_budget(self) -> None:
        house = House(warm="A")
        b, a = house.ask(1.0, "B"), house.ask(20.0, "A")
        self.dip(house, 0.5, 100.0)
        house.end()
        assert house.asked[b].outcome is Outcome.EXPIRED
        assert house.served(a)
        assert house.story() == []

    def test_c1_others_that_fit_are_not_kept_waiting(self) -> None:
        house = House(warm="A", max_age=2.0)
        b, d = house.ask(1.0, "B"), house.ask(5.0, "D")
        self.dip(house, 0.5, 20.0)
        house.end()
        assert house.served(b, d)
        assert house.asked[d].waited < 5.0

    def test_k2_what_is_fixed_still_refuses_at_once(self) -> None:
        house = House(warm="A")
        x = house.ask(1.0, "X")
        self.dip(house, 0.5, 20.0)
        house.end()
        assert house.asked[x].outcome is Outcome.REFUSED
        assert house.asked[x].waited == 0


class TestB60Hangs:
    def test_b60_a_hung_load_ends_its_waiters_and_frees_the_slot(self) -> None:
        house = House()
        house.load_result = lambda model: "hang" if model == "A" else "ok"
        a, d = house.ask(0, "A"), house.ask(65, "D")
        house.end()
        assert house.asked[a].outcome is Outcome.EXPIRED
        assert house.asked[a].waited == pytest.approx(30)
        assert house.served(d)

    def test_b60_a_drain_without_end_holds_nobody_for_ever(self) -> None:
        house = House(warm="A", max_age=0.0)
        house.ask(0, "A", 10_000.0)
        for time in range(1, 200, 10):
            house.ask(time, "B")
        late = [house.ask(61.0 + 0.1 * i, "A") for i in range(3)]
        house.run(until=70.0)
        # Twice the budget after the decision the gate opens again for a while.
        assert house.served(*late)
        d = house.ask(71, "D")
        house.run(until=80.0)
        assert house.served(d)

    def test_b60_an_unload_without_end_holds_back_only_who_needs_its_room(self) -> None:
        house = House(warm="A", max_age=0.0)
        house.unload_seconds = lambda _model: 1e6
        house.at(0, lambda: house.world.begin_unload("A"))
        b, d = house.ask(0.5, "B"), house.ask(0.6, "D")
        house.run(until=100.0)
        assert house.asked[b].outcome is Outcome.EXPIRED
        assert house.served(d)


class TestMaxModels:
    def test_the_number_holds_at_every_instant(self) -> None:
        house = House(max_models=2, budget=300.0)
        numbers = [house.ask(0.01 * i, "DEWPA"[i % 5]) for i in range(50)]
        house.end()
        assert house.served(*numbers)
        assert house.world.counts.swaps == 5

    def test_the_world_would_notice(self) -> None:
        house = House(warm="DEW", max_models=2)
        with pytest.raises(Broken, match="K3"):
            house.world.check()
