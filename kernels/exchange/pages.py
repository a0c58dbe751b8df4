"""All statistics pages of one folder: read at most once an interval, and added up per process.

Pages of the same engine and rank (a restarted worker, a dead one that nobody removed) add up, so
that a counter seen from outside never falls while its page exists.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blasst.kernels.exchange.layout import (
    FRONT,
    LAMBDA_CLASSES,
    LATER_FRONT_FIELDS,
    LATER_RANK_FIELDS,
    LAYER_REASONS,
    LENGTH_CLASSES,
    RANK,
    RANK_COUNTERS,
    REQUEST_REASONS,
    RETIRED,
    SERVED,
    TTFT_BUCKETS_S,
    front_fields,
    tiles_of,
)
from blasst.kernels.exchange.stats import (
    Field,
    StatsError,
    StatsPage,
    read_stats,
    stats_names,
)

_LATER = {FRONT: frozenset(LATER_FRONT_FIELDS), RANK: frozenset(LATER_RANK_FIELDS)}
_FRONT_FIELDS = frozenset(front_fields()) - frozenset(LATER_FRONT_FIELDS)
_RANK_SCALARS = frozenset(Field(name, (1,)) for name in RANK_COUNTERS)
_FIRST_MAX_DIGITS = 6


@dataclass
class RankTotals:
    """One rank of one engine. tiles: (layer, kv head) of the whole model -> (visited, skipped).
    Of its newest page: geometry (rows x keys that vote as one, "" unknown), the newest generation
    that a stamp brought it, how many layers vote, reason -> how many are dense, and what it
    computes with by the names of SERVED."""

    model_name: str
    engine: str
    rank: str
    impl: str = ""
    geometry: str = ""
    alive: bool = False
    updated_at: float = 0.0
    generation_seen: int = 0
    layers_voting: int = 0
    layers_dense: dict[str, int] = field(default_factory=dict)
    served: dict[str, str] = field(default_factory=dict)
    tiles: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RANK_COUNTERS, 0))

    def by_layer(self) -> dict[int, tuple[int, int]]:
        """Layer -> (visited, skipped), its kv heads added up."""
        found: dict[int, tuple[int, int]] = {}
        for (layer, _), (visited, skipped) in sorted(self.tiles.items()):
            before = found.get(layer, (0, 0))
            found[layer] = (before[0] + visited, before[1] + skipped)
        return found


@dataclass
class Histogram:
    """Seconds, counted into TTFT_BUCKETS_S and one above. buckets: not cumulative."""

    count: int = 0
    sum_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))

    def add(self, count: float, sum_s: float, buckets: Sequence[float]) -> None:
        self.count += int(count)
        self.sum_s += sum_s
        self.buckets = [a + int(b) for a, b in zip(self.buckets, buckets, strict=True)]


@dataclass
class ClassTotals:
    """Requests of one (model, lambda class, prompt-length class)."""

    admitted: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    prefill: Histogram = field(default_factory=Histogram)

    def add(self, other: ClassTotals) -> None:
        self.admitted += other.admitted
        for mine, its in ((self.ttft, other.ttft), (self.prefill, other.prefill)):
            mine.add(its.count, its.sum_s, its.buckets)


@dataclass
class ModelTotals:
    """What the front ends of one model counted; only classes that saw a request."""

    desired_read_errors: int = 0
    requests_rejected: int = 0
    requests_dense: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(REQUEST_REASONS, 0)
    )
    classes: dict[tuple[str, str], ClassTotals] = field(default_factory=dict)


class CachedPages:
    """Thread-safe: however many callers, the files are read at most once in `max_age_s`.

    unreadable: how many files of the last reading were damaged or of another release. lock: held
    while files are read; hold it to change several of them as one.
    """

    def __init__(
        self,
        folder: Path,
        max_age_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._max_age_s = max_age_s
        self._clock = clock
        self.lock = threading.Lock()
        self._read_at: float | None = None
        self._pages: tuple[StatsPage, ...] = ()
        self.unreadable = 0

    def pages(self) -> tuple[StatsPage, ...]:
        """Pages of a layout that this release knows; a missing or closed folder gives none."""
        with self.lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= self._max_age_s:
                self._pages, self.unreadable = _read(self.folder)
                self._read_at = now
            return self._pages


def rank_totals(pages: Iterable[StatsPage]) -> list[RankTotals]:
    """Rank pages added up per (model, engine, rank), in that order."""
    totals: dict[tuple[str, str, str], RankTotals] = {}
    for page in pages:
        if page.kind != RANK:
            continue
        labels = page.labels
        key = (labels.get("model_name", ""), labels.get("engine", "0"), labels.get("rank", "0"))
        total = totals.setdefault(key, RankTotals(*key))
        # A living page before a dead one, whose stamp may be of a clock that was set back since.
        newest = (page.alive, page.updated_at) >= (total.alive, total.updated_at)
        if newest and RETIRED not in labels:
            _take_state(total, page)
        total.alive |= page.alive
        _add_tiles(total, page)
        for name in RANK_COUNTERS:
            total.counters[name] += int(page.scalar(name))
    return [totals[key] for key in sorted(totals)]


def model_totals(pages: Iterable[StatsPage]) -> dict[str, ModelTotals]:
    """Front-end pages added up per model name."""
    totals: dict[str, ModelTotals] = {}
    for page in pages:
        if page.kind != FRONT:
            continue
        total = totals.setdefault(page.labels.get("model_name", ""), ModelTotals())
        total.desired_read_errors += int(page.scalar("desired_read_errors"))
        total.requests_rejected += int(page.scalar("requests_rejected"))
        for reason, number in _by_reason(page, "requests_dense", REQUEST_REASONS).items():
            total.requests_dense[reason] += number
        _add_classes(total, page)
    return totals


def _read(folder: Path) -> tuple[tuple[StatsPage, ...], int]:
    pages, unreadable = [], 0
    with contextlib.suppress(OSError):
        for name in stats_names(folder):
            try:
                page = read_stats(folder / name)
            except FileNotFoundError:
                continue
            except StatsError:
                unreadable += 1
                continue
            if known(page):
                pages.append(page)
            else:
                unreadable += 1
    return tuple(pages), unreadable


def known(page: StatsPage) -> bool:
    """Of a layout that this release adds up."""
    fields = frozenset(page.fields)
    if len({f.name for f in fields}) != len(page.fields):
        return False
    # All that came later, or nothing of it: an older release.
    later = _LATER.get(page.kind, frozenset())
    if {f.name for f in fields} & {f.name for f in later} and not later <= fields:
        return False
    if page.kind == FRONT:
        return fields >= _FRONT_FIELDS
    tiles = next((f for f in fields if f.name == "tiles"), Field("tiles", ()))
    firsts = [page.labels.get(name, "0") for name in ("first_layer", "first_kv_head")]
    return (
        page.kind == RANK
        and tiles == Field("tiles", (*tiles.shape[:2], 2))
        and len(tiles.shape) == 3
        and fields >= _RANK_SCALARS
        and all(first.isdecimal() and len(first) <= _FIRST_MAX_DIGITS for first in firsts)
    )


def _add_tiles(total: RankTotals, page: StatsPage) -> None:
    layers, heads, _ = page.shape("tiles")
    tiles = page.arrays["tiles"]
    first_layer = int(page.labels.get("first_layer", "0"))
    first_head = int(page.labels.get("first_kv_head", "0"))
    for layer in range(layers):
        for head in range(heads):
            at = 2 * (layer * heads + head)
            where = (first_layer + layer, first_head + head)
            visited, skipped = total.tiles.get(where, (0, 0))
            total.tiles[where] = (visited + int(tiles[at]), skipped + int(tiles[at + 1]))


def _take_state(total: RankTotals, page: StatsPage) -> None:
    labels = page.labels
    total.updated_at = page.updated_at
    total.impl = labels.get("impl", "")
    total.geometry = tiles_of(labels)
    total.generation_seen = int(page.scalar("generation_seen", 0))
    total.layers_voting = int(page.scalar("layers_voting", 0))
    total.layers_dense = _by_reason(page, "layers_dense", LAYER_REASONS)
    total.served = {name: labels[name] for name in SERVED if labels.get(name)}


def _by_reason(page: StatsPage, name: str, reasons: tuple[str, ...]) -> dict[str, int]:
    numbers = page.arrays.get(name, [0] * len(reasons))
    return {reason: int(n) for reason, n in zip(reasons, numbers, strict=True)}


def _add_classes(total: ModelTotals, page: StatsPage) -> None:
    arrays = page.arrays
    width = len(TTFT_BUCKETS_S) + 1
    for i, lambda_class in enumerate(LAMBDA_CLASSES):
        for j, length_class in enumerate(LENGTH_CLASSES):
            at = i * len(LENGTH_CLASSES) + j
            admitted = int(arrays["requests_admitted"][at])
            if not admitted and not arrays["ttft_count"][at]:
                continue
            entry = total.classes.setdefault((lambda_class, length_class), ClassTotals())
            entry.admitted += admitted
            for name, histogram in (("ttft", entry.ttft), ("prefill", entry.prefill)):
                if f"{name}_count" in arrays:
                    histogram.add(
                        arrays[f"{name}_count"][at],
                        arrays[f"{name}_sum_seconds"][at],
                        arrays[f"{name}_bucket"][at * width : (at + 1) * width],
                    )
