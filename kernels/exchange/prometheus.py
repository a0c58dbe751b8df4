"""Statistics pages as Prometheus metric families, for the sidecar's /metrics and for vLLM's own.

Reads files only: a scrape never reaches an engine. prometheus_client is imported at the first use.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from blasst.kernels.exchange.layout import FRONT, LENGTH_CLASSES, TTFT_BUCKETS_S
from blasst.kernels.exchange.pages import (
    CachedPages,
    ClassTotals,
    Histogram,
    ModelTotals,
    RankTotals,
    model_totals,
    rank_totals,
)
from blasst.kernels.exchange.stats import SUFFIX, StatsPage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector, CollectorRegistry

_RANK = ("engine", "rank", "model_name")
_TILE = ("engine", "rank", "layer", "model_name")
_CLASS = ("lambda_class", "prompt_length_class", "model_name")
_FRONT = ("front_end", "model_name")

MOST_CLASSES = 24
"""Pairs of lambda class and prompt-length class that a model shows; callers choose both, and each
costs 244 series. What comes after them is counted as (other, other)."""

OTHER = ("other", "other")
_Classes = dict[tuple[str, str], ClassTotals]


class PagesCollector:
    """A prometheus_client collector over one folder of pages; give it to `register`.

    The pages are read at most once in `max_age_s`, however often the registry is scraped.
    desired_generation: the generation wanted now, or None while it is not known (the sidecar's).
    """

    def __init__(
        self,
        stats_folder: Path,
        *,
        max_age_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        desired_generation: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.cache = CachedPages(stats_folder, max_age_s, clock)
        self._desired_generation = desired_generation
        self._shown: dict[str, set[tuple[str, str]]] = {}
        self._lock = threading.Lock()

    def register(self, registry: CollectorRegistry) -> None:
        """Duck-typed: a base class would import prometheus_client with this module."""
        registry.register(cast("Collector", self))

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering reads no file."""
        return ()

    def collect(self) -> Iterator[Metric]:
        pages = self.cache.pages()
        ranks = rank_totals(pages)
        models = model_totals(pages)
        fronts = [page for page in pages if page.kind == FRONT and page.alive]
        yield _build_info(fronts)
        yield from _tiles(ranks)
        yield from _rank_counters(ranks)
        yield from _front_gauges(fronts, self._desired_generation())
        yield from _front_counters(models)
        with self._lock:
            classes = {model: self._bounded(model, t.classes) for model, t in models.items()}
        yield from _class_metrics(classes)
        yield from _pages(pages, self.cache.unreadable)

    def _bounded(self, model: str, classes: _Classes) -> _Classes:
        """A class that was shown stays shown, so that no counter falls."""
        shown = self._shown.setdefault(model, set())
        for key in sorted(classes, key=lambda key: -classes[key].admitted):
            if len(shown) < MOST_CLASSES:
                shown.add(key)
        found = {key: total for key, total in classes.items() if key in shown}
        rest = [total for key, total in classes.items() if key not in shown]
        if rest:
            found[OTHER] = ClassTotals()
            for total in rest:
                found[OTHER].add(total)
        return found


_Row = tuple[Sequence[str], float]


def _counter(name: str, text: str, labels: Sequence[str], rows: Iterable[_Row]) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[_Row]) -> Metric:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _build_info(fronts: Sequence[StatsPage]) -> Metric:
    versions = sorted({page.labels.get("vllm_version", "") for page in fronts}) or [""]
    rows = [((_own_version(), version), 1.0) for version in versions]
    return _gauge("blasst_build_info", "Versions; always 1.", ("version", "vllm_version"), rows)


@functools.cache
def _own_version() -> str:
    return importlib.metadata.version("blasst")


def _tiles(ranks: Sequence[RankTotals]) -> Iterator[Metric]:
    for index, verb in enumerate(("visited", "skipped")):
        rows = [
            ((r.engine, r.rank, str(layer), r.model_name), float(pair[index]))
            for r in ranks
            for layer, pair in r.by_layer().items()
        ]
        text = f"P.V tiles {verb} by prefill under a threshold; skip rate = skipped / visited."
        yield _counter(f"blasst_tiles_{verb}", text, _TILE, rows)


def _rank_counters(ranks: Sequence[RankTotals]) -> Iterator[Metric]:
    def by_path(name: str) -> list[_Row]:
        return [
            ((path, r.engine, r.rank, r.model_name), float(r.counters[f"{name}_{path}"]))
            for r in ranks
            for path in ("vote", "dense")
        ]

    def plain(name: str) -> list[_Row]:
        return [((r.engine, r.rank, r.model_name), float(r.counters[name])) for r in ranks]

    yield _counter(
        "blasst_prefill_tokens",
        "Query tokens prefilled, by path: with the skip vote or dense. Every rank counts them.",
        ("path", *_RANK),
        by_path("prefill_tokens"),
    )
    yield _counter(
        "blasst_prefill_request_steps",
        "(request, engine step) pairs that prefilled, by path.",
        ("path", *_RANK),
        by_path("prefill_requests"),
    )
    yield _counter(
        "blasst_decode_tokens", "Tokens decoded (always dense).", _RANK, plain("decode_tokens")
    )
    yield _counter(
        "blasst_unstamped_requests",
        "Requests that reached a worker without a threshold stamp and ran dense.",
        _RANK,
        plain("unstamped_requests"),
    )
    yield _gauge(
        "blasst_layers",
        "Attention layers of a rank, by path and why they are dense (empty for those that vote).",
        ("path", "reason", *_RANK),
        [
            ((path, reason, r.engine, r.rank, r.model_name), float(number))
            for r in ranks
            if r.alive
            for path, reason, number in (
                ("vote", "", r.layers_voting),
                *(("dense", reason, n) for reason, n in r.layers_dense.items() if n),
            )
        ],
    )
    yield _gauge(
        "blasst_rank_generation",
        "Newest generation that a request's stamp brought to a rank; 0: none yet.",
        _RANK,
        [((r.engine, r.rank, r.model_name), float(r.generation_seen)) for r in ranks if r.alive],
    )


