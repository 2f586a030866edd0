"""Who leaves for whom: least disturbance, the whole set or none, never for nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_admission.core.policy.model import ModelView, PoolView, Target
from omlx_admission.core.policy.planner import Plan, PlanKind, after, fits, never_fits, plan


def view(*models: ModelView, ceiling: int = 100, residue: int = 0, **kwargs: Any) -> PoolView:
    total = sum(m.size for m in models if not m.loading)
    return PoolView(
        {m.model: m for m in models},
        ceiling=ceiling,
        fixed_ceiling=kwargs.pop("fixed", ceiling),
        used=kwargs.pop("used", total + residue),
        committed=kwargs.pop("committed", total),
        **kwargs,
    )


def model(name: str, size: int, **kwargs: Any) -> ModelView:
    if kwargs.get("leases"):
        kwargs["busy"] = True
    return ModelView(name, size, **kwargs)


B = Target("B")


@pytest.mark.parametrize(
    ("pool", "kind", "victims"),
    [
        pytest.param(view(), PlanKind.FITS, (), id="empty"),
        pytest.param(view(model("D", 30)), PlanKind.FITS, (), id="beside another"),
        pytest.param(view(model("A", 60)), PlanKind.EVICT, ("A",), id="idle leaves"),
        pytest.param(view(model("A", 60, leases=1)), PlanKind.DRAIN, ("A",), id="busy drains"),
        pytest.param(view(model("A", 60, pinned=True)), PlanKind.NEVER, (), id="all pinned"),
        pytest.param(
            view(model("P", 30, pinned=True), model("D", 30)),
            PlanKind.EVICT,
            ("D",),
            id="the pinned one stays",
        ),
        pytest.param(
            view(model("A", 60, unloading=True)), PlanKind.SETTLE, (), id="room is coming"
        ),
        pytest.param(
            view(model("A", 60, loading=True)), PlanKind.SETTLE, (), id="a foreign load"
        ),
        pytest.param(
            view(model("E", 10, last_used=9), model("D", 30), model("A", 60, leases=3)),
            PlanKind.DRAIN,
            ("A",),
            id="idle ones that would not suffice stay",
        ),
        pytest.param(
            view(model("D", 50, last_used=9), model("E", 5), model("F", 5)),
            PlanKind.EVICT,
            ("D",),
            id="small ones in front that a large one makes superfluous stay",
        ),
        pytest.param(
            view(model("D", 40, leases=1), model("F", 60)),
            PlanKind.EVICT,
            ("F",),
            id="idle before busy",
        ),
        pytest.param(
            view(model("D", 40, leases=9), model("F", 60, leases=1)),
            PlanKind.DRAIN,
            ("F",),
            id="fewest users first",
        ),
        pytest.param(
            view(model("E", 10, pinned=True), residue=60),
            PlanKind.ASK,
            (),
            id="nothing of ours is in the way",
        ),
        pytest.param(
            view(model("D", 10, group="hooks"), residue=60, committed=10),
            PlanKind.EVICT,
            ("D",),
            id="an eviction reclaims residue",
        ),
        pytest.param(
            view(model("B", 60, leases=1, variant="fast")),
            PlanKind.DRAIN,
            ("B",),
            id="another variant of itself leaves",
        ),
        pytest.param(
            view(model("B", 60, variant="fast", pinned=True)),
            PlanKind.EVICT,
            ("B",),
            id="also where it is pinned",
        ),
        pytest.param(
            view(model("B", 60, loading=True)), PlanKind.SETTLE, (), id="it loads already"
        ),
        pytest.param(
            view(model("D", 1), model("E", 1), max_models=2),
            PlanKind.EVICT,
            ("D",),
            id="MAX_MODELS makes room by count",
        ),
        pytest.param(
            view(model("D", 1, unloading=True), model("E", 1, pinned=True), max_models=2),
            PlanKind.SETTLE,
            (),
            id="an unloading one counts until it is gone",
        ),
        pytest.param(
            view(model("D", 1, pinned=True), max_models=1),
            PlanKind.NEVER,
            (),
            id="every place is pinned",
        ),
        pytest.param(
            view(model("A", 60, leases=1), ceiling=50, never_refuse=True),
            PlanKind.DRAIN,
            ("A",),
            id="guard off: drain as well as possible",
        ),
        pytest.param(
            view(ceiling=50, never_refuse=True), PlanKind.FITS, (), id="guard off: then load"
        ),
        pytest.param(
            view(model("A", 60), model("D", 1), ceiling=50, never_refuse=True, max_models=2),
            PlanKind.EVICT,
            ("A", "D"),
            id="guard off: with a limit on the number too",
        ),
        pytest.param(
            view(
                model("A", 60, unloading=True),
                ceiling=50,
                never_refuse=True,
                max_models=1,
            ),
            PlanKind.SETTLE,
            (),
            id="guard off: the number stays a hard limit",
        ),
        pytest.param(view(model("A", 60), ceiling=0), PlanKind.FITS, (), id="no ceiling"),
        pytest.param(
            view(model("D", 10, group="hooks"), exclusive={B: "hooks"}),
            PlanKind.EVICT,
            ("D",),
            id="b44 one of a group at a time, though both fit",
        ),
        pytest.param(
            view(model("D", 10, leases=1, group="hooks"), exclusive={B: "hooks"}),
            PlanKind.DRAIN,
            ("D",),
            id="b44 and it drains first",
        ),
        pytest.param(
            view(model("D", 10, pinned=True, group="hooks"), exclusive={B: "hooks"}),
            PlanKind.NEVER,
            (),
            id="b44 a pinned member makes it permanent",
        ),
        pytest.param(
            view(model("D", 10, unloading=True, group="hooks"), exclusive={B: "hooks"}),
            PlanKind.SETTLE,
            (),
            id="b44 a member on its way out",
        ),
        pytest.param(
            view(model("D", 10), exclusive={B: "hooks", Target("D"): "hooks"}),
            PlanKind.FITS,
            (),
            id="f5 what it could be loaded as is not what it runs as",
        ),
        pytest.param(
            view(model("D", 10, pinned=True, group="hooks"), exclusive={Target("D"): "hooks"}),
            PlanKind.FITS,
            (),
            id="f5 another variant of the wanted one is no member",
        ),
    ],
)
def test_plan(pool: PoolView, kind: PlanKind, victims: tuple[str, ...]) -> None:
    got = plan(B, 60, pool)
    assert (got.kind, got.victims) == (kind, victims)


def test_kept_models_do_not_leave() -> None:
    pool = view(model("A", 60, leases=1), model("D", 30))
    assert plan(B, 60, pool, keep=["A"]).kind is PlanKind.BLOCKED
    assert plan(Target("C"), 40, pool, keep=["A"]).victims == ("D",)


def test_a_kept_variant_is_not_reloaded() -> None:
    pool = view(model("B", 60, variant="fast"))
    assert plan(Target("B", "slow"), 60, pool, keep=["B"]).kind is PlanKind.BLOCKED


def test_b47_a_low_reading_does_not_admit_a_second_model() -> None:
    """The device reports 30 for a model of 60: the larger figure counts."""
    pool = view(model("A", 60), used=30, committed=30)
    assert plan(B, 60, pool).kind is PlanKind.EVICT


def test_b05_a_load_in_progress_counts_in_full() -> None:
    """Its bytes are not in use yet, and must not be given away."""
    pool = view(model("A", 60, loading=True), used=0, committed=0)
    assert not fits(pool, 60)
    assert plan(B, 60, pool).kind is PlanKind.SETTLE
    assert fits(pool, 40)


def test_b28_only_what_is_pinned_makes_it_permanent() -> None:
    assert never_fits(Target("X"), 120, view())
    assert never_fits(Target("X"), 120, view(model("A", 60)))
    assert never_fits(Target("Y"), 80, view(model("P", 30, pinned=True)))
    assert not never_fits(Target("Y"), 80, view(model("P", 30, leases=5)))
    assert not never_fits(Target("X"), 120, view(never_refuse=True))


def test_after_counts_the_coming_and_not_the_leaving() -> None:
    later = after(view(model("A", 60), model("D", 30)), B, 60, ["A"])
    assert set(later.models) == {"B", "D"}
    assert not fits(later, 20)
    assert fits(later, 10)
    assert not later.ready


MODELS = st.lists(
    st.builds(
        model,
        name=st.sampled_from("ADEFP"),
        size=st.integers(1, 60),
        leases=st.sampled_from([0, 0, 0, 1, 4]),
        pinned=st.sampled_from([False, False, True]),
        unloading=st.sampled_from([False, False, False, True]),
        last_used=st.integers(0, 3).map(float),
    ),
    max_size=5,
    unique_by=lambda m: m.model,
)


@settings(max_examples=300)
@given(MODELS, st.integers(1, 120), st.sampled_from([0, 0, 1, 2, 3]))
def test_a_plan_suffices_and_needs_each_of_its_victims(
    models: list[ModelView], size: int, max_models: int
) -> None:
    pool = view(*models, max_models=max_models)
    wish: Plan = plan(B, size, pool)
    leaving = [pool.models[v] for v in wish.victims]
    assert all(m.evictable for m in leaving)
    assert wish.busy == tuple(m.model for m in leaving if m.busy)
    idle = [m for m in models if m.evictable and not m.busy]
    match wish.kind:
        case PlanKind.NEVER:
            assert never_fits(B, size, pool)
            assert not wish.victims
        case PlanKind.FITS | PlanKind.EVICT | PlanKind.DRAIN:
            assert fits(pool, size, leaving)
            for spared in leaving:
                assert not fits(pool, size, [m for m in leaving if m is not spared])
            if wish.kind is PlanKind.DRAIN:
                assert not fits(pool, size, idle), "idle ones would have done"
        case _:
            everybody = [m for m in models if m.evictable]
            assert not fits(pool, size, everybody)
            assert not wish.victims, "nothing leaves where it does not suffice"
