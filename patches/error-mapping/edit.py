"""503 with ``Retry-After`` for a shortage that passes, 507 for one that does not."""

from __future__ import annotations

from pathlib import Path

from omlx_admission.upstream import editing, package
from omlx_admission.upstream.change import Change
from omlx_admission.upstream.code import Code


def engine_pool(module: Code) -> Code:
    """Two lines: whatever route called, the reason of a refusal is known."""
    module = editing.add_import(module, "from .admission.errors import remembers_refusal")
    return editing.decorate(module, "EnginePool.get_engine", "remembers_refusal")


def server(module: Code) -> Code:
    """The middleware, and the headers of an HTTPException."""
    module = package.add_middleware(module)
    return editing.replace_statement(
        module,
        "http_exception_handler",
        "return JSONResponse(status_code=exc.status_code, content=content)",
        """
        return JSONResponse(
            status_code=exc.status_code,
            content=content,
            headers=getattr(exc, "headers", None),
        )
        """,
    )


CHANGE = Change(
    name="error-mapping",
    title="fix(server): answer a passing memory shortage with 503 and Retry-After",
    message="""
One answer stands for two failures. A model that can never fit and one that
does not fit until the busy model is done both end in 507, which tells clients
to give up; a model that is loading or busy ends in 409. What a client sees
depends on the route as well: speech routes and the load route of the admin
page turn the same error into 500, the fallback to the default model into 404,
and the handler of HTTPException drops the headers, so that no Retry-After
ever arrives. A failed load is 409, which clients try again.

EnginePool.get_engine now leaves the reason with the request, and a pure ASGI
middleware, which knows the request, answers with it in place of the error
response that the route has made of it: 503 with Retry-After for a shortage
that passes, 507 with x-should-retry: false for a model that never fits, 500
for one that failed to load, in the shape of the route (OpenAI or Anthropic).
A model never fits where it is larger than what of the memory ceiling is fixed;
what only the moving part forbids passes.
The cause of a failed load stays in the log where its words could be read as an
input that is too long. A header X-OMLX-Max-Wait that is no number of seconds is
answered with 400; nothing waits by it yet. No route is changed. The headers of
an HTTPException are kept.
""",
    issues=(1970,),
    features=("errors",),
    edits={"engine_pool.py": engine_pool, "server.py": server},
    modules={
        **package.copied("admission", "request", "pool.errors"),
        **package.added(Path(__file__).parent / "new", "admission"),
    },
    copied_tests=package.tests("tests/runtime/test_request.py"),
)
