"""Requests for a model that is not loaded queue; the busy model drains for them."""

from __future__ import annotations

import libcst as cst

from omlx_admission import settings
from omlx_admission.upstream import anchors, docstrings, editing, package
from omlx_admission.upstream.change import Change
from omlx_admission.upstream.transplant import Recipe

POOL = "EnginePool"

#: Our modules of plain decisions go as they are, but for what only our pages ask.
POLICY = (
    Recipe("core.policy.admission"),
    Recipe("core.config"),
    Recipe(
        "core.policy.estimates",
        text={
            "the worst wait stays below half of what service without a gate gives\n"
            "        (figures in ``benchmarks/``).": (
                "the worst wait stays below half of what service without a gate gives."
            )
        },
    ),
    Recipe("core.policy.forecast"),
    Recipe("core.policy.linger"),
    Recipe("core.policy.model", drop=("EMPTY_VIEW",)),
    Recipe("core.policy.planner"),
    Recipe("core.policy.queues"),
    Recipe("core.policy.retry"),
    Recipe("core.policy.schedule", drop=("Schedule.waiters", "Schedule.wanted_since")),
    Recipe(
        "core.route_model_kinds",
        text={
            "Stock loads the model first, evicting whoever is in its way, and looks at its "
            "kind then.": (
                "A route alone finds out after the load, for which others were evicted."
            ),
            "is left to stock": "is left to the route",
        },
    ),
    Recipe("core.refusal_text"),
    Recipe("core.footprint"),
    Recipe(
        "core.load_work",
        text={
            "omlx_admission_load": "omlx_load",
            "oMLX's load thread: is": "the load thread: is",
            "a time-out of its own, half an hour in oMLX. After": (
                "a time-out of its own, half an hour. After"
            ),
            "to oMLX's load thread, or to ours, by whomever": "to the load thread, by whomever",
        },
    ),
    Recipe(
        "core.port",
        text={"; ``hooks`` implements it on oMLX, tests on a fake": ""},
    ),
)

#: The observer behind our status page stays with us.
QUEUE = Recipe(
    "core.queue",
    drop=(
        "Admission._announce_swap",
        "Admission._announce_refusal",
        "Admission.loaded_by_hand",
        "Admission.closing",
        "Admission.budget",
    ),
    drop_calls=r"self\.events\.|self\._announce_",
    parameters={"Admission.__init__": ("events",)},
    rewrite={
        "self.events = events": None,
        "queued = False": None,
        "queued = True": None,
        "Admission._refuse_all | waited = self.now() - waiter.enqueued": None,
        "hold = request.hold if request is not None else None": None,
        "if hold is not None: hold.wait_began()": None,
        "if hold is not None: hold.wait_ended()": None,
        "request is not None and self.config.errors": "request is not None",
    },
    text={
        "passing our hooks": "telling the queue",
        "callers run stock": "callers ask the pool directly",
        "handed back instead: stock would have evicted it": (
            "handed back instead: without the queue it could be evicted"
        ),
        "Our own failure: log it once, let everybody who waits run stock.": (
            "The queue's own failure: log it once; all who wait ask the pool directly."
        ),
        "oMLX's own admission takes over": "from now on the pool decides alone",
    },
)

