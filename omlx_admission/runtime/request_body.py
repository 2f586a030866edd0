"""The top level of a JSON request body, noted while the application reads it.

Whether a request streams is one word of its body, and only a request that waits
long is ever asked for it. So a body costs nothing while it is small: its pieces
are the very objects that the application gets. A large one would be kept twice
that way; it is boiled down, piece by piece, to what stands at its top level.
"""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping
from typing import Any

#: Bytes of a body up to which its pieces are kept as they are.
KEEP = 1 << 20

#: Bytes of a string at the top level beyond which it counts as empty.
_LONGEST = 256

#: Bytes of a top level beyond which the body is given up: no API has so many fields.
_WIDEST = 1 << 16

_OUTSIDE = re.compile(rb'[^"{}\[\]]*+')
_QUOTE, _BACKSLASH = b'"\\'
_OPEN = frozenset(b"{[")


class TopLevel:
    """One JSON object that comes in pieces, cut anywhere: its fields but nested ones.

    An object or array in it counts as 0, a long string as an empty one.
    """

    def __init__(self) -> None:
        self._found = bytearray()
        self._string = bytearray()
        self._depth = 0
        self._inside = False
        self._escaped = False

    def feed(self, piece: bytes) -> None:
        """Take the next piece; one that is no JSON is taken as well."""
        at, end = 0, len(piece)
        while at < end and len(self._found) <= _WIDEST:
            at = self._in_string(piece, at) if self._inside else self._between(piece, at)

    def fields(self) -> dict[str, Any]:
        """The fields found; empty where the body is no JSON object."""
        try:
            found = json.loads(bytes(self._found))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _in_string(self, piece: bytes, at: int) -> int:
        # Behind a backslash at the end of the piece before, the first byte means nothing.
        start = at + self._escaped
        stop = _end_of_string(piece, start)
        if self._depth == 1:
            room = _LONGEST + 1 - len(self._string)
            self._string += piece[at : min(stop, at + room)]
        if stop == len(piece):
            self._escaped = _is_escaped(piece, start, stop)
            return stop
        self._escaped = self._inside = False
        if self._depth == 1:
            if len(self._string) > _LONGEST:
                self._string.clear()
            self._found += b'"' + self._string + b'"'
            self._string.clear()
        return stop + 1

    def _between(self, piece: bytes, at: int) -> int:
        match = _OUTSIDE.match(piece, at)
        assert match is not None
        stop = match.end()
        if self._depth == 1:
            self._found += piece[at:stop]
        if stop == len(piece):
            return stop
        mark = piece[stop]
        if mark == _QUOTE:
            self._inside = True
        elif mark in _OPEN:
            self._depth += 1
            if self._depth == 1:
                self._found.append(mark)
            elif self._depth == 2:
                self._found += b"0"
        else:
            if self._depth == 1:
                self._found.append(mark)
            self._depth -= 1
        return stop + 1


def _end_of_string(piece: bytes, start: int) -> int:
    """Where the string that goes on at ``start`` has its closing quote; the length if nowhere.

    By search and not by a pattern: most of a large body is one image.
    """
    at = piece.find(b'"', start)
    while at >= 0 and _is_escaped(piece, start, at):
        at = piece.find(b'"', at + 1)
    return len(piece) if at < 0 else at


def _is_escaped(piece: bytes, start: int, at: int) -> bool:
    """Whether an odd number of backslashes stands before ``at``."""
    first = at
    while first > start and piece[first - 1] == _BACKSLASH:
        first -= 1
    return (at - first) % 2 == 1


class Body:
    """The body of one request, as far as it has been read."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._top: TopLevel | None = None

    def add(self, message: MutableMapping[str, Any]) -> None:
        """Note one message that the application reads."""
        piece = message.get("body", b"")
        if not piece:
            return
        if self._top is not None:
            self._top.feed(piece)
            return
        self._size += len(piece)
        self._pieces.append(piece)
        if self._size > KEEP:
            self._boil_down()

    def fields(self) -> dict[str, Any]:
        """The fields of the object that the body is; see :class:`TopLevel`."""
        return (self._top or self._boil_down()).fields()

    def _boil_down(self) -> TopLevel:
        self._top = top = TopLevel()
        for piece in self._pieces:
            top.feed(piece)
        self._pieces.clear()
        return top
