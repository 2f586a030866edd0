"""What a request is told: failed loads, wrong kinds, and nothing of an earlier refusal."""

from __future__ import annotations

import asyncio

import pytest

from omlx_admission.core import route_model_kinds as kinds
from omlx_admission.hooks.pool.port import admission_refused

from .conftest import House, Make, refused, request_to, settle, soon, within

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("features", [None, {"queue", "errors"}, {"resident", "errors"}])
@pytest.mark.parametrize("cause", ["damaged file", "no tokenizer, no context_length"])
async def test_b50_b51_a_failed_load_is_no_conflict_and_not_tried_again(
    make_house: Make, features: set[str] | None, cause: str
) -> None:
    house = make_house(features=features)
    house.fail["b"] = RuntimeError(cause)
    for _ in range(2):
        request = request_to(CHAT)
        with within(request), pytest.raises(house.module.ModelUnavailableError):
            await house.get("b")
        refusal = request.refusal
        assert (refusal.status, refusal.code) == (500, "model_load_failed")
        assert refusal.headers() == [(b"x-should-retry", b"false")]
        assert "'b'" in refusal.message
        # B27: a cause in such words would make agents delete their history.
        assert (cause in refusal.message) is (cause == "damaged file")
        assert "token" not in refusal.message
        assert "context" not in refusal.message
    assert house.events.count("load b") == 1
    house.assert_idle()


async def test_an_unknown_model_stays_a_404(house: House) -> None:
    request = request_to(CHAT)
    with within(request), pytest.raises(house.module.ModelNotFoundError):
        await house.get("nobody")
    assert request.refusal is None


async def test_an_earlier_refusal_is_forgotten_when_the_request_gets_a_model(
    make_house: Make,
) -> None:
    """It goes on with that model; if it fails later, then for another reason."""
    house = make_house(max_wait_s=0.0)
    await house.get("a")
    request = request_to(CHAT)
    with within(request):
        await refused(house.get("b"))
        await house.get("a")
        assert request.refusal is None
        await house.release("a")
    await house.release("a")


async def test_a_wrong_kind_is_said_before_anything_moves(make_house: Make) -> None:
    house = make_house(max_age_s=0.0)
    await house.get("a")
    request = request_to("/v1/embeddings")
    with within(request), pytest.raises(admission_refused(), match="is a text model"):
        await house.get("b", lease=False)
    assert (request.refusal.status, request.refusal.code) == (400, "wrong_model_kind")
    assert house.entry("a").pending_unload_reason is None
    await house.ends_idle("a")
    # A route that only loads, and a caller that is no request, take any kind.
    request = request_to("/v1/models/b/load")
    await house.get("b", lease=False, by=request)
    request.end()
    await soon(house.ask("a", lease=False))
    assert house.events.count("load b") == 1


async def test_with_stock_answers_the_kind_is_stock_s_to_judge(make_house: Make) -> None:
    house = make_house(errors=False)
    request = request_to("/v1/embeddings")
    loading = house.ask("b", lease=False, by=request)
    await loading
    await settle()
    assert house.resident() == {"b"}
    request.end()
    await asyncio.sleep(0)
    house.assert_idle()


@pytest.mark.parametrize(
    ("path", "kind", "refused"),
    [
        (CHAT, "batched", False),
        (CHAT, "vlm", False),
        (CHAT, "embedding", True),
        ("/v1/messages/count_tokens", "reranker", True),
        ("/v1/rerank", "embedding", True),
        ("/v1/audio/speech", "audio_stt", True),
        ("/v1/audio/speech", "audio_tts", False),
        ("/v1/audio/transcriptions/realtime", "audio_stt", False),
        ("/v1/models/x/load", "embedding", False),
        (CHAT, "something new", False),
    ],
)
def test_kinds(path: str, kind: str, refused: bool) -> None:
    class Entry:
        model_id = "x"
        engine_type = kind

    refusal = kinds.refusal(path, Entry)
    assert (refusal is not None) is refused
    if refusal is not None:
        assert not {"prompt", "context", "token"} & set(refusal.message.split())
        assert "token" not in refusal.message
