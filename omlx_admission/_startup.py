"""What the ``.pth`` line calls in every process of the environment.

It has to be nearly free (pip, pytest and every worker pay for it), so it
imports only ``os`` and ``sys``, which the interpreter already holds, and puts
one finder in front of ``sys.meta_path``. The finder waits for the name
``omlx``; everything else, wrapt included, is imported only then.

In a virtual environment ``site`` runs the line twice per process; ``main`` is
therefore idempotent. It never raises: an exception here would be printed at
the start of every Python process of the environment.
"""

import os
import sys

#: Words that switch a variable off; shared with ``settings`` so that both agree.
OFF_WORDS = frozenset({"0", "false", "off", "no"})

_started = False


class OmlxFinder:
    """Meta-path finder that registers the hooks when ``omlx`` is first imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return the real spec of ``omlx``, None for every other name."""
        if name != "omlx":
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from omlx_admission.hooks import install

            install.register()
        except Exception as error:  # noqa: BLE001 - oMLX must start whatever happens here
            sys.stderr.write(f"omlx-admission: not active, oMLX runs stock: {error!r}\n")
        # The import system is walking a copy of meta_path: returning None would
        # skip the finder that register() has just put in front of it.
        from importlib.util import find_spec

        return find_spec(name)


def started() -> bool:
    """Whether the line ran in this process."""
    return _started


def main() -> None:
    """Wait for ``omlx`` unless ``OMLX_ADMISSION`` is off or the wait is on already."""
    global _started
    if _started:
        return
    _started = True
    if os.environ.get("OMLX_ADMISSION", "1").strip().lower() in OFF_WORDS:
        return
    sys.meta_path.insert(0, OmlxFinder())
