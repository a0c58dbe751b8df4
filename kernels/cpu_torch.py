"""The CPU implementation: large matmuls over a chunk of key blocks, P.V only for those that count.

A skipped block's row max lies below the running max in every row, so the running max is a plain
cumulative max and the votes of a whole chunk of blocks are taken at once. float32 throughout;
bfloat16 and float16 are widened first. lambda 0 cannot skip: it is bit for bit the dense result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.tiles import blocks, key_end, mask_scores, partial_blocks, visited_blocks
from blasst.kernels.types import LN_2, LOG2_E
from blasst.kernels.workers import run_all

DENSE_SCORES = 1 << 20
"""Scores of one dense chunk, all heads of a group: 2 MiB was the best of 0.5 to 8 on a Zen 5."""

NOTHING_SEEN = torch.finfo(torch.float32).min
"""The running max of a row that has seen no key. Finite: minus it, a hidden score stays -inf, so
such a row votes skip and adds 0, and no NaN arises."""

SUM_RANGE = (2.0**-100, 2.0**96)
"""A row sum of exp2(score) in here lost nothing to overflow or underflow although no maximum was
taken off, which saves a pass over the scores (two without a vote). Outside, the tile is computed
again the usual way, and so are the head's later ones."""

VOTE_SCORES = 1 << 20
"""Scores of one chunk with a vote: larger, so that the kept blocks make large matmuls."""


@dataclass(frozen=True)
class _Maps:
    """What the query tiles of one request visit: bool [num_heads or 1, m_blocks, n_blocks].

    first: [num_heads or 1, m_blocks, 1], the block that each tile visits first, -1 = none.
    """

    visited: torch.Tensor
    partial: torch.Tensor | None
    first: torch.Tensor


class _Head:
    """One kv head of a request: its keys and values, made by the first tile that needs them.

    k, v: float32 [seqlen_k rounded up to whole blocks, head_dim], zeros at the end; k is scaled so
    that scores are in log2 units.
    log2_lambda: None = no vote. skipped: blocks skipped by the tiles that are done. shifted:
    whether scores need the running max taken off before exp2 (see SUM_RANGE).
    """

    def __init__(self, call: Call, request: Request, maps: _Maps, kv_head: int) -> None:
        self.call, self.request, self.maps, self.kv_head = call, request, maps, kv_head
        self.tile_n = call.geometry.tile_n
        log2_lambda = None if call.log2_lambda is None else call.log2_lambda[request.index]
        self.log2_lambda = None if log2_lambda == -math.inf else log2_lambda
        self.skipped = 0
        self.shifted = False
        self._lock = threading.Lock()
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self._open = maps.visited.shape[1]

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            if self._kv is None:
                size = blocks(self.request.seqlen_k, self.tile_n) * self.tile_n
                pair = self.call.gather(self.request, self.kv_head)
                k, v = (torch.zeros(size, t.shape[1]) for t in pair)
                k[: self.request.seqlen_k] = pair[0]
                k *= self.call.softmax_scale * LOG2_E
                v[: self.request.seqlen_k] = pair[1]
                self._kv = k, v
            return self._kv

    def done(self, skipped: int) -> None:
        """One query tile is finished; the last one frees the keys."""
        with self._lock:
            self.skipped += skipped
            self._open -= 1
            if not self._open:
                self._kv = None


