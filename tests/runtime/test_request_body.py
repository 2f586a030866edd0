"""What is noted of a body: its top level, whatever its size and wherever it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omlx_admission.runtime import request_body
from omlx_admission.runtime.request_body import Body, TopLevel

TEXT = st.text(st.sampled_from('ab"\\{}[]:,stream \n\u00e9\u2028\U0001f600'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.just("stream") | TEXT, VALUES, max_size=5)


def flat(content: dict[str, Any]) -> dict[str, Any]:
    return {k: 0 if isinstance(v, dict | list) else v for k, v in content.items()}


@given(OBJECTS, st.lists(st.integers(0, 400), max_size=6), st.booleans(), st.booleans())
@example({"a": 'x\\"stream": true', "stream": True}, [], True, False)
@example({"tool": {"input": {"stream": True}}, "n": [{"stream": True}]}, [7], False, True)
def test_the_top_level_is_the_parsers(
    content: dict[str, Any], cuts: list[int], plain: bool, spaced: bool
) -> None:
    whole = json.dumps(content, ensure_ascii=plain, indent=2 if spaced else None).encode()
    top = TopLevel()
    at = 0
    for cut in [*sorted(min(c, len(whole)) for c in cuts), len(whole)]:
        top.feed(whole[at:cut])
        at = cut
    assert top.fields() == flat(content)


def test_it_may_be_cut_anywhere() -> None:
    nested = [{"b": ']}\\"'}]
    content = {"a": 'x\\"', "\\": nested, "stream": True, "é\n": "\\\\"}
    whole = json.dumps(content).encode()
    for cut in range(len(whole)):
        top = TopLevel()
        top.feed(whole[:cut])
        top.feed(whole[cut:])
        assert top.fields() == flat(content), whole[:cut]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"stream"', b"}{", b"\\", b'{"stream":tru', b"]]]" * 9]
)
def test_what_is_no_object_has_no_fields(body: bytes) -> None:
    top = TopLevel()
    top.feed(body)
    assert top.fields() == {}


def message(body: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": True}


def test_a_small_body_is_kept_as_it_came() -> None:
    body, pieces = Body(), [b'{"model": "b", "str', b'eam": true}']
    for piece in pieces:
        body.add(message(piece))
    assert all(kept is piece for kept, piece in zip(body._pieces, pieces, strict=True))
    assert body.fields() == {"model": "b", "stream": True}


def test_a_large_body_is_not_kept() -> None:
    image = b"A" * 65_536
    body = Body()
    body.add(message(b'{"messages": [{"stream": false, "image": "'))
    for _ in range(2 * request_body.KEEP // len(image)):
        body.add(message(image))
    body.add(message(b'"}], "note": "' + image))
    body.add(message(b'", "stream": true}'))
    assert body._pieces == []
    assert body._top is not None
    assert len(body._top._found) + len(body._top._string) < 1000
    assert body.fields() == {"messages": 0, "note": "", "stream": True}


def test_a_top_level_without_end_is_given_up() -> None:
    top = TopLevel()
    top.feed(b"{")
    for _ in range(100):
        top.feed(b'"key": "value", ' * 1000)
    assert len(top._found) < 100_000
    assert top.fields() == {}
