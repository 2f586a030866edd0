"""A mutation, and which features have to step back for it.

The right answer comes from the register alone: from which needs name what the mutation
touches, and from what the mutation means to them. Nothing of the gate is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.mutations.tree import Files
from omlx_admission.hooks.features import FEATURES
from omlx_admission.hooks.gate import Kind, Need

Hits = Callable[[Need], bool]


@dataclass(frozen=True)
class Mutation:
    """One changed checkout.

    Attributes:
        kind: what was done, for the table.
        target: what it was done to.
        files: the changed files, by path below the package; None is a removed one.
        hits: whether a need is not met any more.
        native: features that oMLX now has itself.
        all_refused: nothing may be applied, whatever the needs are.
    """

    kind: str
    target: str
    files: Files
    hits: Hits
    native: Sequence[str] = ()
    all_refused: bool = False

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.kind}: {self.target}"

    def expected(self) -> dict[str, str]:
        """State of each feature that has to come out."""
        alone = {
            feature.name: "native"
            if feature.name in self.native
            else "refused"
            if self.all_refused or any(self.hits(need) for need in feature.needs)
            else "ready"
            for feature in FEATURES
        }
        states = dict(alone)
        for feature in FEATURES:
            ground = {alone[name] for name in feature.stands_on}
            if ground and alone[feature.name] == "ready" and "ready" not in ground:
                states[feature.name] = "refused" if "refused" in ground else "off"
        return states


@dataclass
class Outcome:
    """What a mutation came to.

    Attributes:
        wrong: features whose state is not the expected one, with both states.
        faults: what went wrong when the hooks were applied to the mutated modules.
        served: what a whole server did, where one was started.
    """

    mutation: Mutation
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    served: str | None = None
    refused: int = 0
    applied: bool = False

    @property
    def good(self) -> bool:
        """Whether it is all as it has to be."""
        return not (self.wrong or self.faults)


def none(_need: Need) -> bool:
    """A change that no hook need mind."""
    return False


def is_defined(need: Need) -> bool:
    """Needs of what their module itself has, and not only uses."""
    return need.kind not in (Kind.USED, Kind.JOBS)


def named(module: str, name: str) -> Hits:
    """Needs of exactly this name (used names are needs of another sort)."""
    return lambda need: need.module == module and need.name == name and is_defined(need)


def below(module: str, name: str) -> Hits:
    """Needs of this name and of what it holds."""
    return lambda need: (
        need.module == module
        and is_defined(need)
        and (need.name == name or need.name.startswith(f"{name}."))
    )


def both(*parts: Hits) -> Hits:
    """Needs that every part hits."""
    return lambda need: all(part(need) for part in parts)


def either(*parts: Hits) -> Hits:
    """Needs that some part hits."""
    return lambda need: any(part(need) for part in parts)


def required(need: Need) -> bool:
    """Needs of what has to be there at all."""
    return not need.optional


def leading(need: Need) -> list[str]:
    """Parameters that the need wants in their places."""
    params = list(need.params or ())
    at = params.index("*") if "*" in params else len(params)
    return [p.partition("=")[0] for p in params[:at]]


def all_params(need: Need) -> list[str]:
    """Parameters that the need names."""
    return [p.partition("=")[0] for p in need.params or () if p != "*"]
