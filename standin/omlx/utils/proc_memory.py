"""The process's physical footprint as the kernel counts it on macOS."""

from __future__ import annotations

import ctypes
import os
import sys

_RUSAGE_INFO_V4 = 4
#: Position of the footprint in the structure, in 64-bit words: a 16-byte id and
#: seven counters come before it.
_FOOTPRINT_WORD = 9
_WORDS = 64


def get_phys_footprint(pid: int | None = None) -> int:
    """Bytes of physical footprint; 0 where the kernel has no such number (Linux)."""
    if sys.platform != "darwin":
        return 0
    words = (ctypes.c_uint64 * _WORDS)()
    library = ctypes.CDLL("/usr/lib/libproc.dylib")
    failed = library.proc_pid_rusage(pid or os.getpid(), _RUSAGE_INFO_V4, ctypes.byref(words))
    return 0 if failed else int(words[_FOOTPRINT_WORD])
