"""Whether an engine lives: looked at by everything that hands one out.

Fields are read from the object itself, none of it is computed: this is on the hot path.
"""

from __future__ import annotations

from typing import Any


def lives(engine: Any) -> bool:
    """Whether ``engine`` can serve: it is loaded, and its core's loop runs.

    A caller that is handed a stopped one starts it again, outside of all accounting;
    with one whose loop has ended, a request waits for ever.
    """
    fields = getattr(engine, "__dict__", None)
    if fields is None:
        return True
    if fields.get("_loaded") is False:
        return False
    running = fields.get("_engine")
    if running is None:
        return True
    core = getattr(running, "engine", None)
    return core is None or runs(core)


def runs(core: Any) -> bool:
    """Whether the loop of an engine's core has not ended, or not begun yet."""
    done = getattr(getattr(core, "_task", None), "done", None)
    return getattr(core, "_closed", None) is not True and (done is None or done() is not True)
