"""How the stock routes answer what the pool throws at them (``probes/routes.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
MAPPED = {
    "not found": [404, None],
    "too large": [507, None],
    "no room": [507, None],
    "unavailable": [409, None],
    "loading": [409, None],
    "busy": [409, None],
    "other of the pool": [500, None],
}

#: 4.2: what goes over the wire while nothing else does; Responses have no chunk.
KEEPALIVES = {
    "openai_chat": 'data: {"id":"chatcmpl-keepalive","object":"chat.completion.chunk",'
    '"created":0,"model":"keepalive","choices":[{"index":0,'
    '"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    "openai_completion": 'data: {"id":"cmpl-keepalive","object":"text_completion",'
    '"created":0,"model":"keepalive","choices":[{"index":0,"text":"","logprobs":null,'
    '"finish_reason":null}]}\n\n',
    "anthropic": 'event: ping\ndata: {"type":"ping"}\n\n',
    "openai_responses": None,
}

ALL = (*MAPPED, "queue full", "own queue full", "with header", "unknown")

STORIES: list[tuple[str, str, Any]] = [
    (
        "4.2, 4.3: a Retry-After of ours would be dropped",
        "status_of_each_error",
        {
            **MAPPED,
            "queue full": [503, "1"],
            "own queue full": [503, "1"],
            "with header": [503, None],
            "unknown": [500, None],
        },
    ),
    (
        "4.3: one body for all routes, Anthropic's too",
        "every_route_maps_alike",
        {
            f"{path} {stream}": [507, ["code", "message", "param", "type"], "server_error"]
            for path in (*TEXT_ROUTES, "/v1/embeddings")
            for stream in (False, True)
        },
    ),
    (
        "4.2: whatever happens to the fallback",
        "failed_fallback_is_a_404",
        {"status": 404, "asked": ["m", "default"]},
    ),
    ("4.2", "unknown_name_without_fallback", {"status": 404, "asked": ["m"]}),
    (
        "4.2: everything the pool does not own is 500",
        "public_load_route",
        {
            **MAPPED,
            "queue full": [500, None],
            "own queue full": [500, None],
            "with header": [500, None],
            "unknown": [500, None],
        },
    ),
    (
        "4.2",
        "admin_load_route",
        {name: [500, ["detail"]] for name in ALL},
    ),
    ("1.4", "public_unload_takes_no_lock", {"status": 200, "unloaded": ["m"]}),
    (
        "1.8, 4.2: no lease, and 500 for all but 404",
        "audio_route",
        {
            **{name: [500, False] for name in ALL},
            "not found": [404, False],
        },
    ),
    (
        "1.8",
        "text_routes_take_a_lease",
        {**{path: [True] for path in TEXT_ROUTES}, "/v1/embeddings": [False]},
    ),
    (
        "4.2: the second refusal comes after the 200",
        "embeddings_acquire_twice",
        {
            "status": 200,
            "leases": [False, True],
            "first byte": " ",
            "whole": False,
            "json": False,
        },
    ),
    (
        "4.2",
        "wrong_kind_of_model_gives_its_lease_back",
        {"status": 400, "released": ["m"]},
    ),
    ("4.4", "client_that_left_is_waited_for", {"waiting": True, "status": 409}),
    ("8", "keys", {"none": 401, "wrong": 401, "bearer": 409, "x-api-key": 409}),
    (
        "8",
        "paths_outside_the_api_have_plain_bodies",
        {"status": 401, "body": ["detail"]},
    ),
    ("4.2", "json_body_starts_with_a_space", [" ", "{}"]),
    (
        "4.2",
        "json_body_is_cut_off_by_an_error",
        {"chunks": [" "], "raised": "RuntimeError"},
    ),
    (
        "4.3",
        "stream_starts_with_a_keepalive_and_reports_errors",
        {"first": True, "frames": "data: 1\n\n", "error": True, "end": True},
    ),
    (
        "4.2",
        "keepalives_by_mode",
        {
            "chunk": KEEPALIVES,
            "comment": dict.fromkeys(KEEPALIVES, ": keep-alive\n\n"),
            "off": dict.fromkeys(KEEPALIVES),
        },
    ),
    ("4.2: with the stream's own id", "chat_keepalive_with_an_id", True),
    ("2.1", "lease_is_released_before_the_last_frame", ["frame", "released", "end"]),
]


@pytest.mark.parametrize(
    ("section", "story", "expected"), STORIES, ids=[name for _, name, _ in STORIES]
)
def test_story(target: Any, home: Path, section: str, story: str, expected: Any) -> None:
    assert target.probe("routes.py", home)[story] == expected


def test_every_story_is_told(target: Any, home: Path) -> None:
    assert set(target.probe("routes.py", home)) == {story for _, story, _ in STORIES}
