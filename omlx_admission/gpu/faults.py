"""What a Metal command buffer's error text says went wrong.

MLX turns a failed command buffer into a ``RuntimeError`` whose text is
``[METAL] Command buffer execution failed: <description> (<code>:<name>)``
(``check_error`` in MLX's Metal back end). Description, code and name come from the
driver; Apple does not document them. The strings below were collected from public
threads, among them oMLX issues 1387 (ImpactingInteractivity), 2029 (Timeout), 3289
(SubmissionsIgnored from the Neural Engine path, with a name), 3702 (Hang; InnocentVictim
without a name, only ``Code=5``), MLX pull request 479 (OutOfMemory, with and without
code), llama.cpp issue 12277, flutter issue 155538 (PageFault, SubmissionsIgnored) and
MoltenVK issue 831 (the older ``IOAF code N`` form).

Only an exception's own text is read, and only where it *starts* as Metal's errors
start: an exception that merely quotes a prompt holding such a string is not a fault.
Nor is one that is no ``RuntimeError``, the only type MLX raises for this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum


class GpuFault(StrEnum):
    """Why the driver failed a command buffer. The value is the name in logs and files."""

    HANG = "Hang"
    """This buffer hung the GPU, which was then reset (code 3)."""
    TIMEOUT = "Timeout"
    """This buffer ran longer than the driver allows (code 2)."""
    PAGE_FAULT = "PageFault"
    """This buffer touched memory the GPU cannot reach (code 11)."""
    INTERACTIVITY = "ImpactingInteractivity"
    """The system stopped this buffer because it kept the display waiting (code 14)."""
    SUBMISSIONS_IGNORED = "SubmissionsIgnored"
    """The driver refuses this process from now on (code 4): only a restart helps."""
    INNOCENT_VICTIM = "InnocentVictim"
    """Discarded because another buffer, perhaps of another process, failed (code 5)."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The GPU had no memory for this buffer (code 8)."""

    @property
    def is_lockup(self) -> bool:
        """True for the classes that count as a lockup in the exposure statistics.

        Victims and refused submissions follow from a lockup already counted (or from
        another process), and lack of memory is not a lockup.
        """
        return self in _LOCKUPS


_LOCKUPS = frozenset(
    {GpuFault.HANG, GpuFault.TIMEOUT, GpuFault.PAGE_FAULT, GpuFault.INTERACTIVITY}
)

# Looked for in this order, so that a text holding several (an error and what followed
# from it) is classified by what must be acted on: refusal first, then the cause, and
# the victim last.
_ORDER: tuple[tuple[GpuFault, str, int, str], ...] = (
    # class, driver's name, driver's code, description
    (GpuFault.SUBMISSIONS_IGNORED, "SubmissionsIgnored", 0x4, "prior/excessive GPU errors"),
    (GpuFault.HANG, "Hang", 0x3, "Caused GPU Hang"),
    (GpuFault.TIMEOUT, "Timeout", 0x2, "Caused GPU Timeout"),
    (GpuFault.PAGE_FAULT, "PageFault", 0xB, "Caused GPU Address Fault"),
    (GpuFault.INTERACTIVITY, "ImpactingInteractivity", 0xE, "Impacting Interactivity"),
    (GpuFault.OUT_OF_MEMORY, "OutOfMemory", 0x8, "Insufficient Memory"),
    (GpuFault.INNOCENT_VICTIM, "InnocentVictim", 0x5, "victim of GPU error"),
)

# Where a genuine text begins. Whatever an exception quotes comes after words of its own.
_HEAD = re.compile(
    r"""\s*(?:
        \[METAL\]\s*Command\ buffer                         # MLX
      | (?:ANE|Metal)\ [\w ]{1,60}\ command\ buffer\ failed # oMLX's Neural Engine path
      | Execution\ of\ the\ command\ buffer\ was\ aborted   # Metal's own log line
      | Error\ Domain=MTLCommandBufferError                 # an NSError's description
      | (?:Caused\ GPU|Discarded|Ignored|Impacting\ Interactivity|Insufficient\ Memory)
        [^\n]{0,60}\((?:[0-9a-fA-F]{8}:|IOAF)               # the description alone
      | kIO(?:GPU|Accel)CommandBufferCallbackError          # the name alone
    )""",
    re.VERBOSE,
)
_NAME = re.compile(r"kIO(?:GPU|Accel)CommandBufferCallbackError\s?(\w+)")
_CODE = re.compile(r"\((?:([0-9a-fA-F]{8}):|IOAF code (\d+)\))")
_LIMIT = 4000  # characters read; a description is far shorter
_DEPTH = 16  # exceptions followed in a chain


def classify_text(text: str) -> GpuFault | None:
    """The fault that ``text``, an exception's or the driver's own, reports, or None.

    Never give it a prompt, a completion or a request: it cannot tell who wrote a text,
    only that the text starts as Metal's errors do.
    """
    if _HEAD.match(text) is None:
        return None
    text = text[:_LIMIT]
    names = set(_NAME.findall(text))
    codes = {int(a, 16) if a else int(b) for a, b in _CODE.findall(text)}
    for fault, name, code, description in _ORDER:
        if name in names or code in codes or description in text:
            return fault
    return None


def classify(error: BaseException) -> GpuFault | None:
    """The GPU fault that ``error``, or an exception it was raised from, reports.

    Follows ``__cause__``, an unsuppressed ``__context__`` and the members of exception
    groups. Returns None for everything else. Never raises.
    """
    found: set[GpuFault] = set()
    for member in _chain(error):
        if not isinstance(member, RuntimeError):
            continue
        try:
            text = str(member)
        except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error itself
            continue
        fault = classify_text(text)
        if fault is not None:
            found.add(fault)
    return next((fault for fault, *_ in _ORDER if fault in found), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue and len(seen) < _DEPTH:
        member = queue.pop(0)
        if id(member) in seen:
            continue
        seen.add(id(member))
        yield member
        if isinstance(member, BaseExceptionGroup):
            queue.extend(member.exceptions)
        if member.__cause__ is not None:
            queue.append(member.__cause__)
        elif member.__context__ is not None and not member.__suppress_context__:
            queue.append(member.__context__)
