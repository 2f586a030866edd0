"""What was changed in oMLX, so that it can be undone exactly.

A patch records the raw attribute it replaced (from the class ``__dict__``, so
static and class methods survive) and undo puts that very object back, newest
first, and only where our wrapper is still in place: another tool may have
wrapped after us, and peeling would remove its layer.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wrapt

logger = logging.getLogger("omlx.admission")

_MISSING = object()


@dataclass(frozen=True)
class _Entry:
    parent: Any
    attribute: str
    original: Any
    ours: Any


@dataclass(frozen=True)
class Mark:
    """How much a ledger held at one time."""

    entries: int
    actions: int


@dataclass
class Ledger:
    """The changes of this process, in order. Wrappers lie round each other: all go at once."""

    _entries: list[_Entry] = field(default_factory=list)
    _undo_actions: list[Callable[[], None]] = field(default_factory=list)

    def wrap(
        self, module: Any, name: str, wrapper: Callable[..., Any], seldom: bool = False
    ) -> None:
        """Wrap ``module.name`` (dotted) with a wrapt wrapper and remember the original.

        ``seldom``: it is a coroutine method, and ``wrapper`` mostly answers without it.
        What lies below is then bound when it is called, not with every access.

        Raises:
            RuntimeError: this package has wrapped it already.
            AttributeError: there is no such attribute.
        """
        parent, attribute = _holder(module, name)
        original = vars(parent).get(attribute, _MISSING)
        if getattr(original, "_self_wrapper", None) is wrapper:
            raise RuntimeError(f"{name} is wrapped already")
        if seldom:
            ours = wrapt.FunctionWrapper(
                _bound_when_called(inspect.getattr_static(parent, attribute)), wrapper
            )
            setattr(parent, attribute, ours)
        else:
            ours = wrapt.wrap_function_wrapper(module, name, wrapper)
        # Read it back: the object in the class dictionary is what undo compares with.
        ours = vars(parent).get(attribute, ours)
        self._entries.append(_Entry(parent, attribute, original, ours))

    def wrap_if_there(self, module: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        """Wrap it like :meth:`wrap` where ``module`` has it; whether it has."""
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            self.wrap(module, name, wrapper)
        return found is not None

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the feature is undone (for changes that are no attribute)."""
        self._undo_actions.append(action)

    def begin(self) -> Mark:
        """Where the ledger stands, for :meth:`undo`."""
        return Mark(len(self._entries), len(self._undo_actions))

    @property
    def wrapped(self) -> list[str]:
        """Dotted names that are wrapped now, in order."""
        return [
            f"{getattr(e.parent, '__module__', None) or e.parent.__name__}"
            f":{getattr(e.parent, '__qualname__', '')}.{e.attribute}".replace(":.", ":")
            for e in self._entries
        ]

    def undo(self, since: Mark | None = None) -> list[str]:
        """Restore every original, or those since a mark.

        Returns the names that another tool has wrapped meanwhile.
        """
        kept = since or Mark(0, 0)
        left: list[str] = []
        while len(self._undo_actions) > kept.actions:
            self._undo_actions.pop()()
        while len(self._entries) > kept.entries:
            entry = self._entries.pop()
            if vars(entry.parent).get(entry.attribute, _MISSING) is not entry.ours:
                left.append(entry.attribute)
            elif entry.original is _MISSING:
                delattr(entry.parent, entry.attribute)
            else:
                setattr(entry.parent, entry.attribute, entry.original)
        if left:
            logger.warning(
                "admission: %s stays wrapped by another tool, not undone", ", ".join(left)
            )
        return left


def _bound_when_called(method: Any) -> Callable[..., Any]:
    """``method`` as one function: to bind wrappers round wrappers binds each of them."""

    @functools.wraps(method)
    async def call(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await method.__get__(instance, type(instance))(*args, **kwargs)

    return call


def _holder(module: Any, name: str) -> tuple[Any, str]:
    """What holds a dotted name, and its last part.

    Not by wrapt: what Python says of a name that a module lacks while its import hooks
    run is that an import is circular, which it is not.
    """
    parent: Any = module
    *path, attribute = name.split(".")
    for part in path:
        parent = getattr(parent, part, _MISSING)
    if getattr(parent, attribute, _MISSING) is _MISSING:
        raise AttributeError(f"{getattr(module, '__name__', module)} has no {name}")
    return parent, attribute