POOL_PORT = Recipe(
    "hooks.pool.port",
    rewrite={
        "unloading_models(pool)": "pool._unloading_models",
        "unloading_models(self._pool)": "self._pool._unloading_models",
        """
        if not gpu_jobs.executors.prepare(sys.modules[gpu_jobs.CORE].get_mlx_executor()):
            return None
        """: None,
        """
        while (reloading := state_of(self._pool).reloading) is not None:
            await reloading.wait()
        """: None,
        "resident.is_vlm(entry.engine)": (
            "isinstance(entry.engine, self._module.VLMBatchedEngine)"
        ),
        "dead.bury(self._pool, model)": None,
        "self._last_used(model_id, entry)": "entry.last_access",
        "state_of(pool).used[target.model] = time.monotonic()": None,
        "_exceptions()": "exceptions",
        "stalled.let_go(self._pool, model_id, entry)": None,
        "stalled.unread(model_id, entry)": "0",
        "stalled.sessions(model_id, entry)": "0",
        "return active and not phantom.is_phantom(engine)": "return active",
        "admission_refused()(refusal)": "AdmissionRefused(refusal)",
    },
    drop=(
        "VIEW_NEEDS",
        "_exceptions",
        "_refused_class",
        "OmlxPool.is_quiescent",
        "OmlxPool.in_use",
        "OmlxPool._last_used",
    ),
    replace={
        "admission_refused": '''
class AdmissionRefused(exceptions.SchedulerQueueFullError):
    """The queue refused a request; ``refusal`` says how and why."""

    def __init__(self, refusal: Refusal) -> None:
        Exception.__init__(self, refusal.message)
        self.refusal = refusal
        self.message = refusal.message
        self.details = {"code": refusal.code}
        self.current_depth = self.max_depth = 0
''',
        "OmlxPool.give_back": '''
def give_back(self, model: str, engine: Any) -> None:
    """See :class:`~.port.PoolPort`."""
    entry = self._pool._entries.get(model)
    if entry is not None and entry.engine is engine and entry.in_use > 0:
        entry.in_use -= 1
''',
    },
    imports="from .. import exceptions\n",
    text={
        "omlx_admission_planned_victims": "omlx_planned_victims",
        "omlx_admission_load_at_hand": "omlx_load_at_hand",
        "OmlxPool": "EnginePoolPort",
        "stock_get_engine": "get_engine",
        "The real pool": "The engine pool",
        "the way stock admission reads them, so\n"
        "that what the plan calls a fit is what stock will call a fit": (
            "the way its own admission reads them, so\n"
            "that what the plan calls a fit is what the pool will call a fit"
        ),
        "read by the wrapper of\n#: ``_find_lru_victim``, which stock calls from within": (
            "read by\n#: ``_find_lru_victim``, which the pool calls from within"
        ),
        "Stock raises where\n#: another one is busy": (
            "The pool raises where\n#: another one is busy"
        ),
        "Those are what stock admission will count": (
            "Those are what the pool's own admission will count"
        ),
        "Raise what stock would raise without": "Raise what the pool would raise without",
        "failed, and stock caches that": "failed, and the pool caches that",
        "behind\n            # (before 0.5.4); what": "behind;\n            # what",
        "Stock refuses a marked model": "The pool refuses a marked model",
        "Stock evicts for bytes only": "The pool evicts for bytes only",
        "stock has another name": "the pool has another name",
    },
)

#: Whether a newcomer has to queue is asked of the queue itself there.
PLACES = Recipe(
    "hooks.pool.places",
    drop=("SCHEDULER", "NEEDS", "_FEWEST", "_pacing", "is_taken", "apply"),
)

#: `own` of ours reads what the leases have noted.
OWN = Recipe(
    "core.held_models",
    imports="from . import request as requests\n",
    append=("hooks.pool.holding", "own"),
    text={
        "models that we keep for it; stock would not have protected them": (
            "models that are kept for it, though its route took no lease"
        )
    },
)

MARKS = Recipe(
    "hooks.pool.state",
    keep=("DRAIN_REASON", "drains_for_us"),
    text={
        """What the hooks keep per pool: unloads in progress, and the admission queue.

Attached to the pool object itself, so that it goes when the pool goes.
""": "The mark of a busy model that has to leave for another one.\n",
    },
)

#: Of our variables, those of the queue; the others stay with the package.
VARIABLES = (
    "OMLX_ADMISSION_QUEUE",
    "OMLX_ADMISSION_MAX_WAIT_S",
    "OMLX_ADMISSION_MAX_QUEUE",
    "OMLX_ADMISSION_MAX_MODELS",
    "OMLX_ADMISSION_MAX_AGE_S",
    "OMLX_ADMISSION_LINGER_S",
)
_FIELDS = {v.field for v in settings.VARIABLES if v.name in VARIABLES}
_OTHERS = "|".join(v.name for v in settings.VARIABLES if v.name not in VARIABLES)

SETTINGS = Recipe(
    "settings",
    drop=(
        "api_key",
        "_unknown",
        *(
            f"Settings.{name}"
            for name in vars(settings.Settings)["__annotations__"]
            if name not in _FIELDS
        ),
    ),
    drop_elements=rf'Variable\("({_OTHERS})",',
    rewrite={"problems += _unknown(source)": None},
    prepend='OFF_WORDS = frozenset({"0", "false", "off", "no"})\n',
    text={
        '"""Every environment variable of the package, read here and nowhere else.': (
            '"""The variables of the admission queue.'
        )
    },
)


