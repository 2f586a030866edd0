"""One line of the exposure ledger: what was counted in a stretch of time, as JSON."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omlx_admission.gpu.policy.exposure import Cell, Record
from omlx_admission.gpu.policy.faults import GpuFault

SCHEMA = 1
"""Raised with every change that an older reader would misread, a new fault class too."""

_SERIALISED = {True: "on", False: "off"}


class Versions(NamedTuple):
    """What ran while a line was counted. Empty: unknown."""

    omlx: str = ""
    mlx: str = ""
    os: str = ""
    plugin: str = ""


@dataclass
class Line:
    """One line of the ledger: what was counted from ``start`` to ``end``."""

    versions: Versions = field(default_factory=Versions)
    record: Record = field(default_factory=Record)
    start: float = 0.0
    """Seconds since 1970, as is ``end``."""
    end: float = 0.0
    starts: int = 0
    """Processes that began; those that did not ``stop`` were killed, crashed or still run.
    Metal often ends a process itself, and then no fault is reported by anybody."""
    stops: int = 0
    dropped: int = 0
    """Unreadable lines that a compaction left out."""

    def add(self, other: Line) -> None:
        """Add ``other``; versions that differ become ``several``."""
        self.versions = Versions(
            *(
                mine if mine == theirs else "several"
                for mine, theirs in zip(self.versions, other.versions, strict=True)
            )
        )
        self.record.add(other.record)
        self.start = min(self.start, other.start)
        self.end = max(self.end, other.end)
        self.starts += other.starts
        self.stops += other.stops
        self.dropped += other.dropped


def system_version() -> str:
    """The operating system as the ledger names it, for example ``macOS 26.1 arm64``."""
    mac = platform.mac_ver()[0] if sys.platform == "darwin" else ""
    name = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    return f"{name} {platform.machine()}".strip()


def _cell_key(cell: Cell) -> str:
    return f"{cell.busy}/{cell.long}/{_SERIALISED[cell.serialised]}"


def encode(line: Line) -> bytes:
    """``line`` as it stands in the file, newline included."""
    record = line.record
    data: dict[str, Any] = {
        "v": SCHEMA,
        "from": round(line.start, 1),
        "to": round(line.end, 1),
        **line.versions._asdict(),
    }
    for key in ("starts", "stops", "dropped"):
        if getattr(line, key):
            data[key] = getattr(line, key)
    data["seconds"] = {_cell_key(c): round(s, 3) for c, s in sorted(record.seconds.items())}
    if record.lockups:
        data["lockups"] = {_cell_key(c): n for c, n in sorted(record.lockups.items())}
    if record.faults:
        data["faults"] = [
            [fault.value, engine, _cell_key(cell), count]
            for (fault, engine, cell), count in record.faults.items()
        ]
    if record.engines:
        data["engines"] = [
            [engine, busy, _SERIALISED[serialised], round(seconds, 3)]
            for (engine, busy, serialised), seconds in record.engines.items()
        ]
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


class NewerSchemaError(ValueError):
    """The line was written by a newer omlx-admission: not ours to read, nor to drop."""


def decode(raw: bytes) -> Line:
    """The line that ``raw`` holds. ValueError says what is wrong with it."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    schema = data.get("v")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ValueError("no schema version")
    if schema > SCHEMA:
        raise NewerSchemaError(f"schema {schema}, written by a newer omlx-admission")
    try:
        return Line(
            versions=Versions(*(_text(data.get(key, "")) for key in Versions._fields)),
            record=Record(
                seconds={_cell(k): _seconds(s) for k, s in data["seconds"].items()},
                lockups={_cell(k): _count(n) for k, n in data.get("lockups", {}).items()},
                faults={
                    (GpuFault(fault), _text(engine), _cell(cell)): _count(count)
                    for fault, engine, cell, count in data.get("faults", [])
                },
                engines={
                    (_text(engine), _busy(busy), _on(on)): _seconds(seconds)
                    for engine, busy, on, seconds in data.get("engines", [])
                },
            ),
            start=_seconds(data["from"]),
            end=_seconds(data["to"]),
            starts=_count(data.get("starts", 0)),
            stops=_count(data.get("stops", 0)),
            dropped=_count(data.get("dropped", 0)),
        )
    except KeyError as error:
        raise ValueError(f"no {error}") from None
    except (AttributeError, TypeError):
        raise ValueError("a field has the wrong shape") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    number = float(value) if abs(value) < 1e15 else math.inf
    if not 0.0 <= number < math.inf:
        raise ValueError("a number out of range")
    return number


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    if not 0 <= value < 10**12:
        raise ValueError("a count out of range")
    return value


def _busy(value: object) -> int:
    if _count(value) not in (0, 1, 2):
        raise ValueError("a number of engines other than 0, 1 and 2")
    return _count(value)


def _on(value: object) -> bool:
    if value not in ("on", "off"):
        raise ValueError("a state other than on and off")
    return value == "on"


def _cell(key: str) -> Cell:
    busy, long, on = key.split("/") if key.count("/") == 2 else ("", "", "")
    if busy not in ("0", "1", "2") or long not in ("0", "1", "2"):
        raise ValueError("circumstances other than N/N/on or N/N/off")
    return Cell(int(busy), int(long), _on(on))
