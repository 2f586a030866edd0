"""Taking running answers out of an engine, whole, and putting them into another one.

All of it runs on the thread of the engine that is concerned, between two of its bursts.

mlx-lm keeps what it generates together in one object, `GenerationBatch`: the KV cache, the
token that is drawn and not sent yet, samplers, penalties' contexts, stop matchers, counts.
It moves as it is. Rows that are taken out of it one by one, or a prefill of what was said
so far, would go on with other numbers: the shapes and the order of draws are part of an
answer. What belongs to a request beside that, its text, detokenizer and parser, are oMLX's
objects; they move too. oMLX's own clean-up after an abort removes the rest.

What is not known is not moved: `NotParkable`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omlx_admission.core import faults
from omlx_admission.hooks.patching.gate import Kind, Need, read_if_there

SCHEDULER = "omlx.scheduler"
REQUEST = "omlx.request"

_DICT = ("dict[...]", "OrderedDict[...]")

NEEDS = (
    Need(SCHEDULER, "_register_uid_rows", Kind.SYNC, ("model", "uids", "samplers", "lps_rows")),
    Need(SCHEDULER, "_unregister_uid_row", Kind.SYNC, ("model", "uid")),
    Need(SCHEDULER, "Scheduler._do_abort_request", Kind.SYNC, ("request_id",)),
    Need(SCHEDULER, "Scheduler._process_pending_aborts", Kind.SYNC, ()),
    Need(SCHEDULER, "Scheduler._reset_request_for_reprefill", Kind.SYNC, ("request",)),
    Need(SCHEDULER, "Scheduler._ensure_batch_generator", Kind.SYNC, ("sampling_params",)),
    Need(SCHEDULER, "Scheduler.add_request", Kind.SYNC, ("request",)),
    Need(SCHEDULER, "Scheduler.abort_request", Kind.SYNC, ("request_id",)),
    Need(SCHEDULER, "Scheduler.running", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler.requests", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler.request_id_to_uid", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler.uid_to_request_id", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler._request_detokenizers", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler._output_parser_sessions", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler.batch_generator", Kind.VALUE),
    Need(SCHEDULER, "Scheduler.model", Kind.VALUE),
    Need(SCHEDULER, "Scheduler._stream", Kind.VALUE),
    # Ways of generating that hold more than the batch does.
    Need(SCHEDULER, "Scheduler._vlm_mtp_active", Kind.VALUE, types=_DICT),
    Need(SCHEDULER, "Scheduler._vlm_mtp_drafter", Kind.VALUE),
    Need(SCHEDULER, "Scheduler._specprefill_draft_model", Kind.VALUE),
    Need(SCHEDULER, "Scheduler._turboquant_kv_bits", Kind.VALUE),
    Need(SCHEDULER, "Scheduler._serialize_llama4_requests", Kind.VALUE),
    Need(SCHEDULER, "Scheduler._generation_overflow_recovery_ids", Kind.VALUE),
    Need(SCHEDULER, "GenerationBatch", Kind.NAME),
    Need(SCHEDULER, "Scheduler._thinking_budget_token_to_piece", Kind.SYNC),
    Need("omlx.api.thinking", "ThinkingBudgetProcessor._token_to_piece", Kind.VALUE),
    *(
        Need(REQUEST, f"Request.{name}", Kind.VALUE)
        for name in (
            "arrival_time",
            "batch_uid",
            "block_table",
            "finish_reason",
            "prompt_cache",
            "sampling_params",
            "status",
        )
    ),
    Need(REQUEST, "SamplingParams.seed", Kind.VALUE),
    Need(REQUEST, "RequestStatus.RUNNING", Kind.VALUE),
    # A vision model's positions are kept by its rows.
    *read_if_there("omlx.models.vlm", "VLMModelAdapter", "register_rope_delta"),
)

#: All that mlx-lm's batch holds. One attribute more may be what an answer depends on.
_BATCH = frozenset(
    {
        "_current_logprobs",
        "_current_tokens",
        "_matcher_states",
        "_next_logprobs",
        "_next_tokens",
        "_num_tokens",
        "_token_context",
        "fallback_sampler",
        "logits_processors",
        "max_tokens",
        "model",
        "prompt_cache",
        "samplers",
        "state_machines",
        "tokens",
        "uids",
    }
)

#: What is used of mlx-lm's generator.
_GENERATOR = (
    "_currently_processing",
    "_generation_batch",
    "_prompt_batch",
    "_uid_count",
    "_unprocessed_sequences",
    "model",
    "sampler",
)

_CACHES = "mlx_lm.models.cache"
#: Caches that hold arrays and numbers, and nothing of the model.
_KNOWN_CACHES = frozenset(
    {
        "ArraysCache",
        "BatchKVCache",
        "BatchRotatingKVCache",
        "CacheList",
        "KVCache",
        "RotatingKVCache",
    }
)

#: Modules whose samplers and penalties are plain functions of what they are given.
_FUNCTIONS = frozenset({"mlx_lm.sample_utils", "omlx.utils.sampling", SCHEDULER})
#: A processor that is an object. It asks the scheduler that made it for the text of tokens.
_BUDGET = ("omlx.api.thinking", "ThinkingBudgetProcessor")


class NotParkable(Exception):
    """What runs cannot be taken out; it drains. The text says why."""


class NotNow(Exception):
    """What runs is in the middle of something; it may be asked again soon."""


@dataclass
class Row:
    """One answer of a batch, in its order."""

    id: str
    request: Any
    detokenizer: Any
    session: Any


@dataclass
class Taken:
    """What was taken out of an engine: rows of one batch, and requests to begin again."""

    batch: Any = None
    rows: list[Row] = field(default_factory=list)
    random: Any = None
    bytes: int = 0


def unknown_engine(core: Any) -> str | None:
    """What forbids to move anything of an engine's, as far as that can be told from any
    thread; None: nothing."""
    scheduler = core.scheduler
    if scheduler._vlm_mtp_active or scheduler._vlm_mtp_drafter is not None:
        return "it decodes with a drafter"
    if scheduler._specprefill_draft_model is not None:
        return "it prefills with a draft model"
    if scheduler._turboquant_kv_bits is not None:
        return "its KV cache is quantized"
    if scheduler._serialize_llama4_requests:
        return "its KV cache is chunked"
    if scheduler._generation_overflow_recovery_ids:
        return "it repeats answers one by one"
    if hasattr(scheduler.model, "register_rope_delta"):
        return "its positions are those of a vision model"
    generator = scheduler.batch_generator
    if generator is None:
        return None
    if missing := [name for name in _GENERATOR if not hasattr(generator, name)]:
        return f"mlx-lm's generator has no {missing[0]}"
    return unknown_batch(generator._generation_batch)


def unknown_batch(batch: Any) -> str | None:
    """What of a batch is not known; None: all of it is."""
    if type(batch).__name__ != "GenerationBatch":
        return f"its batch is a {type(batch).__name__}"
    if other := vars(batch).keys() ^ _BATCH:
        return f"its batch is not the known one: {', '.join(sorted(other))}"
    for cache in batch.prompt_cache:
        if (name := _unknown_cache(cache)) is not None:
            return f"its KV cache is a {name}"
    for row in batch.logits_processors or ():
        for processor in row or ():
            if not _is_known(processor) and _kind(processor) != _BUDGET:
                return f"an answer is steered by {_kind(processor)[1]}"
    for sampler in batch.samplers or ():
        if sampler is not None and not _is_known(sampler):
            return f"an answer is drawn by {_kind(sampler)[1]}"
    return None


def _kind(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__name__


def _is_known(function: Any) -> bool:
    plain = type(function).__name__ in ("function", "partial")
    function = getattr(function, "func", function)
    return plain and getattr(function, "__module__", None) in _FUNCTIONS


def _unknown_cache(cache: Any) -> str | None:
    module, name = _kind(cache)
    if module != _CACHES or name not in _KNOWN_CACHES:
        return name
    inner = cache.caches if name == "CacheList" else ()
    return next((n for c in inner if (n := _unknown_cache(c)) is not None), None)


def take_out(core: Any, ids: Collection[str], most: int | None) -> Taken:
    """Take the running requests ``ids`` out of the engine, no more than ``most`` bytes.

    Raises:
        NotNow, NotParkable: nothing was changed.
    """
    scheduler = core.scheduler
    scheduler._process_pending_aborts()
    running = dict(scheduler.running)
    if not running:
        return Taken()
    if not running.keys() <= set(ids):
        raise NotNow("it has begun an answer meanwhile")
    if (why := unknown_engine(core)) is not None:
        raise NotParkable(why)
    generator = scheduler.batch_generator
    batch = generator._generation_batch
    uids = [scheduler.request_id_to_uid.get(name) for name in running]
    if (
        generator._unprocessed_sequences
        or generator._currently_processing
        or len(generator._prompt_batch)
        or len(batch.uids) != len(uids)
        or set(batch.uids) != set(uids)
    ):
        raise NotNow("not all that runs is in its batch")
    held = _settle(batch, scheduler._stream)
    if most is not None and held > most:
        raise NotParkable(f"its answers hold {held} bytes, and {most} may be parked")
    taken = Taken(batch, bytes=held)
    if any(request.sampling_params.seed is not None for request in running.values()):
        taken.random = _random()
    # From here on nothing may fail.
    names = {uid: name for name, uid in zip(running, uids, strict=True)}
    generator._generation_batch = type(batch).empty(generator.model, generator.sampler)
    batch.model = None
    for uid in batch.uids:
        taken.rows.append(_leave(scheduler, names[uid], uid))
    return taken


def _leave(scheduler: Any, name: str, uid: int) -> Row:
    """Have a scheduler forget one request, whose row it has no more, as after an abort."""
    request = scheduler.requests[name]
    detokenizer = scheduler._request_detokenizers.get(name)
    session = scheduler._output_parser_sessions.get(name)
    # Without its number the clean-up does not look for the row.
    scheduler.request_id_to_uid.pop(name, None)
    scheduler.uid_to_request_id.pop(uid, None)
    _rows()._unregister_uid_row(scheduler.model, uid)
    try:
        scheduler._do_abort_request(name)
    except Exception as error:  # noqa: BLE001 - its row is out, and goes on elsewhere
        faults.note("the clean-up behind a parked answer", error)
    scheduler.running.pop(name, None)
    scheduler.requests.pop(name, None)
    request.status = _statuses().RUNNING
    request.finish_reason = request.block_table = request.prompt_cache = None
    return Row(name, request, detokenizer, session)


def _settle(batch: Any, stream: Any) -> int:
    """Compute all that the batch holds; the bytes of it."""
    import mlx.core as mx

    arrays = list({id(a): a for a in _arrays(batch, mx.array)}.values())
    with mx.stream(stream):
        mx.eval(arrays)
    mx.synchronize(stream)
    return sum(int(array.nbytes) for array in arrays)


def _arrays(batch: Any, kind: type) -> Iterator[Any]:
    for name in ("_current_tokens", "_current_logprobs", "_next_tokens", "_next_logprobs"):
        yield from _of(getattr(batch, name), kind)
    for context in batch._token_context:
        yield from _of(list(vars(context).values()), kind)
    for cache in batch.prompt_cache:
        yield from _of(cache, kind)


def _of(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _of(item, kind)
    elif type(value).__module__ == _CACHES:
        yield from _of(list(vars(value).values()), kind)


def _random() -> Any:
    """What the next draws of this thread depend on."""
    import mlx.core as mx

    state = [mx.array(part) for part in _random_state(mx)]
    mx.eval(state)
    return state


def _random_state(mx: Any) -> Any:
    return mx.random.state


def begin_again(core: Any, requests: Sequence[Any]) -> dict[str, Exception]:
    """Give an engine requests anew that had not begun in another one; those it refuses."""
    refused: dict[str, Exception] = {}
    scheduler = core.scheduler
    for request in requests:
        try:
            scheduler._reset_request_for_reprefill(request)
            scheduler.add_request(request)
        except Exception as error:  # noqa: BLE001 - it is that request's answer
            refused[request.request_id] = error
    return refused


def put_back(core: Any, taken: Taken, gone: Collection[str]) -> None:
    """Let the rows go on in the engine of ``core``, but for those that are ``gone``."""
    import mlx.core as mx

    scheduler = core.scheduler
    keep = [i for i, row in enumerate(taken.rows) if row.id not in gone]
    if not keep:
        return
    batch = taken.batch
    rows = [taken.rows[i] for i in keep]
    scheduler._ensure_batch_generator(rows[0].request.sampling_params)
    generator = scheduler.batch_generator
    with mx.stream(scheduler._stream):
        batch.model = generator.model
        if len(keep) < len(taken.rows):
            batch.filter(keep)
        uids = [generator._uid_count + i for i in range(len(rows))]
        generator._uid_count += len(rows)
        batch.uids = list(uids)
        samplers = [_at(batch.samplers, i) for i in range(len(rows))]
        processors = [list(_at(batch.logits_processors, i) or ()) for i in range(len(rows))]
        for processor in (each for row in processors for each in row):
            if _kind(processor) == _BUDGET:
                processor._token_to_piece = scheduler._thinking_budget_token_to_piece
        _rows()._register_uid_rows(scheduler.model, uids, samplers, processors)
        if len(generator._generation_batch):
            generator._generation_batch.extend(batch)
        else:
            generator._generation_batch = batch
    if taken.random is not None:
        for i, part in enumerate(taken.random):
            _random_state(mx)[i] = part
    for row, uid in zip(rows, uids, strict=True):
        row.request.batch_uid = uid
        scheduler.requests[row.id] = scheduler.running[row.id] = row.request
        scheduler.request_id_to_uid[row.id] = uid
        scheduler.uid_to_request_id[uid] = row.id
        if row.detokenizer is not None:
            scheduler._request_detokenizers[row.id] = row.detokenizer
        if row.session is not None:
            scheduler._output_parser_sessions[row.id] = row.session


def _at(items: Any, index: int) -> Any:
    return items[index] if items and index < len(items) else None


def _rows() -> Any:
    return sys.modules[SCHEDULER]


def _statuses() -> Any:
    return sys.modules[REQUEST].RequestStatus
