"""The package ``omlx/admission/`` that the changes build up together, module by module.

A module that several changes need is brought by whichever is made first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import libcst as cst

from omlx_admission.upstream import anchors, editing, style
from omlx_admission.upstream.transplant import LICENSE, Recipe, transplant

#: Ours, below ``omlx_admission``, to its name in ``omlx/admission/``.
MODULES = {
    "hooks.pool.ceiling": "ceiling",
    "hooks.pool.engines": "engines",
    "hooks.server.errors": "errors",
    "hooks.pool.holding": "holding",
    "core.route_model_kinds": "kinds",
    "hooks.pool.places": "places",
    "hooks.pool.port": "pool",
    "hooks.pool.state": "marks",
    "core.config": "config",
    "core.policy.admission": "policy",
    "core.policy.estimates": "estimates",
    "core.policy.forecast": "forecast",
    "core.policy.linger": "linger",
    "core.policy.model": "model",
    "core.policy.planner": "planner",
    "core.policy.queues": "queues",
    "core.policy.retry": "retry",
    "core.policy.schedule": "schedule",
    "core.queue": "queue",
    "core.refusal_text": "explain",
    "core.footprint": "footprint",
    "core.load_work": "load_work",
    "core.held_models": "own",
    "core.port": "port",
    "core.refusal": "refusal",
    "core.request": "request",
    "core.uninterrupted": "to_its_end",
    "settings": "settings",
}

REQUEST = Recipe(
    "core.request",
    # What our own observer asks for, the keep-alives of streams that wait, and the end
    # of an answer by an unload.
    drop=(
        "Request.id",
        "Request.noting",
        "blocked",
        "sockets",
        "_ID_HEADER",
        "_ID",
        "_numbers",
        "live",
        "_end",
    ),
    rewrite={
        'self._headers = scope.get("headers", ())': None,
        "self._id: str | None = None": None,
        'self.method: str = scope.get("method", "")': None,
        'self.query: bytes = scope.get("query_string", b"")': None,
        "self.task: asyncio.Task[Any] | None = None": None,
        "request.task = asyncio.current_task()": None,
        "send = request.noting(send)": None,
        "self.hold: stream_hold.StreamHold | None = None": None,
        "self.cut = Cut(self.path)": None,
        "send = request.cut.noting(send)": None,
        "hold = request.hold = stream_hold.hold_for(request, send)": None,
        "live.add(request)": None,
        "live.discard(request)": None,
        "sockets.add(request)": None,
        "sockets.discard(request)": None,
        "if replaced or request.cut.refusal is not None: return": "if replaced: return",
        "if hold is not None and hold.began: await hold.forward(message, refusal) return": None,
        "answer = request.cut.run(self.app(scope, request.receive, send_or_replace))": None,
        "if request.cut.refusal is not None: "
        "await _end(request, request.cut.refusal, scope, send)": None,
        # One `if` where our hold stood between two.
        """
        if message["type"] == "http.response.start":
            if hold is not None:
                hold.wait_ended()
            if message["status"] < 400:
                _tell_wait(request, scope, message)
            _expose(scope, message)
        """: """
        if message["type"] == "http.response.start":
            if message["status"] < 400:
                _tell_wait(request, scope, message)
            _expose(scope, message)
        """,
        """
        if hold is None:
            await answer
        else:
            await hold.run(answer, lambda: request.cut.refusal or request.refusal)
        """: "await self.app(scope, request.receive, send_or_replace)",
    },
    text={
        "omlx_admission_request": "omlx_request",
        "``handed`` belongs to the hooks: by model, what was handed out to it.": (
            "``handed``: by model, what was handed out to it."
        ),
    },
)
REFUSAL = Recipe(
    "core.refusal",
    text={
        # Nothing there answers with it.
        " or 409 (its own condition is not met).": ".",
        "500 (a load that failed), 400": "500 (a load that failed) or 400",
    },
)

ENGINES = Recipe("hooks.pool.engines", keep=("lives", "runs"))
TO_ITS_END = Recipe("core.uninterrupted")


def make(recipe: Recipe) -> Callable[[], str]:
    """What makes the text of the module of ``recipe``."""

    @cache
    def text(_line_length: int) -> str:
        return transplant(recipe, MODULES)

    return lambda: text(style.line_length.get())


def _init() -> str:
    return style.file(
        f'{LICENSE}"""Who may use which model, when, and what a refusal says."""\n'
    )


#: Of every change that wants to know the request behind a call to the pool.
REQUEST_MODULES = {
    "admission/__init__.py": _init,
    "admission/refusal.py": make(REFUSAL),
    "admission/request.py": make(REQUEST),
}


#: Of every change that hands engines out, or asks whether one is held.
ENGINE_MODULES = {
    "admission/__init__.py": _init,
    "admission/engines.py": make(ENGINES),
}


def add_middleware(module: cst.Module) -> cst.Module:
    """``server.py`` with the request middleware; as it is where it has it."""
    line = "app.add_middleware(RequestMiddleware)"
    if any(anchors.squeezed(statement) == line for statement in module.body):
        return module
    module = editing.add_import(module, "from .admission.request import RequestMiddleware")
    return editing.insert_after_definition(module, "app", line)


_RELEASE = '''
def _release_loaded_engine(self, model_id: str) -> bool:
    """Give one lease back; False where a pending unload has to see it, locked."""
    entry = self._entries.get(model_id)
    if entry is not None and entry.pending_unload_reason:
        return False
    if entry is not None and entry.in_use > 0:
        entry.in_use -= 1
    return True
'''


def add_release(module: cst.Module) -> cst.Module:
    """``engine_pool.py`` with the two ways to give a lease back; as it is where it has them.

    Locked is oMLX's own; only 0.5.0 has that within ``release_engine`` still.
    """
    if not anchors.has(module, "EnginePool._release_engine_lease"):
        module = editing.split_function(
            module,
            "EnginePool.release_engine",
            head="await self._release_engine_lease(model_id)",
            rest="_release_engine_lease",
            doc="Give one lease back under the pool lock.",
        )
    if anchors.has(module, "EnginePool._release_loaded_engine"):
        return module
    getter = anchors.first_of(module, "EnginePool._get_engine_locked", "EnginePool.get_engine")
    return editing.insert_method(module, _RELEASE, after=getter)


def verbatim(change: str, name: str) -> Callable[[], str]:
    """What makes a module that exists only there: ``patches/<change>/new/<name>``."""
    from omlx_admission.upstream import register

    return lambda: style.file(
        LICENSE + (register.folder() / change / "new" / name).read_text("utf-8")
    )
