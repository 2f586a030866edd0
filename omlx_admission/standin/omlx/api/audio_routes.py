"""Audio over HTTP. No route here takes a lease, and every refusal but 404 is a 500."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict

from ..exceptions import ModelNotFoundError

router = APIRouter()


def _get_engine_pool() -> Any:
    from omlx.server import _server_state

    if _server_state.engine_pool is None:
        raise HTTPException(status_code=503, detail="Server not initialized")
    return _server_state.engine_pool


def _resolve_model(model_id: str) -> str:
    from omlx.server import resolve_model_id

    return resolve_model_id(model_id) or model_id


async def _run(
    model: str, text: str, before: Callable[[], Awaitable[Any]] | None = None
) -> list[float]:
    pool, model_id = _get_engine_pool(), _resolve_model(model)
    try:
        engine = await pool.get_engine(model_id)
    except ModelNotFoundError as error:
        raise HTTPException(status_code=404, detail=str(error)) from error
    except Exception as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    if before is not None:
        await before()
    try:
        vector: list[float] = await engine.run(text)
    except Exception as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    return vector


class SpeechRequest(BaseModel):
    """``POST /v1/audio/speech``."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str


@router.post("/v1/audio/speech")
async def create_speech(request: SpeechRequest) -> dict[str, Any]:
    """Something made up for the text; real servers send audio."""
    vector = await _run(request.model, request.input)
    return {"object": "audio.speech", "samples": len(vector)}


@router.post("/v1/audio/transcriptions")
async def create_transcription(request: Request, model: str) -> dict[str, Any]:
    """Something made up for the upload, which is read after the engine is in hand.

    Takes the model as a query parameter and the audio as the plain body: a form
    would need a dependency that nothing else here has.
    """
    vector = await _run(model, "audio", before=request.body)
    return {"text": f"{len(vector)} values"}
