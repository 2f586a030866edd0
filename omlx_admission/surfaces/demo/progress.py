"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO


class Progress:
    """Plain lines, each with the seconds since the start; a context manager."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def step(self, text: str) -> None:
        """The next of ``total`` steps begins."""
        self._done += 1
        self._line(f"({self._done}/{self._total}) {text}")

    def event(self, text: str) -> None:
        """Something happened within the step."""
        self._line(f"    {text}")

    def _line(self, text: str) -> None:
        print(f"{self.seconds:6.1f} s  {text}", file=self._stream, flush=True)


class BarProgress(Progress):
    """The same through rich: events scroll by above one bar."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        super().__init__(total, stream)
        self._bar: Any = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away, so that what follows starts on a clean line."""
        self._bar.stop()

    def step(self, text: str) -> None:
        """See :class:`Progress`."""
        self._bar.update(self._task, completed=self._done, description=text.split(": ")[0])
        super().step(text)

    def _line(self, text: str) -> None:
        # Nothing in a text is markup: models may be named "[a]".
        self._bar.console.print(f"{self.seconds:6.1f} s  {text}", markup=False, highlight=False)


def make(total: int, stream: TextIO | None = None) -> Progress:
    """A bar where there is a terminal and rich, plain lines otherwise."""
    stream = stream or sys.stderr
    if stream.isatty():
        try:
            return BarProgress(total, stream)
        except ImportError:
            pass
    return Progress(total, stream)
