"""Ending the process at once, for a supervisor to restart."""

from __future__ import annotations

import faulthandler
import logging
import os
from typing import NoReturn

logger = logging.getLogger(__name__)

FATAL_EXIT_CODE = 70
#: Seconds a teardown step may take on an engine's thread.
FATAL_TEARDOWN_TIMEOUT_S = 60.0


def fatal_exit(reason: str, exit_code: int = FATAL_EXIT_CODE) -> NoReturn:
    """Log, dump every thread's stack, and end the process without cleanup."""
    logger.critical("%s: ending the process", reason)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(exit_code)
