"""Audio over HTTP. No route here takes a lease, and every refusal but 404 is a 500."""

from __future__ import annotations

import asyncio
import contextlib
from email import message_from_bytes
from email.policy import HTTP
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict

from ..engine.sts import STSEngine
from ..engine.stt import STTEngine
from ..engine.tts import TTSEngine
from ..exceptions import ModelNotFoundError

router = APIRouter()

#: Without the dependency that checks keys: browsers send none with a WebSocket.
realtime_router = APIRouter()


def _get_engine_pool() -> Any:
    from omlx.server import _server_state

    if _server_state.engine_pool is None:
        raise HTTPException(status_code=503, detail="Server not initialized")
    return _server_state.engine_pool


def _resolve_model(model_id: str) -> str:
    from omlx.server import resolve_model_id

    return resolve_model_id(model_id) or model_id


async def _engine(model: str, kind: type, what: str) -> Any:
    pool, model_id = _get_engine_pool(), _resolve_model(model)
    try:
        engine = await pool.get_engine(model_id)
    except ModelNotFoundError as error:
        raise HTTPException(status_code=404, detail=str(error)) from error
    except Exception as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    if not isinstance(engine, kind):
        raise HTTPException(status_code=400, detail=f"Model '{model_id}' is not {what}")
    return engine


async def _run(engine: Any, text: str) -> list[float]:
    try:
        vector: list[float] = await engine.run(text)
    except Exception as error:
        raise HTTPException(status_code=500, detail=str(error)) from error
    return vector


async def _form(request: Request) -> dict[str, bytes]:
    """Fields of a form, read here: the usual parser is a dependency nothing else has."""
    head = f"Content-Type: {request.headers.get('content-type', '')}\r\n\r\n".encode()
    message = message_from_bytes(head + await request.body(), policy=HTTP)
    fields: dict[str, bytes] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        fields[str(name)] = bytes(part.get_payload(decode=True) or b"")
    return fields


async def _upload(request: Request) -> str:
    fields = await _form(request)
    missing = [name for name in ("file", "model") if name not in fields]
    if missing:
        raise HTTPException(status_code=422, detail=f"{missing[0]}: Field required")
    return fields["model"].decode()


class SpeechRequest(BaseModel):
    """``POST /v1/audio/speech``."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str


@router.post("/v1/audio/speech")
async def create_speech(request: SpeechRequest) -> Response:
    """Something made up for the text; real servers send audio."""
    engine = await _engine(request.model, TTSEngine, "a text-to-speech model")
    vector = await _run(engine, request.input)
    return Response(bytes(len(vector)), media_type="audio/wav")


@router.post("/v1/audio/transcriptions")
async def create_transcription(request: Request) -> dict[str, Any]:
    engine = await _engine(await _upload(request), STTEngine, "a speech-to-text model")
    vector = await _run(engine, "audio")
    return {"text": f"{len(vector)} values"}


@router.post("/v1/audio/process")
async def process_audio(request: Request) -> Response:
    """Something made up for the upload; real servers send audio."""
    engine = await _engine(await _upload(request), STSEngine, "an audio processing model")
    vector = await _run(engine, "audio")
    return Response(bytes(len(vector)), media_type="audio/wav")


@realtime_router.websocket("/v1/audio/transcriptions/realtime")
async def realtime_transcription(websocket: WebSocket) -> None:
    """One text for each frame of sound, until the client says stop or leaves.

    The model is handed out once, without a lease, and used for the whole session.
    """
    await websocket.accept()

    async def reject(detail: str) -> None:
        with contextlib.suppress(Exception):
            await websocket.send_json({"type": "error", "detail": detail})
            await websocket.close(code=1008)

    try:
        start = await asyncio.wait_for(websocket.receive_json(), timeout=10.0)
    except WebSocketDisconnect:
        return
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        await reject("Invalid handshake message")
        return
    if not isinstance(start, dict) or start.get("type") != "start" or not start.get("model"):
        await reject("The first message must be of type start and name a model")
        return
    model = str(start["model"])
    try:
        engine = await _get_engine_pool().get_engine(_resolve_model(model))
    except Exception as error:  # noqa: BLE001 - every refusal is told alike
        await reject(f"Failed to load model '{model}': {error}")
        return
    if not isinstance(engine, STTEngine):
        await reject(f"Model '{model}' is not a speech-to-text model")
        return
    await _session(websocket, engine)


async def _session(websocket: WebSocket, engine: STTEngine) -> None:
    texts: list[str] = []
    try:
        await websocket.send_json({"type": "ready"})
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if message.get("text"):
                break
            vector = await engine.run("audio")
            texts.append(f"{len(vector)} values")
            await websocket.send_json({"type": "transcript.delta", "delta": texts[-1]})
        await websocket.send_json({"type": "transcript.done", "text": " ".join(texts)})
        await websocket.close(code=1000)
    except WebSocketDisconnect:
        return
    except Exception as error:  # noqa: BLE001 - the session ends, and says why
        with contextlib.suppress(Exception):
            await websocket.send_json({"type": "error", "detail": str(error)})
            await websocket.close(code=1011)
