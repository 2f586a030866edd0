"""What a refusal says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlx_admission.core.refusal import LONGEST_RETRY_S, retry_after


@given(st.floats(min_value=0, max_value=1e9))
def test_retry_after_is_whole_bounded_and_never_early(seconds: float) -> None:
    value = retry_after(seconds)
    assert isinstance(value, int)
    assert 1 <= value <= LONGEST_RETRY_S
    assert value >= min(seconds, LONGEST_RETRY_S)
