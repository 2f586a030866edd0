# SPDX-License-Identifier: Apache-2.0
"""What a client is told about memory, whatever its route makes of the error."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from omlx.admission import request as requests
from omlx.admission.errors import refusal_of, remembers_refusal
from omlx.exceptions import (
    InsufficientMemoryError,
    ModelBusyError,
    ModelLoadingError,
    ModelNotFoundError,
    ModelTooLargeError,
    ModelUnavailableError,
)


FIXED = 1000
ENFORCER = SimpleNamespace(
    _memory_guard_tier="balanced",
    get_ceiling_breakdown=lambda: {"static": 2 * FIXED, "dynamic": 1, "metal_cap": FIXED},
)


def pool_that(answer):
    class Pool:
        _process_memory_enforcer = ENFORCER

        @remembers_refusal
        async def get_engine(self, model_id):
            if isinstance(answer, Exception):
                raise answer
            return answer

    return Pool()


async def respond(pool, path="/v1/chat/completions", status=500, headers=()):
    """A route that turns every error into ``status``, asked once; what was sent."""

    async def app(scope, receive, send):
        try:
            await pool.get_engine("m")
            code, body = 200, b"served"
        except Exception:
            code, body = status, b"the route's own words"
        plain = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": code, "headers": plain})
        await send({"type": "http.response.body", "body": body})

    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    await requests.RequestMiddleware(app)(scope, receive, send)
    start, body = sent
    return start["status"], dict(start["headers"]), body["body"]


PASSING = [
    # Other applications hold what it needs; the ceiling itself allows it.
    ModelTooLargeError("m", FIXED, 1),
    InsufficientMemoryError(2, 1, "no room now"),
    ModelBusyError("m", "reload"),
    ModelLoadingError("m"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("error", PASSING, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("status", [404, 409, 500, 507])
async def test_a_shortage_that_passes_is_503_with_retry_after(error, status):
    code, headers, body = await respond(pool_that(error), status=status)
    assert code == 503
    assert 1 <= int(headers[b"retry-after"]) <= 60
    assert json.loads(body)["error"]["code"] == "model_busy"
    assert json.loads(body)["error"]["message"].startswith(str(error))


@pytest.mark.asyncio
async def test_a_model_that_never_fits_is_507_and_not_to_be_tried_again():
    error = ModelTooLargeError("m", FIXED + 1, 1)
    code, headers, body = await respond(pool_that(error))
    assert code == 507
    assert headers[b"x-should-retry"] == b"false"
    assert b"retry-after" not in headers
    assert json.loads(body)["error"]["code"] == "model_too_large"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "sent"),
    [
        ("engine", (200, b"served")),
        (ModelNotFoundError("m", []), (404, b"the route's own words")),
        (ValueError("m"), (404, b"the route's own words")),
    ],
    ids=["engine", "unknown model", "unknown error"],
)
async def test_everything_else_is_answered_by_the_route(answer, sent):
    code, _, body = await respond(pool_that(answer), status=404)
    assert (code, body) == sent


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        ("a shard is missing", True),
        ("no context_length in the config", False),
    ],
)
async def test_a_failed_load_is_500_and_not_to_be_tried_again(cause, shown):
    """What could be read as an input that is too long is left to the log."""
    error = ModelUnavailableError("m", cause)
    code, headers, body = await respond(pool_that(error), status=409)
    assert code == 500
    assert headers[b"x-should-retry"] == b"false"
    said = json.loads(body)["error"]
    assert said["code"] == "model_load_failed"
    assert (said["message"] == str(error)) is shown
    assert shown or said["message"].endswith("the server's log has the cause.")


@pytest.mark.asyncio
@pytest.mark.parametrize(("seconds", "code"), [("5", 200), ("soon", 400), ("-1", 400)])
async def test_a_wait_budget_has_to_be_a_number_of_seconds(seconds, code):
    headers = [(b"x-omlx-max-wait", seconds.encode())]
    found, _, body = await respond(pool_that("engine"), headers=headers)
    assert found == code
    assert code == 200 or json.loads(body)["error"]["code"] == "invalid_max_wait"


@pytest.mark.asyncio
async def test_the_shape_is_that_of_the_route():
    error = ModelBusyError("m", "reload")
    _, _, body = await respond(pool_that(error), path="/v1/messages")
    assert json.loads(body)["error"]["type"] == "overloaded_error"
    _, _, body = await respond(pool_that(error), path="/admin/api/models/m/load")
    assert json.loads(body)["detail"] == str(error)


@pytest.mark.asyncio
async def test_a_second_try_that_works_is_not_spoiled_by_the_first():
    class Pool:
        calls = 0

        @remembers_refusal
        async def get_engine(self, model_id):
            self.calls += 1
            if self.calls == 1:
                raise ModelBusyError(model_id, "reload")
            return "engine"

    pool = Pool()

    class Twice:
        async def get_engine(self, model_id):
            with pytest.raises(ModelBusyError):
                await pool.get_engine(model_id)
            return await pool.get_engine(model_id)

    assert (await respond(Twice()))[0] == 200


@pytest.mark.asyncio
async def test_only_the_last_try_is_answered():
    answers = [ModelBusyError("m", "reload"), ModelNotFoundError("m", [])]

    class Pool:
        @remembers_refusal
        async def get_engine(self, model_id):
            raise answers.pop(0)

    pool = Pool()

    class Twice:
        async def get_engine(self, model_id):
            with pytest.raises(ModelBusyError):
                await pool.get_engine(model_id)
            return await pool.get_engine(model_id)

    code, _, body = await respond(Twice(), status=404)
    assert (code, body) == (404, b"the route's own words")


@pytest.mark.asyncio
async def test_a_call_outside_of_a_request_just_raises():
    with pytest.raises(ModelBusyError):
        await pool_that(ModelBusyError("m", "reload")).get_engine("m")


def test_an_unknown_error_is_nobodys_refusal():
    assert refusal_of(None, ValueError("x")) is None


@pytest.mark.asyncio
async def test_headers_of_an_http_exception_are_kept():
    from types import SimpleNamespace

    from fastapi import HTTPException

    from omlx.server import http_exception_handler

    request = SimpleNamespace(method="GET", url=SimpleNamespace(path="/v1/models"))
    error = HTTPException(503, "later", headers={"Retry-After": "7"})
    response = await http_exception_handler(request, error)
    assert response.headers["retry-after"] == "7"
