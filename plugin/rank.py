"""One worker of an engine: its counters, its statistics page, and what each request was promised.

A daemon thread writes the page when something changed, so the last step's numbers appear although
no further step comes; a step itself adds to integers and starts a copy of what it skipped.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blasst.kernels.exchange.layout import LAYER_REASONS, RANK, RANK_COUNTERS, rank_fields
from blasst.kernels.exchange.stats import StatsWriter, free_name
from blasst.kernels.stats import SkipCounters
from blasst.kernels.types import Geometry
from blasst.plugin.log import logger
from blasst.plugin.metadata import Votes, tuple_of
from blasst.plugin.stamp import read_stamp

_WARM_UP = ("_v2_", "_warmup_")
"""Requests that vLLM makes up for its own warm-up have ids that begin so."""

_LAST_COPY_S = 1.0
"""How long the end of the worker waits for the last numbers."""


@dataclass(frozen=True)
class RankShape:
    """Where this worker stands, and the part of the model it holds. geometry: what votes as one;
    None where layers differ in it. layers_dense: layers for each of LAYER_REASONS. served: what the
    engine computes with, by the names of layout.SERVED."""

    engine: str
    rank: str
    model_name: str
    num_layers: int
    num_kv_heads: int
    first_layer: int = 0
    first_kv_head: int = 0
    impl: str = ""
    refusal: str = ""
    geometry: Geometry | None = None
    layers_voting: int = 0
    layers_dense: tuple[int, ...] = (0,) * len(LAYER_REASONS)
    served: Mapping[str, str] = field(default_factory=dict)


class Rank:
    """Not thread-safe but for the page: vLLM runs one step at a time in a worker. keeps_page: put
    the page back when someone removes it."""

    def __init__(
        self,
        shape: RankShape,
        folder: Path | None,
        interval_s: float,
        device: Any,
        keeps_page: bool = False,
    ) -> None:
        self.shape = shape
        self._keeps_page = keeps_page
        self.counters = SkipCounters(shape.num_layers, shape.num_kv_heads, device)
        self.counts = dict.fromkeys(RANK_COUNTERS, 0)
        self._step: dict[str, int] = {}
        self._lambdas: dict[str, float] = {}
        self.generation_seen = 0
        self._unstamped_seen = False
        self.voted = False  # a row of the step that is being computed did
        self._ended = 0, dict(self.counts)  # copies of the tiles that were begun, and the counts
        self._page = _open_page(folder, shape)
        self._written: object = None
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
            if stamp is not None:
                self.generation_seen = max(self.generation_seen, stamp.generation)
            if stamp is None:
                self._unstamped(request.req_id)
            elif stamp.skip_lambda is not None and not self.shape.refusal:
                self._lambdas[request.req_id] = stamp.skip_lambda

    def rows(
        self,
        req_ids: Sequence[str],
        lengths: np.ndarray[Any, Any],
        computed: np.ndarray[Any, Any],
        total: int,
        drafts: Collection[str],
    ) -> Votes | None:
        """The rows that vote; None: no row does. lengths: tokens of each row, `total` together;
        computed: tokens of each row's request before them.

        What it counts becomes visible with `end_step`. A row of one token is a decode, and so is
        one that verifies draft tokens.
        """
        self.voted = False
        size = len(lengths)
        if total == size:
            self._step = {"decode_tokens": total}
            return None
        last = lengths.item(-1)
        if last - 1 == total - size and req_ids[size - 1] not in drafts:
            # One chunk of a prompt behind decodes: nearly every step of vLLM's newer runner.
            skip_lambda = self._lambdas.get(req_ids[size - 1])
            if skip_lambda is not None:
                self._step = {
                    "prefill_requests_vote": 1,
                    "prefill_tokens_vote": last,
                    "decode_tokens": total - last,
                }
                self.voted = True
                return tuple_of(Votes, (size, (size - 1,), (last,), computed, [skip_lambda], None))
        return self._rows(req_ids, lengths, computed, total, drafts)

    def _rows(
        self,
        req_ids: Sequence[str],
        lengths: np.ndarray[Any, Any],
        computed: np.ndarray[Any, Any],
        total: int,
        drafts: Collection[str],
    ) -> Votes | None:
        """As `rows`, wherever the longer rows are."""
        size = len(lengths)
        rows: list[int] = []
        voting: list[int] = []
        lambdas: list[float] = []
        dense = dense_tokens = 0
        longer = _longer(lengths, total)
        for row in longer:
            req_id = req_ids[row]
            if req_id in drafts:
                continue
            n: int = lengths.item(row)
            skip_lambda = self._lambdas.get(req_id)
            if skip_lambda is None:
                dense, dense_tokens = dense + 1, dense_tokens + n
            else:
                rows.append(row)
                voting.append(n)
                lambdas.append(skip_lambda)
        vote_tokens = sum(voting)
        self._step = {
            "prefill_requests_vote": len(rows),
            "prefill_requests_dense": dense,
            "prefill_tokens_vote": vote_tokens,
            "prefill_tokens_dense": dense_tokens,
            "decode_tokens": total - vote_tokens - dense_tokens,
        }
        if not rows:
            return None
        self.voted = True
        decodes = len(longer) == len(rows) and total - vote_tokens == size - len(rows)
        others = None if decodes else lengths.tobytes()
        return Votes(size, tuple(rows), tuple(voting), computed, lambdas, others)

    def end_step(self) -> None:
        """Count the step of the last `rows`: all of its attention is behind us in the stream."""
        for name, number in self._step.items():
            self.counts[name] += number
        copies, counts = self._ended[0] + self.voted, dict(self.counts)
        if self.voted:
            self.counters.start_copy(counts)
        self._step, self.voted = {}, False
        self._ended = copies, counts

    def flush(self) -> bool:
        """Write the page if there is something new; False: a copy of the tiles is under way.

        A page never shows tokens whose tiles are still to come: it shows the counts that belong to
        the newest copy of the tiles that has arrived.
        """
        with self._writing:
            ended = self._ended
            if self._page is None or ended is self._written:
                return True
            copies, counts = ended
            number, tiles, noted = self.counters.newest_copy()
            if number < copies:
                counts = noted
            if number or not copies:
                self._page.update(
                    tiles=tiles.numpy().tobytes(), generation_seen=self.generation_seen, **counts
                )
            if number >= copies:
                self._written = ended
            return number >= copies

    def close(self) -> None:
        """Write the last numbers and stop. The page stays: its counts still hold."""
        self._stop.set()
        end = time.monotonic() + _LAST_COPY_S
        while not self.flush() and time.monotonic() < end:
            time.sleep(0.01)
        with self._writing:
            page, self._page = self._page, None
        if page is not None:
            page.detach()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if self._keeps_page:
                self._keep()
            self.flush()

    def _keep(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            if self._page is not None:
                self._page.keep()

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


def _longer(lengths: np.ndarray[Any, Any], total: int) -> list[int]:
    """Rows of more than one token: mostly the one chunk of a prompt that a step has room for."""
    longest = int(lengths.argmax())
    if lengths.item(longest) - 1 == total - len(lengths):
        return [longest]
    found: list[int] = (lengths > 1).nonzero()[0].tolist()
    return found


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
        **shape.served,
    }
    if shape.geometry is not None:
        labels |= {"tile_m": str(shape.geometry.tile_m), "tile_n": str(shape.geometry.tile_n)}
    base = f"rank-{shape.engine}-{shape.rank}-{os.getpid()}"
    fields = rank_fields(shape.num_layers, shape.num_kv_heads)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = free_name(folder, base)
        page = StatsWriter(folder, name, kind=RANK, labels=labels, fields=fields)
        page.update(layers_voting=shape.layers_voting, layers_dense=shape.layers_dense)
        return page
    except OSError as e:
        logger.error("blasst: no statistics page in %s (%s); serving goes on", folder, e.strerror)
        return None
