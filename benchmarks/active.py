"""A pytest plugin: the package active in a test run of oMLX's own.

The line in ``site-packages`` does the same where the package is installed; this one
works from a checkout as well, and ends the run where nothing was applied: a run without
the package would pass as one with it.
"""

from __future__ import annotations

import pytest

from omlx_admission import _startup

_startup.main()


def applied() -> list[str]:
    """Features that were applied in this process."""
    from omlx_admission.hooks import install

    report = install.current()
    verdicts = report.verdicts if report is not None else []
    return [v.feature.name for v in verdicts if v.state is install.State.APPLIED]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that was to be with the package and was not."""
    if not applied():
        session.exitstatus = 4


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was applied."""
    terminalreporter.write_line(f"omlx-admission applied: {', '.join(applied()) or 'nothing'}")
