"""503 with ``Retry-After`` for a shortage that passes, 507 for one that does not."""

from __future__ import annotations

import libcst as cst

from omlx_admission.upstream import editing, package
from omlx_admission.upstream.change import Change
from omlx_admission.upstream.transplant import Recipe, as_decorator, transplant


def _errors() -> str:
    """`hooks.server.errors`: what a pool error means, and a decorator that remembers it."""
    decorator = as_decorator(
        "hooks.server.errors",
        "get_engine",
        called="remembers_refusal",
        doc="Remember why the pool refused the request at hand; the error itself stays.",
    )
    recipe = Recipe(
        "hooks.server.errors",
        keep=(
            "_MISREAD",
            "_GUESS_S",
            "get_engine",
            "remember",
            "refusal_of",
            "_load_failed",
        ),
        replace={"get_engine": decorator},
        rewrite={
            "from omlx import exceptions as theirs": None,
            """
            try:
                request.refusal = refusal_of(pool, error)
            except Exception as ours:
                faults.note("the reading of a refusal", ours)
            """: "request.refusal = refusal_of(pool, error)",
        },
        text={
            "a stock pool error": "a pool error",
            "where stock's own answer is right": "where the route's is right",
            "(409, as stock says)": "(409)",
            "tried again by stock clients": "tried again by the usual clients",
            "speech\nand load routes answer 500": "speech routes\nanswer 500",
        },
        imports="import functools\nfrom .. import exceptions as theirs\n",
    )
    return transplant(recipe, package.MODULES)


CEILING = Recipe(
    "hooks.pool.ceiling",
    drop=("NEEDS", "_ENFORCER"),
    rewrite={
        'faults.note("the parts of the memory ceiling", error)': (
            'logging.getLogger(__name__).warning("the memory ceiling is unreadable: %s", error)'
        ),
    },
    text={
        " Releases before 0.5.7 have the private one only.": "",
        "what oMLX calls too large": "what the pool calls too large",
    },
    imports="import logging\n",
)


def engine_pool(module: cst.Module) -> cst.Module:
    """Two lines: whatever route called, the reason of a refusal is known."""
    module = editing.add_import(module, "from .admission.errors import remembers_refusal")
    return editing.decorate(module, "EnginePool.get_engine", "remembers_refusal")


def server(module: cst.Module) -> cst.Module:
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
    title="Answer a passing memory shortage with 503 and Retry-After",
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
        **package.REQUEST_MODULES,
        "admission/ceiling.py": package.make(CEILING),
        "admission/errors.py": _errors,
    },
)
