"""Prometheus metrics, made from the observer's counts at the moment of a scrape.

Names and units follow Prometheus convention: base units, ``_total`` for counters,
no label whose values a client could make up. Models beyond the first 64 and GPU
engines beyond 32 are summed as ``(other)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from omlx_admission import __version__
from omlx_admission.observation.history import Distribution
from omlx_admission.observation.observe import Observer
from omlx_admission.observation.pool_snapshot import Facts

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_PREFIX = "omlx_admission_"
Render = Callable[[Facts, Observer], bytes]


#: The one other form than plain text. Nothing else of what a client may ask is passed on:
#: every version and escaping would be a reading of its own, and some are no number.
_OPENMETRICS = "application/openmetrics-text"


def format_for(accept: str) -> tuple[Render, str]:
    """How to write what ``accept`` asks for, and its content type, which is one of two.

    Raises:
        ImportError: ``prometheus_client`` is not installed.
    """
    # These on the caller's thread, for the first time: reading them takes a while.
    import prometheus_client.core  # noqa: F401
    from prometheus_client.exposition import choose_encoder

    wanted = f"{_OPENMETRICS};version=1.0.0" if _OPENMETRICS in accept else ""
    encode, kind = choose_encoder(wanted)

    def render(facts: Facts, observer: Observer) -> bytes:
        return bytes(encode(_Collected(facts, observer)))

    return render, kind


class _Collected:
    """What the encoders want of a registry: just its families."""

    def __init__(self, facts: Facts, observer: Observer) -> None:
        self._facts = facts
        self._observer = observer

    def collect(self) -> Iterator[Metric]:
        """The families, in a fixed order."""
        facts, observer = self._facts, self._observer
        yield from _process(facts, observer)
        yield from _queue(facts, observer)
        yield from _swaps(observer)
        yield from _memory(facts, observer)
        yield from _gpu(observer)


def _process(facts: Facts, observer: Observer) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    yield InfoMetricFamily(
        _PREFIX + "build",
        "Releases of omlx-admission and oMLX.",
        value={"version": __version__, "omlx": facts.omlx or "unknown"},
    )
    problems = observer.problems()
    broken = facts.admission is not None and facts.admission.broken
    yield GaugeMetricFamily(
        _PREFIX + "healthy",
        "0 while a load, unload, drain or GPU turn is stuck, or the queue is broken.",
        value=float(not problems and not broken),
    )
    stuck = GaugeMetricFamily(
        _PREFIX + "stuck", "How many are longer under way than their limit.", labels=["kind"]
    )
    kinds = [p.kind for p in problems]
    for kind in ("load", "unload", "drain", "swap", "turn"):
        stuck.add_metric([kind], kinds.count(kind))
    yield stuck


def _queue(facts: Facts, observer: Observer) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    depth = GaugeMetricFamily(
        _PREFIX + "queue_depth", "Requests that wait now, by model.", labels=["model"]
    )
    for model, level in sorted(observer.levels.items()):
        depth.add_metric([model], level.value)
    yield depth
    if facts.admission is not None:
        yield GaugeMetricFamily(
            _PREFIX + "parked",
            "Answers that were taken out of their engines and wait for them.",
            value=facts.admission.policy.parked,
        )
        yield GaugeMetricFamily(
            _PREFIX + "parked_bytes", "What they hold.", value=facts.view.parked
        )
        yield GaugeMetricFamily(
            _PREFIX + "queue_limit",
            "Most requests that may wait.",
            value=facts.admission.config.max_queue,
        )
    yield _histogram(
        "wait_seconds",
        "Time in the queue, its load included, by model and how it ended.",
        ("model", "outcome"),
        observer.waits,
    )
    yield _histogram(
        "parked_seconds",
        "Silence of parked answers, by model and how it ended.",
        ("model", "outcome"),
        observer.parkings,
    )
    refusals = CounterMetricFamily(
        _PREFIX + "refusals", "Requests refused, by reason.", labels=["reason"]
    )
    for reason, count in sorted(observer.refusal_counts.items()):
        refusals.add_metric([reason], count)
    yield refusals


def _swaps(observer: Observer) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    swaps = CounterMetricFamily(
        _PREFIX + "swaps",
        "Swaps, by what had to leave first and how they ended.",
        labels=["reason", "result"],
    )
    for (reason, result), count in sorted(observer.swap_counts.items()):
        swaps.add_metric([reason, result], count)
    yield swaps
    failures = CounterMetricFamily(
        _PREFIX + "load_failures", "Loads that did not end resident.", labels=["model"]
    )
    for model, count in sorted(observer.load_failures.items()):
        failures.add_metric([model], count)
    yield failures
    for name, text, store in (
        ("load_seconds", "Time of a load.", observer.loads),
        (
            "unload_seconds",
            "Time of an unload, until its memory has settled.",
            observer.unloads,
        ),
        ("drain_seconds", "Time from the closing of a busy model's gate.", observer.drains),
    ):
        yield _histogram(name, text, ("model",), store)
    yield _histogram(
        "eviction_age_seconds",
        "Time since its last use of a model that was unloaded.",
        (),
        {(): observer.eviction_age},
    )


def _memory(facts: Facts, observer: Observer) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    view = facts.view
    resident = GaugeMetricFamily(
        _PREFIX + "model_resident_bytes", "Memory counted for a loaded model.", labels=["model"]
    )
    reserved = GaugeMetricFamily(
        _PREFIX + "model_reserved_bytes",
        "Memory counted for a model that is loading.",
        labels=["model"],
    )
    leases = GaugeMetricFamily(
        _PREFIX + "model_leases", "Requests that hold a model now.", labels=["model"]
    )
    sums: dict[tuple[str, str], float] = {}
    for model in view.models.values():
        name = observer.name(model.model)
        for kind, value in (
            ("reserved" if model.loading else "resident", model.size),
            ("leases", model.leases),
        ):
            sums[kind, name] = sums.get((kind, name), 0.0) + value
    for (kind, name), total in sorted(sums.items()):
        family = {"resident": resident, "reserved": reserved, "leases": leases}[kind]
        family.add_metric([name], total)
    yield from (resident, reserved, leases)
    yield GaugeMetricFamily(
        _PREFIX + "memory_used_bytes", "Memory in use, as oMLX counts it.", value=view.used
    )
    if view.ceiling > 0 and not view.never_refuse:
        yield GaugeMetricFamily(
            _PREFIX + "memory_ceiling_bytes",
            "Most memory that models may hold.",
            value=view.ceiling,
        )
    if facts.cache is not None:
        yield GaugeMetricFamily(
            _PREFIX + "cache_limit_bytes",
            "The hot cache budget of the process.",
            value=facts.cache.limit,
        )
        if facts.cache.used is not None:
            yield GaugeMetricFamily(
                _PREFIX + "cache_used_bytes",
                "Memory held by hot caches.",
                value=facts.cache.used,
            )


def _gpu(observer: Observer) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield _histogram(
        "gpu_turn_wait_seconds",
        "Wait for a turn on the GPU, by engine.",
        ("engine",),
        observer.turn_waits,
    )
    yield _histogram(
        "gpu_turn_hold_seconds",
        "Length of a turn on the GPU, by engine.",
        ("engine",),
        observer.turn_holds,
    )
    sections = observer.sections()
    turn = sections.get("gpu_turn")
    if turn is not None and turn["on"]:
        yield GaugeMetricFamily(
            _PREFIX + "gpu_turn_waiting",
            "Engines that wait for the turn.",
            value=len(turn["waiting"]),
        )
        yield CounterMetricFamily(
            _PREFIX + "gpu_turn_timeouts",
            "Waits for the turn given up.",
            value=turn["timeouts"],
        )
    exposure = sections.get("exposure")
    if exposure is None:
        return
    busy = CounterMetricFamily(
        _PREFIX + "gpu_busy_seconds",
        "Time by how many engines had work; 2 means two or more.",
        labels=["engines"],
    )
    for engines, seconds in exposure["busy_s"].items():
        busy.add_metric([engines], seconds)
    yield busy
    yield CounterMetricFamily(
        _PREFIX + "gpu_overlap_seconds",
        "Time in which two or more engines had work.",
        value=exposure["busy_s"]["2"],
    )
    yield CounterMetricFamily(
        _PREFIX + "gpu_lockups", "GPU lockups, each counted once.", value=exposure["lockups"]
    )
    faults = CounterMetricFamily(
        _PREFIX + "gpu_faults", "Reports of GPU faults, by class.", labels=["fault"]
    )
    counts: dict[str, int] = {}
    for row in exposure["faults"]:
        counts[row["fault"]] = counts.get(row["fault"], 0) + row["count"]
    for fault, count in sorted(counts.items()):
        faults.add_metric([fault], count)
    yield faults
    replays = exposure["replays"]
    for name, text, key in (
        ("mtp_replays", "MTP reconcile replays.", "count"),
        ("mtp_replayed_tokens", "Committed tokens that were computed again.", "tokens"),
        ("mtp_replay_seconds", "Time of the replays.", "seconds"),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, value=replays[key])


def _histogram(
    name: str, text: str, labels: tuple[str, ...], store: Mapping[Any, Distribution]
) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for key, values in sorted(store.items()):
        row = [key] if isinstance(key, str) else list(key)
        family.add_metric(row, values.cumulative(), sum_value=values.total)
    return family
