"""Options that every suite shares: which real oMLX to test against, and with which Python."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import hypothesis
import pytest

import omlx_admission
from omlx_admission import _startup

_HERE = Path(__file__).resolve().parents[1]

# The installed .pth line has run in this process too; here each test applies and
# undoes the hooks itself.
sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _startup.OmlxFinder)]

# A busy machine is no failure, and the same tests are the same each time.
hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--omlx-src`` may be given more than once."""
    group = parser.getgroup("omlx", "real oMLX")
    group.addoption(
        "--omlx-src",
        action="append",
        default=[],
        metavar="DIR",
        help="checkout of a real oMLX to test against as well",
    )
    group.addoption(
        "--omlx-native",
        action="append",
        default=[],
        metavar="DIR",
        help="checkout with the changes of patches/ in it: the live scenarios run on it "
        "without this package",
    )
    group.addoption(
        "--omlx-python",
        default=None,
        metavar="PATH",
        help="Python that has what that oMLX needs (default: the running one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a folder that holds no oMLX, and another checkout's package."""
    # Where the package is installed, its .pth line imported it before pytest set the path.
    imported = Path(omlx_admission.__file__).resolve().parents[1]
    if imported != _HERE:
        raise pytest.UsageError(
            f"the package is imported from {imported}: to test {_HERE} set PYTHONPATH to it"
        )
    for option in ("--omlx-src", "--omlx-native"):
        for source in config.getoption(option):
            if not (Path(source) / "omlx" / "engine_pool.py").is_file():
                raise pytest.UsageError(f"{option} {source}: no omlx/engine_pool.py in it")


def pytest_collection_finish() -> None:
    """Leave what is there by now out of each later collection.

    oMLX collects garbage several times at an unload, and pytest with all tests imported
    has millions of objects that are none.
    """
    gc.collect()
    gc.freeze()