def engine_pool(module: cst.Module) -> cst.Module:
    """The pool, resident path and error mapping in it."""
    for name in ("_acquire_loaded_engine", "_get_engine_past_teardown"):
        anchors.function(module, f"{POOL}.{name}")
    module = editing.add_import(
        module, "from .admission.gate import PoolAdmission, announced, noticed, watched"
    )
    module = editing.insert_after_assignment(
        module,
        f"{POOL}.__init__",
        "self._unloading_models",
        """
        # Who waits for a model that is not simply loaded, and who is next.
        self._admission = PoolAdmission(self)
        """,
    )
    module = editing.insert_before_statement(
        module,
        f"{POOL}.get_engine",
        "return await self._get_engine_past_teardown("
        "model_id, force_lm, _lease, runtime_settings)",
        """
        if self._admission.enabled:
            return await self._admission.get_engine(
                model_id, force_lm, _lease, runtime_settings
            )
        """,
    )
    module = editing.insert_first(
        module,
        f"{POOL}._acquire_loaded_engine",
        """
        if model_id in self._admission.gated:
            return None
        if lease and self._admission.is_taken(model_id):
            return None
        self._admission.policy.first_use(model_id)
        """,
    )
    module = editing.replace_statement(
        module,
        f"{POOL}._release_loaded_engine",
        "if entry is not None and entry.pending_unload_reason: return False",
        """
        pending = entry is not None and entry.pending_unload_reason
        if pending and not drains_for_us(entry):
            return False
        """,
    )
    module = editing.insert_before_statement(
        module,
        f"{POOL}._release_loaded_engine",
        "return True",
        "self._admission.released(model_id)",
    )
    module = editing.add_import(module, "from .admission.marks import drains_for_us")
    module = editing.insert_last(
        module, f"{POOL}._release_engine_lease", "self._admission.released(model_id)"
    )
    module = editing.insert_first(
        module,
        f"{POOL}._find_lru_victim",
        """
        if not self._admission.has_a_chance():
            return None
        planned = self._admission.planned_victim()
        if planned is not None:
            return planned
        """,
    )
    module = editing.insert_first(module, f"{POOL}.shutdown", "self._admission.shut_down()")
    for name in ("discover_models", "_unload_engine"):
        module = editing.decorate(module, f"{POOL}.{name}", "announced")
    module = editing.decorate(module, f"{POOL}._unload_engine", "noticed")
    module = editing.decorate(module, f"{POOL}._load_engine", "watched")
    module = docstrings.add_raises(
        module,
        f"{POOL}.get_engine",
        "AdmissionRefused: If the queue refuses the request",
    )
    return docstrings.reword(module, f"{POOL}.request_unload", "are rejected", "wait or fail")


def cli(module: cst.Module) -> cst.Module:
    """Who waits is refused before the server waits for its open connections."""
    module = editing.add_import(
        module, "from .admission.serving import Server", within="serve_command"
    )
    return editing.replace_expression(module, "serve_command", "uvicorn.Server", "Server")


CHANGE = Change(
    name="drain-queue",
    title="Queue requests for another model and drain the busy one",
    message="""
When memory holds one model and two are asked for, the second request is refused
while the first model has a request, and with traffic on both no request for the
second is ever served: nothing that is busy can be evicted, and nobody keeps
order. Loads that are let in swap the models back and forth.

Requests for a model that is not loaded now wait in one queue per pool. The
loaded model serves until somebody has waited long enough for another one; then
it takes no new requests, finishes what runs, and leaves for the model that has
been wanted longest, whose waiters are all served by the one load. A wait ends
by the model, by a budget (503 with Retry-After), by the client that leaves, or
by a refusal at once where the model can never fit (507, nothing is evicted).
Admission arithmetic, eviction and loading are the pool's own, as before.

OMLX_ADMISSION_QUEUE=0 switches the queue off.
""",
    issues=(1970,),
    features=("queue",),
    edits={"engine_pool.py": engine_pool, "cli.py": cli},
    modules={
        **{
            f"admission/{package.MODULES[recipe.source]}.py": package.make(recipe)
            for recipe in POLICY
        },
        "admission/marks.py": package.make(MARKS),
        "admission/own.py": package.make(OWN),
        "admission/places.py": package.make(PLACES),
        "admission/pool.py": package.make(POOL_PORT),
        "admission/queue.py": package.make(QUEUE),
        "admission/settings.py": package.make(SETTINGS),
        "admission/gate.py": package.verbatim("drain-queue", "gate.py"),
        "admission/serving.py": package.verbatim("drain-queue", "serving.py"),
    },
    after=("resident-path", "error-mapping", "leases"),
)