def _front_gauges(fronts: Sequence[StatsPage], desired: int | None) -> Iterator[Metric]:
    def name(page: StatsPage) -> str:
        return page.name.removesuffix(SUFFIX)

    def threshold(field: str) -> list[_Row]:
        # Not a number: dense, or no MAG for lambda 0. An absent series says so; a zero would lie.
        rows = [((name(p), p.labels.get("model_name", "")), p.scalar(field)) for p in fronts]
        return [row for row in rows if not math.isnan(row[1])]

    yield _gauge(
        "blasst_threshold_lambda",
        "Deployment lambda in force in a front end (natural base); absent while dense.",
        _FRONT,
        threshold("threshold_lambda"),
    )
    yield _gauge(
        "blasst_threshold_mag",
        "The same as MAG: lambda = 2^(-MAG/1000).",
        _FRONT,
        threshold("threshold_mag"),
    )
    yield _gauge(
        "blasst_threshold_class_lambda",
        "Deployment lambda in force for the longest prompt of a length class (gt_1m: 1M + 1 "
        "tokens), schedule, scale and min_context included; absent where dense.",
        ("prompt_length_class", *_FRONT),
        [
            ((cls, name(p), p.labels.get("model_name", "")), value)
            for p in fronts
            for cls, value in zip(
                LENGTH_CLASSES, p.arrays.get("threshold_classes", ()), strict=False
            )
            if not math.isnan(value)
        ],
    )
    generations: list[_Row] = [
        ((state, name(p), p.labels.get("model_name", "")), p.scalar(f"generation_{state}"))
        for p in fronts
        for state in ("read", "stamped")
    ]
    if desired is not None:
        generations.append((("desired", "", ""), float(desired)))
    yield _gauge(
        "blasst_threshold_generation",
        "Generation of the deployment threshold: desired; read and last stamped by a front end.",
        ("state", *_FRONT),
        generations,
    )


def _front_counters(models: dict[str, ModelTotals]) -> Iterator[Metric]:
    rows = sorted(models.items())
    yield _counter(
        "blasst_desired_read_errors",
        "Changed desired-state files that a front end could not read.",
        ("model_name",),
        [((model,), float(total.desired_read_errors)) for model, total in rows],
    )
    yield _counter(
        "blasst_requests_rejected",
        "Requests refused for bad blasst_* arguments.",
        ("model_name",),
        [((model,), float(total.requests_rejected)) for model, total in rows],
    )
    yield _counter(
        "blasst_fallbacks",
        "Requests that ran dense although a threshold was in force, by reason.",
        ("reason", "model_name"),
        [
            ((reason, model), float(number))
            for model, total in rows
            for reason, number in total.requests_dense.items()
        ],
    )


def _class_metrics(models: dict[str, _Classes]) -> Iterator[Metric]:
    rows = [
        ((*key, model), total)
        for model, classes in sorted(models.items())
        for key, total in sorted(classes.items())
    ]
    yield _counter(
        "blasst_requests_admitted",
        "Requests admitted, by class of lambda and of prompt length (tokens).",
        _CLASS,
        [(labels, float(total.admitted)) for labels, total in rows],
    )
    yield _histogram(
        "blasst_time_to_first_token_seconds",
        "Admission to first token, by class of lambda and of prompt length (tokens).",
        [(labels, total.ttft) for labels, total in rows],
    )
    yield _histogram(
        "blasst_prefill_seconds",
        "First scheduled to first token (no waiting), by class of lambda and of prompt length.",
        [(labels, total.prefill) for labels, total in rows],
    )


def _histogram(name: str, text: str, rows: Iterable[tuple[Sequence[str], Histogram]]) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=_CLASS)
    edges = [*map(repr, TTFT_BUCKETS_S), "+Inf"]
    for labels, found in rows:
        if found.count:
            cumulative = itertools.accumulate(found.buckets)
            buckets = [(edge, float(n)) for edge, n in zip(edges, cumulative, strict=True)]
            family.add_metric(labels, buckets, found.sum_s)
    return family


def _pages(pages: Sequence[StatsPage], unreadable: int) -> Iterator[Metric]:
    now = time.time()
    yield _gauge(
        "blasst_stats_age_seconds",
        "Time since a running process last wrote its statistics page: a front end does it all the "
        "time, a rank only after it worked, so that of an idle rank grows.",
        ("process",),
        [
            ((p.name.removesuffix(SUFFIX),), max(0.0, now - p.updated_at))
            for p in pages
            if p.alive and p.updated_at > 0
        ],
    )
    alive = sum(p.alive for p in pages)
    yield _gauge(
        "blasst_stats_pages",
        "Statistics pages by whether their writer still runs; dead ones still count above, "
        "unreadable ones (damaged, or of another release) do not.",
        ("state",),
        [
            (("live",), float(alive)),
            (("dead",), float(len(pages) - alive)),
            (("unreadable",), float(unreadable)),
        ],
    )
