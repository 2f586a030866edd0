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
class Change:
    """One change as it is shown: by which feature, of what, and what lies there now."""

    feature: str
    attribute: str
    layer: str


@dataclass(frozen=True)
class _Wrap:
    """An attribute that was wrapped."""

    change: Change
    parent: Any
    attribute: str
    original: Any
    ours: Any

    def undo(self) -> bool:
        """Put the original back. False: another tool has wrapped it meanwhile."""
        if vars(self.parent).get(self.attribute, _MISSING) is not self.ours:
            return False
        if self.original is _MISSING:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)
        return True


@dataclass(frozen=True)
class _Action:
    """A change that is no wrapper, and what takes it back."""

    change: Change
    action: Callable[[], None]

    def undo(self) -> bool:
        """Take it back; nothing else is in the way."""
        self.action()
        return True


@dataclass
class Ledger:
    """The changes of this process, in order. Wrappers lie round each other: all go at once."""

    _entries: list[_Wrap | _Action] = field(default_factory=list)
    _feature: str = ""

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
        change = Change(self._feature, _dotted(parent, attribute), named(wrapper))
        self._entries.append(_Wrap(change, parent, attribute, original, ours))

    def wrap_if_there(self, module: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        """Wrap it like :meth:`wrap` where ``module`` has it; whether it has."""
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            self.wrap(module, name, wrapper)
        return found is not None

    def changed(self, attribute: str, layer: str, undo: Callable[[], None]) -> None:
        """Note a change of ``attribute`` that is no wrapper, and what takes it back."""
        change = Change(self._feature, attribute, layer)
        self._entries.append(_Action(change, undo))

    def while_in_use(self, attribute: str, layer: str) -> None:
        """Note what is changed on an instance while a wrapper runs, which takes it back."""
        self.changed(attribute, layer, lambda: None)

    def begin(self, feature: str) -> int:
        """What follows is changed for ``feature``. Returns where the ledger stands now."""
        self._feature = feature
        return len(self._entries)

    @property
    def changes(self) -> list[Change]:
        """What is changed in oMLX now, in order: of one attribute, inner layers first."""
        return [entry.change for entry in self._entries]

    def wrapped(self, since: int = 0) -> list[str]:
        """Dotted names that are wrapped now, or were since a mark, in order."""
        return [e.change.attribute for e in self._entries[since:] if isinstance(e, _Wrap)]

    def undo(self, since: int = 0) -> list[str]:
        """Take back every change, or those since a mark, newest first.

        Returns the names that another tool has wrapped meanwhile.
        """
        left: list[str] = []
        while len(self._entries) > since:
            entry = self._entries.pop()
            if not entry.undo() and isinstance(entry, _Wrap):
                left.append(entry.attribute)
        if left:
            logger.warning(
                "admission: %s stays wrapped by another tool, not undone", ", ".join(left)
            )
        return left


def named(function: Callable[..., Any]) -> str:
    """A function of ours as it is shown; one that another one made, by its maker."""
    module = function.__module__.removeprefix("omlx_admission.")
    return f"{module}.{function.__qualname__.partition('.<locals>')[0]}"


def _dotted(parent: Any, attribute: str) -> str:
    if isinstance(parent, type):
        return f"{parent.__module__}:{parent.__qualname__}.{attribute}"
    return f"{parent.__name__}:{attribute}"


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
