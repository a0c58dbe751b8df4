"""Pages of processes that are gone, added up into one page a rank and one a model.

An engine that is restarted again and again would leave thousands of files, and to delete them would
let counters fall, which Prometheus takes for a restart and counts what is left a second time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from blasst.kernels.exchange.layout import RETIRED, SERVED
from blasst.kernels.exchange.pages import known
from blasst.kernels.exchange.stats import (
    SUFFIX,
    Field,
    StatsError,
    StatsPage,
    StatsWriter,
    read_stats,
    stats_names,
)

_OF_A_PROCESS = ("pid", "vllm_version", "min_context", "refusal", *SERVED)
_HIGHEST = ("generation_read", "generation_stamped", "generation_seen")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_STATE = ("threshold_lambda", "threshold_mag", "threshold_classes", "layers_voting", "layers_dense")


def retire_dead(folder: Path, older_than_s: float) -> int:
    """Add up the pages that dead writers left at least so long ago, and delete them; how many.

    Of several callers at once the counts would be added twice: the holder of the state folder's
    lock alone may call this. A crash in here can do so once. Raises OSError (full disk).
    """
    groups: dict[str, list[StatsPage]] = {}
    now = time.time()
    for name in stats_names(folder):
        if name.startswith(RETIRED):
            continue
        with contextlib.suppress(StatsError, FileNotFoundError):
            page = read_stats(folder / name)
            # A stamp from the future is of a clock that was set back since: as old as it is new.
            old = abs(now - page.updated_at) >= older_than_s
            if old and not page.alive and known(page):
                groups.setdefault(_group(page), []).append(page)
    for group, pages in groups.items():
        _fold(folder, f"{RETIRED}-{group}", pages)
    return sum(map(len, groups.values()))


def _group(page: StatsPage) -> str:
    labels = {k: v for k, v in page.labels.items() if k not in _OF_A_PROCESS}
    fields = [[f.name, f.shape, f.code] for f in page.fields]
    text = json.dumps([page.kind, labels, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fold(folder: Path, name: str, pages: Sequence[StatsPage]) -> None:
    first = pages[0]
    parts = list(pages)
    with contextlib.suppress(FileNotFoundError, StatsError):
        parts.append(read_stats(folder / (name + SUFFIX)))
    labels = {k: v for k, v in first.labels.items() if k not in _OF_A_PROCESS}
    # Readers see it complete or not at all.
    writer = StatsWriter(
        folder, f".{name}", kind=first.kind, labels=labels | {RETIRED: "1"}, fields=first.fields
    )
    try:
        writer.update(**{f.name: _sum(f, parts) for f in first.fields})
        os.replace(writer.path, folder / (name + SUFFIX))
    finally:
        writer.detach()
        writer.path.unlink(missing_ok=True)
    for page in pages:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / page.name)


def _sum(field: Field, pages: Iterable[StatsPage]) -> list[float]:
    columns = zip(*(page.arrays[field.name] for page in pages), strict=True)
    if field.name in _STATE:
        return [math.nan if field.code == "d" else 0] * field.size
    if field.name in _HIGHEST:
        return [max(column) for column in columns]
    if field.code == "d":
        return [sum(column) for column in columns]
    # A damaged count may be near the end of int64; the page must be written all the same.
    return [max(_LEAST, min(_MOST, sum(column))) for column in columns]