@dataclass
class _Row:
    """One tile of query rows of the heads that share a kv head, and its running softmax.

    q: float32 [group, rows, head_dim]; maximum, row_sum: [group, rows]; acc: like q. visited,
    partial: bool [group, n_blocks], None = all, none. first: [group, 1], the block that each head
    visits first; None = no vote. shifted: row_sum and acc are relative to 2 ** maximum, and maximum
    is kept; else they are absolute.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: range
    heads: range
    maximum: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor
    visited: torch.Tensor | None
    partial: torch.Tensor | None
    first: torch.Tensor | None
    shifted: bool
    skipped: int = 0


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """Fill `out`, add to `counters`, return lse [num_heads, total_q]."""
    lse = torch.full((call.q.shape[1], call.q.shape[0]), -math.inf)
    heads = []
    for request in call.requests:
        if request.seqlen_q and not request.seqlen_k:
            out[request.q_start : request.q_start + request.seqlen_q] = 0
        elif request.seqlen_q:
            maps = _maps(call, request)
            heads += [_Head(call, request, maps, h) for h in range(call.problem.num_kv_heads)]
    run_all(_tiles(heads, out, lse))
    if counters is not None and call.log2_lambda is not None:
        for head in heads:
            per_head = head.maps.visited.sum((1, 2)).expand(call.problem.num_heads)
            counters[head.kv_head, 0] += per_head[_head_range(call, head.kv_head)].sum()
            counters[head.kv_head, 1] += head.skipped
    return lse


def _maps(call: Call, request: Request) -> _Maps:
    visited = visited_blocks(call, request)
    mask = call.spec.block_mask
    return _Maps(
        visited,
        None if mask is None else partial_blocks(mask, request, visited),
        torch.where(visited, torch.arange(visited.shape[2]), -1).amax(2, keepdim=True),
    )


def _head_range(call: Call, kv_head: int) -> slice:
    return slice(kv_head * call.group_size, (kv_head + 1) * call.group_size)


def _tiles(
    heads: list[_Head], out: torch.Tensor, lse: torch.Tensor
) -> Iterator[Callable[[], None]]:
    """The tiles of query rows, those with the most keys first, so that threads end together."""
    for head in heads:
        for m in reversed(range(head.maps.visited.shape[1])):
            yield partial(_tile, head, m, out, lse)


def _tile(head: _Head, m: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    row = _attend(head, m)
    if not row.shifted:
        low, high = row.row_sum.aminmax()
        if not (SUM_RANGE[0] <= float(low) and float(high) <= SUM_RANGE[1]):
            head.shifted = True
            row = _attend(head, m)
    # Only a row that has seen nothing has less, and its acc is 0.
    row.acc /= row.row_sum.clamp(min=SUM_RANGE[0])[..., None]
    at = slice(head.request.q_start + row.rows.start, head.request.q_start + row.rows.stop)
    span = slice(row.heads.start, row.heads.stop)
    out[at, span] = row.acc.transpose(0, 1).to(out.dtype)
    lse_row = row.row_sum.log()
    if row.shifted:
        lse_row += row.maximum * LN_2
    lse[span, at] = lse_row
    head.done(row.skipped)


def _attend(head: _Head, m: int) -> _Row:
    """The whole softmax of one tile, from the diagonal to the left."""
    row = _start(head, m)
    end = key_end(head.call, head.request, row.rows.stop)
    chunk = _chunk_keys(head, row, end)
    while end > 0:
        start = (end - 1) // chunk * chunk
        span = slice(start // head.tile_n, blocks(end, head.tile_n))
        if row.visited is None or bool(row.visited[:, span].any()):
            _accumulate(head, row, _scores(head, row, start, end), span)
        end = start
    return row


def _start(head: _Head, m: int) -> _Row:
    call, request, maps = head.call, head.request, head.maps
    tile_m = call.geometry.tile_m
    rows = range(m * tile_m, min((m + 1) * tile_m, request.seqlen_q))
    heads = _head_range(call, head.kv_head)
    q = call.q[request.q_start + rows.start : request.q_start + rows.stop, heads].transpose(0, 1)
    q = q.to(torch.float32, memory_format=torch.contiguous_format)
    k, v = head.keys_values()
    vote, masked = head.log2_lambda is not None, maps.partial is not None

    def of_heads(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[:, m].expand(call.problem.num_heads, -1)[heads]

    return _Row(
        q=q,
        k=k,
        v=v,
        rows=rows,
        heads=range(heads.start, heads.stop),
        maximum=torch.full(q.shape[:2], NOTHING_SEEN),
        row_sum=torch.zeros(q.shape[:2]),
        acc=torch.zeros_like(q),
        visited=of_heads(maps.visited) if masked else None,
        partial=of_heads(maps.partial),
        first=of_heads(maps.first) if vote else None,
        shifted=head.shifted,
    )


def _chunk_keys(head: _Head, row: _Row, end: int) -> int:
    """Keys of one chunk, whole blocks: as many as the scratch allows, in chunks of equal size."""
    scores = DENSE_SCORES if head.log2_lambda is None else VOTE_SCORES
    most = max(1, scores // (row.q.shape[0] * row.q.shape[1] * head.tile_n))
    total = max(1, blocks(end, head.tile_n))
    return blocks(total, blocks(total, most)) * head.tile_n


def _scores(head: _Head, row: _Row, start: int, end: int) -> torch.Tensor:
    """S = Q @ K.T in log2 units, [group, rows, keys rounded up to whole blocks], -inf = hidden."""
    group, rows, _ = row.q.shape
    stop = blocks(end, head.tile_n) * head.tile_n
    scores = _matmul(row.q.flatten(0, 1), row.k[start:stop]).view(group, rows, stop - start)
    if end < stop:
        scores[..., end - start :] = -math.inf
    first = head.request.context + row.rows.start
    if head.call.spec.causal and first < end:
        _hide_above(scores[..., max(0, first - start) : end - start], min(0, first - start))
    if row.visited is not None and row.partial is not None:
        span = slice(start // head.tile_n, stop // head.tile_n)
        unmasked = ~row.partial[:, None, span].repeat_interleave(head.tile_n, -1)
        visible = unmasked | mask_scores(
            head.call, head.request, scores, row.heads, row.rows, start
        )
        visible &= row.visited[:, None, span].repeat_interleave(head.tile_n, -1)
        scores.masked_fill_(~visible, -math.inf)
    return scores


def _hide_above(scores: torch.Tensor, diagonal: int) -> None:
    """Above this diagonal, whatever is there becomes -inf; six times faster than masked_fill_."""
    scores.tril_(diagonal)
    scores += torch.full(scores.shape[1:], -math.inf).triu_(diagonal + 1)


def _accumulate(head: _Head, row: _Row, scores: torch.Tensor, span: slice) -> None:
    """The running softmax over one chunk: O += P @ V for the blocks that are kept."""
    kept = None if row.visited is None else row.visited[:, span]
    maximum = row.maximum
    if head.log2_lambda is not None:
        maximum, votes = _vote(head.log2_lambda, row, scores, span)
        skips = votes & (torch.arange(span.start, span.stop) != row.first)
        if kept is not None:
            skips &= kept
        skipped = int(skips.sum())
        row.skipped += skipped
        if skipped:
            kept = ~skips if kept is None else kept & ~skips
    elif row.shifted:
        maximum = torch.maximum(row.maximum, scores.amax(-1))
    if row.shifted:
        rescale = torch.exp2(row.maximum - maximum)
        row.row_sum *= rescale
        row.acc *= rescale[..., None]
    row.maximum = maximum
    shift = maximum if row.shifted else None
    v = row.v[span.start * head.tile_n : span.stop * head.tile_n]
    if kept is None or bool(kept.all()):
        _add(scores, shift, row.row_sum, row.acc, v)
    elif bool((kept == kept[0]).all()):
        _add_kept(scores, shift, (row.row_sum, row.acc), v, kept[0])
    else:
        for g in range(kept.shape[0]):
            state = row.row_sum[g : g + 1], row.acc[g : g + 1]
            shift_g = None if shift is None else shift[g : g + 1]
            _add_kept(scores[g : g + 1], shift_g, state, v, kept[g])


def _vote(
    log2_lambda: float, row: _Row, scores: torch.Tensor, span: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running max after the chunk, [group, rows], and which blocks every row votes to skip."""
    group, rows, _ = scores.shape
    block_max = scores.view(group, rows, span.stop - span.start, -1).amax(-1)
    block_max = block_max.flip(-1)
    running_max = torch.maximum(block_max.cummax(-1).values, row.maximum[..., None])
    votes = (block_max - running_max).amax(1) < log2_lambda
    return running_max[..., -1], votes.flip(-1)


def _add_kept(
    scores: torch.Tensor,
    shift: torch.Tensor | None,
    state: tuple[torch.Tensor, torch.Tensor],
    v: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """`_add` for the blocks in `kept` [n_blocks], gathered side by side."""
    index = kept.nonzero()[:, 0]
    if index.numel():
        group, rows, _ = scores.shape
        blocked = scores.view(group, rows, kept.numel(), -1)
        v_kept = v.view(kept.numel(), -1, v.shape[1]).index_select(0, index).flatten(0, 1)
        _add(blocked.index_select(2, index).flatten(2), shift, *state, v_kept)


def _add(
    scores: torch.Tensor,
    shift: torch.Tensor | None,
    row_sum: torch.Tensor,
    acc: torch.Tensor,
    v: torch.Tensor,
) -> None:
    p = (scores if shift is None else scores.sub_(shift[..., None])).exp2_()
    row_sum += p.sum(-1)
    # O += P @ V
    acc += _matmul(p.flatten(0, 1), v.t()).view_as(acc)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.T of float32 matrices; oneDNN where torch has it, twice as fast as MKL on AMD."""
    if torch._C._has_mkldnn:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return product
    return a @ b.t()
