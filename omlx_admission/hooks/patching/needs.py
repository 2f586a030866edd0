"""A row of the register: one name of oMLX that a hook relies on, and what it has to be.

Each hook states its rows; `hooks.features` collects them by feature, `.gate` answers
them from oMLX's source, `omlx-admission doctor --needs` shows them, and the contract suite
holds them to the imported oMLX. There is no second list of such names.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a name must be in oMLX's source."""

    SYNC = "function"
    ASYNC = "coroutine function"
    GENERATOR = "generator function"
    ASYNC_GENERATOR = "asynchronous generator function"
    CLASS_METHOD = "class method"
    #: A class that takes attributes which it does not define.
    CLASS = "class"
    VALUE = "module or class attribute"
    #: Bound by whatever means: an import, a property, a function.
    NAME = "name"
    #: Read somewhere in the module: a wrapper is of no use where it is never called.
    USED = "name in use"
    #: A function that gives an executor, and what the module hands to it.
    JOBS = "executor's jobs"


@dataclass(frozen=True)
class Need:
    """One name that a hook relies on.

    Attributes:
        params: the leading parameters in order, ``self`` left out; None means that the
            hook passes whatever there is. ``"name"`` has to be accepted by position and
            by keyword, ``"name=False"`` besides has to have that default. What follows
            ``"*"`` has to be accepted by keyword, in any order.
        exact: nothing may follow them; otherwise further parameters are fine as long as
            they have defaults, because wrappers pass them through.
        returns: what the function may be annotated to return (any of these; ``X[...]`` is
            an X of anything); without an annotation it passes.
        types: what a VALUE may be, like ``returns``: its annotation says so, or without
            one what it is made by. What neither says passes.
        bases: a CLASS has to have exactly these bases, by the last part of their names.
        jobs: names of the functions that the module may hand to a JOBS executor.
        run: the function's body has to be one that was run (`.bodies`): the hook uses
            it in a way that its signature says nothing about.
        optional: a release without the name is fine; one that has it has it in this shape.
    """

    module: str
    name: str
    kind: Kind
    params: tuple[str, ...] | None = None
    exact: bool = False
    returns: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    bases: tuple[str, ...] | None = None
    jobs: tuple[str, ...] = ()
    run: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def read_if_there(module: str, owner: str, *names: str) -> tuple[Need, ...]:
    """Rows of attributes that a hook reads only where they are, whatever they are."""
    return tuple(Need(module, f"{owner}.{name}", Kind.NAME, optional=True) for name in names)
