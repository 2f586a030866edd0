"""What a hook states that it needs of oMLX's source."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a name must be in oMLX's source."""

    SYNC = "function"
    ASYNC = "coroutine function"
    CLASS = "class"
    VALUE = "module or class attribute"
    #: Bound at the module's level by whatever means, imports included.
    NAME = "name"
    #: Read somewhere in the module: a wrapper is of no use where nobody calls it.
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
        decorators: decorators that change nothing for the hook. Any other one may turn the
            function into something else.
        made_by: what the value of a VALUE may be made by: a callable as the source writes
            it, ``dict`` for a display too, or a constant. Empty: whatever there is but None.
        types: what a VALUE may be annotated as, like ``returns``.
        bases: a CLASS has to have exactly these bases, by the last part of their names.
        attachable: a CLASS has to allow attributes that it does not define.
        awaits: a coroutine function awaits nothing but calls of functions with these names.
        without: names that the function does not read, so that it does not call them.
        jobs: names of the functions that the module may hand to a JOBS executor.
        generator: the function yields; without it, it must not.
        optional: a release without the name is fine; one that has it has it in this shape.
        where: asked only of a release that has this name, ``module:name``.
    """

    module: str
    name: str
    kind: Kind
    params: tuple[str, ...] | None = None
    exact: bool = False
    returns: tuple[str, ...] | None = None
    decorators: tuple[str, ...] = ()
    made_by: tuple[str, ...] | None = None
    bases: tuple[str, ...] | None = None
    attachable: bool = False
    types: tuple[str, ...] | None = None
    awaits: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    generator: bool = False
    optional: bool = False
    where: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"
