"""One worker of an engine: its counters, its statistics page, and what each request was promised.

A daemon thread writes the page when something changed, so the last step's numbers appear although
no further step comes; the steps themselves only add to integers.
"""

from __future__ import annotations

import multiprocessing.util
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.layout import RANK, RANK_COUNTERS, rank_fields
from blasst.kernels.exchange.stats import StatsWriter
from blasst.kernels.stats import SkipCounters
from blasst.plugin.log import logger
from blasst.plugin.stamp import read_stamp

_WARM_UP = "_v2_"
"""Requests that vLLM makes up for its own warm-up have ids that begin so."""


@dataclass(frozen=True)
class RankShape:
    """Where this worker stands, and the part of the model it holds."""

    engine: str
    rank: str
    model_name: str
    num_layers: int
    num_kv_heads: int
    first_layer: int = 0
    first_kv_head: int = 0
    impl: str = ""
    refusal: str = ""


class Rank:
    """Not thread-safe but for the page: vLLM runs one step at a time in a worker."""

    def __init__(
        self, shape: RankShape, folder: Path | None, interval_s: float, device: Any
    ) -> None:
        self.shape = shape
        self.counters = SkipCounters(shape.num_layers, shape.num_kv_heads, device)
        self.counts = dict.fromkeys(RANK_COUNTERS, 0)
        self._step: dict[str, int] = {}
        self._lambdas: dict[str, float] = {}
        self._unstamped_seen = False
        self._steps = 0
        self._page = _open_page(folder, shape)
        self._written = -1
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self.flush()
        if self._page is not None:
            threading.Thread(target=self._run, name="blasst-rank", daemon=True).start()
            multiprocessing.util.Finalize(self, self.close, exitpriority=10)

    def note(self, new: Sequence[Any], finished: Collection[str]) -> None:
        """Requests that came to this worker (vLLM's NewRequestData), and those that left."""
        for req_id in finished:
            self._lambdas.pop(req_id, None)
        for request in new:
            if request.sampling_params is None:  # pooling
                continue
            stamp = read_stamp(request.sampling_params.extra_args)
            if stamp is None:
                self._unstamped(request.req_id)
            elif stamp.skip_lambda is not None and not self.shape.refusal:
                self._lambdas[request.req_id] = stamp.skip_lambda

    def rows(
        self,
        req_ids: Sequence[str],
        tokens: Mapping[str, int],
        drafts: Collection[str],
    ) -> list[float | None] | None:
        """Lambda of each batch row, None = vLLM's stock path. None: no row votes.

        What it counts becomes visible with `end_step`. A row of one token is a decode, and so is
        one that verifies draft tokens.
        """
        counts = self._step = dict.fromkeys(RANK_COUNTERS, 0)
        total = sum(tokens[r] for r in req_ids)
        if total == len(req_ids):
            counts["decode_tokens"] += total
            return None
        lambdas: list[float | None] = []
        votes = False
        for req_id in req_ids:
            n = tokens[req_id]
            skip_lambda = None
            if n == 1 or req_id in drafts:
                counts["decode_tokens"] += n
            else:
                skip_lambda = self._lambdas.get(req_id)
                path = "dense" if skip_lambda is None else "vote"
                counts[f"prefill_tokens_{path}"] += n
                counts[f"prefill_requests_{path}"] += 1
                votes |= skip_lambda is not None
            lambdas.append(skip_lambda)
        return lambdas if votes else None

    def end_step(self) -> None:
        """Count the step of the last `rows`: only now are its tiles complete."""
        for name, number in self._step.items():
            self.counts[name] += number
        self._step = {}
        self._steps += 1

    def flush(self) -> None:
        """Write the page if a step ended since it was written.

        Tokens are read before tiles: a page never shows tokens whose tiles are still to come.
        """
        with self._writing:
            steps = self._steps
            if self._page is None or steps == self._written:
                return
            counts = dict(self.counts)
            tiles = self.counters.snapshot()
            self._page.update(tiles=tiles.numpy().tobytes(), **counts)
            self._written = steps

    def close(self) -> None:
        """Write the last numbers and stop. The page stays: its counts still hold."""
        self._stop.set()
        self.flush()
        with self._writing:
            page, self._page = self._page, None
        if page is not None:
            page.detach()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()

    def _unstamped(self, req_id: str) -> None:
        if req_id.startswith(_WARM_UP):
            return
        self.counts["unstamped_requests"] += 1
        if not self._unstamped_seen:
            self._unstamped_seen = True
            logger.warning(
                "blasst: request %s did not pass our admission and runs dense; was it handed to "
                "the engine as an EngineCoreRequest? (said once, all are counted)",
                req_id,
            )


def _open_page(folder: Path | None, shape: RankShape) -> StatsWriter | None:
    if folder is None:
        return None
    labels = {
        "engine": shape.engine,
        "rank": shape.rank,
        "pid": str(os.getpid()),
        "model_name": shape.model_name,
        "impl": shape.impl,
        "first_layer": str(shape.first_layer),
        "first_kv_head": str(shape.first_kv_head),
        "refusal": shape.refusal,
    }
    name = f"rank-{shape.engine}-{shape.rank}-{os.getpid()}"
    fields = rank_fields(shape.num_layers, shape.num_kv_heads)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return StatsWriter(folder, name, kind=RANK, labels=labels, fields=fields)
    except OSError as e:
        logger.error("blasst: no statistics page in %s (%s); serving goes on", folder, e.strerror)
        return None
