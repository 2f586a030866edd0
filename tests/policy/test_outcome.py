"""The soak's judge: what it lets pass, and each promise broken once."""

from __future__ import annotations

import json

import pytest

from benchmarks.mix import CEILING_GB, Mix, left_behind
from benchmarks.outcome import FAILING, NEVER, NORMAL, Record, judge, overtaken
from standin.server import Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

ERROR = {"error": {"message": "busy", "type": "server_error"}}
ANTHROPIC = {"type": "error", **ERROR}
SHORT = {"choices": [{"finish_reason": "length"}]}
PIECE = 'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}\n\n'
DONE = "data: [DONE]\n\n"
CAUSE = f"data: {json.dumps(ERROR)}\n\n"
BEGUN = PIECE + CAUSE + DONE


def record(
    status: int = 200,
    body: object = SHORT,
    *,
    path: str = CHAT,
    stream: bool = False,
    after: str | None = None,
    content: float | None = None,
) -> Record:
    made = Record(0, "client", path, "a", stream, 8, 100.0, status, ended=101.0)
    made.body = body if isinstance(body, str) else json.dumps(body)
    made.headers = {} if after is None else {"retry-after": after}
    made.content = content
    return made


@pytest.mark.parametrize(
    ("seen", "model", "cut", "outcome"),
    [
        (record(), NORMAL, False, "200"),
        (record(body=PIECE + DONE, stream=True, content=100.5), NORMAL, False, "200"),
        (record(503, ERROR, after="3"), NORMAL, False, "503"),
        (
            record(503, {"type": "error", **ERROR}, path=MESSAGES, after="3"),
            NORMAL,
            False,
            "503",
        ),
        (record(507, ERROR), NEVER, False, "507"),
        (record(500, ERROR), FAILING, False, "500"),
        (record(body=CAUSE + DONE, stream=True), NORMAL, False, "error event"),
        (
            record(body=PIECE + CAUSE + DONE, stream=True, content=1.0),
            NORMAL,
            True,
            "error event",
        ),
        (record(body=ERROR), NORMAL, True, "error event"),
    ],
)
def test_right_outcomes(seen: Record, model: str, cut: bool, outcome: str) -> None:
    assert judge(seen, model, cut) == (outcome, None)


@pytest.mark.parametrize(
    ("seen", "model", "wrong"),
    [
        (record(body='{"choices": ['), NORMAL, "not whole"),
        (record(body=PIECE, stream=True), NORMAL, "without its terminator"),
        (record(body={"choices": [{"finish_reason": "abort"}]}), NORMAL, "not all tokens"),
        (record(body=ERROR), NORMAL, "in the middle"),
        (record(body=BEGUN, stream=True, content=1.0), NORMAL, "in the middle"),
        (record(503, ERROR), NORMAL, "Retry-After None"),
        (record(503, ERROR, after="0"), NORMAL, "Retry-After '0'"),
        (record(503, {"detail": "busy"}, after="3"), NORMAL, "no error of its route"),
        (record(503, ERROR, path=MESSAGES, after="3"), NORMAL, "Anthropic"),
        (record(503, ERROR, after="3"), NEVER, "can never fit"),
        (record(507, ERROR), NORMAL, "507 for a model that fits"),
        (record(507, ERROR, after="3"), NEVER, "507 with a Retry-After"),
        (record(500, ERROR), NORMAL, "status 500"),
        (record(404, ERROR), NORMAL, "status 404"),
        (record(), FAILING, "200 of a model"),
    ],
)
def test_broken_promises(seen: Record, model: str, wrong: str) -> None:
    found = judge(seen, model)[1]
    assert found is not None
    assert wrong in found


def test_anthropic_s_error_told_as_text_is_no_answer() -> None:
    text = (
        'event: content_block_delta\ndata: {"text": "[Error: cut]"}\n\nevent: message_stop\n\n'
    )
    seen = record(body=text, path=MESSAGES, stream=True, content=100.5)
    assert judge(seen)[1] == "an error in the middle of the answer"


def test_a_client_that_left_itself_and_one_that_lost_its_connection() -> None:
    gone = record(0, "")
    gone.left = "left"
    assert judge(gone) == ("left", None)
    lost = record(0, "")
    lost.broken = "ReadError"
    assert judge(lost) == ("broken", "ReadError")


def test_who_was_overtaken() -> None:
    def at(started: float, content: float | None, status: int = 200) -> Record:
        made = record(status, content=content)
        made.started = started
        return made

    assert overtaken([]) == 0
    assert overtaken([at(1, 5), at(2, 6), at(3, 7)]) == 0
    # The first is overtaken by two; a refusal takes part in no order.
    assert overtaken([at(1, 9), at(2, 6), at(3, 7), at(4, 5, 503)]) == 2


STATUS = {
    "queue": {"waiting": 0},
    "swap": None,
    "beside": None,
    "health": {"ok": True},
    "models": [{"model": "a", "leases": 0, "busy": False, "state": "resident"}],
}


def test_nothing_is_left_behind() -> None:
    assert left_behind(STATUS) == []
    lease = {"model": "a", "leases": 1, "busy": True, "state": "draining"}
    left = left_behind(
        {**STATUS, "queue": {"waiting": 2}, "swap": {"target": "b"}, "models": [lease]}
    )
    assert len(left) == 4


def test_the_ceiling_that_a_load_was_decided_under() -> None:
    server = Server.__new__(Server)
    mix = Mix(server, 1)
    mix._ceilings = [(0.0, CEILING_GB), (10.0, 1.0), (20.0, CEILING_GB), (30.0, 0.9)]
    assert mix._ceiling_since(5.0) == CEILING_GB
    assert mix._ceiling_since(12.0) == CEILING_GB
    assert mix._ceiling_since(31.0) == 0.9
