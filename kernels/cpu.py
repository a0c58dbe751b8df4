"""The CPU implementation: large matmuls over a chunk of key blocks, P.V only for those that count.

A skipped block's row max lies below the running max in every row, so the running max is a plain
cumulative max and the votes of a whole chunk of blocks are taken at once. float32 throughout;
bfloat16 and float16 are widened first. lambda 0 cannot skip: it is bit for bit the dense result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.tiles import blocks, key_end, mask_scores, partial_blocks, visited_blocks
from blasst.kernels.types import LN_2, LOG2_E

CHUNK_KEYS = 2048
"""Keys whose scores are held at once: [group, tile_m, CHUNK_KEYS] float32 has to stay in cache."""


@dataclass
class _Maps:
    """What the query tiles of one request visit: bool [num_heads or 1, m_blocks, n_blocks]."""

    visited: torch.Tensor
    partial: torch.Tensor | None


@dataclass
class _Row:
    """One tile of query rows of the heads that share a kv head, and its running softmax.

    q: float32 [group, rows, head_dim], scaled so that scores are in log2 units; maximum, row_sum:
    [group, rows]; acc: like q. visited, partial: bool [group, n_blocks], None = all, none.
    first: [group, 1], the block that each head visits first.
    """

    q: torch.Tensor
    rows: range
    heads: range
    maximum: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor
    visited: torch.Tensor | None
    partial: torch.Tensor | None
    first: torch.Tensor
    skipped: int = 0


@dataclass(frozen=True)
class _Head:
    """The request and one kv head of it: float32 k_t [head_dim, seqlen_k], v [seqlen_k, head_dim].

    log2_lambda: None = no vote. scores: scratch for one chunk.
    """

    call: Call
    request: Request
    k_t: torch.Tensor
    v: torch.Tensor
    log2_lambda: float | None
    scores: torch.Tensor


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """Fill `out`, add to `counters`, return lse [num_heads, total_q]."""
    lse = torch.full((call.q.shape[1], call.q.shape[0]), -math.inf)
    geometry = call.spec.geometry
    longest = max((r.seqlen_k for r in call.requests), default=0)
    columns = min(_chunk_keys(geometry.tile_n), blocks(longest, geometry.tile_n) * geometry.tile_n)
    scores = torch.empty(call.group_size * geometry.tile_m * columns)
    for request in call.requests:
        if not request.seqlen_k:
            out[request.q_start : request.q_start + request.seqlen_q] = 0
        elif request.seqlen_q:
            _request(call, request, scores, (out, lse), counters)
    return lse


def _request(
    call: Call,
    request: Request,
    scores: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor],
    counters: torch.Tensor | None,
) -> None:
    maps = _Maps(visited_blocks(call, request), None)
    if call.spec.block_mask is not None:
        maps.partial = partial_blocks(call.spec.block_mask, request, maps.visited)
    log2_lambda = None if call.log2_lambda is None else call.log2_lambda[request.index]
    if log2_lambda == -math.inf:
        log2_lambda = None
    skipped = []
    for kv_head in range(call.problem.num_kv_heads):
        k, v = call.gather(request, kv_head)
        head = _Head(call, request, k.float().t(), v.float(), log2_lambda, scores)
        skipped.append(0)
        for m in range(maps.visited.shape[1]):
            row = _start(call, request, maps, kv_head, m)
            _attend(head, row)
            _finish(request, row, *results)
            skipped[-1] += row.skipped
    if counters is not None and call.log2_lambda is not None:
        per_head = maps.visited.sum((1, 2)).expand(call.problem.num_heads)
        counters[:, 0] += per_head.view(call.problem.num_kv_heads, -1).sum(1)
        counters[:, 1] += torch.tensor(skipped)


def _start(call: Call, request: Request, maps: _Maps, kv_head: int, m: int) -> _Row:
    tile_m, group = call.spec.geometry.tile_m, call.group_size
    rows = range(m * tile_m, min((m + 1) * tile_m, request.seqlen_q))
    heads = range(kv_head * group, (kv_head + 1) * group)
    at = slice(request.q_start + rows.start, request.q_start + rows.stop)
    q = call.q[at, heads.start : heads.stop].transpose(0, 1).float()
    q = (q * (call.softmax_scale * LOG2_E)).contiguous()
    visited = maps.visited[:, m].expand(call.problem.num_heads, -1)[heads.start : heads.stop]
    partial = None
    if maps.partial is not None:
        partial = maps.partial[:, m].expand(call.problem.num_heads, -1)[heads.start : heads.stop]
    order = torch.arange(visited.shape[1])
    return _Row(
        q=q,
        rows=rows,
        heads=heads,
        maximum=torch.full(q.shape[:2], -math.inf),
        row_sum=torch.zeros(q.shape[:2]),
        acc=torch.zeros_like(q),
        visited=None if partial is None else visited,
        partial=partial,
        first=torch.where(visited, order, -1).amax(1, keepdim=True),
    )


def _finish(request: Request, row: _Row, out: torch.Tensor, lse: torch.Tensor) -> None:
    heads = slice(row.heads.start, row.heads.stop)
    at = slice(request.q_start + row.rows.start, request.q_start + row.rows.stop)
    row.acc /= row.row_sum.masked_fill(row.row_sum == 0, 1.0)[..., None]
    out[at, heads] = row.acc.transpose(0, 1).to(out.dtype)
    lse[heads, at] = (row.maximum + row.row_sum.log2()) * LN_2


def _attend(head: _Head, row: _Row) -> None:
    """All chunks of key blocks that the row reaches, from the diagonal to the left."""
    tile_n = head.call.spec.geometry.tile_n
    chunk = _chunk_keys(tile_n)
    end = key_end(head.call, head.request, row.rows.stop)
    while end > 0:
        start = (end - 1) // chunk * chunk
        span = slice(start // tile_n, blocks(end, tile_n))
        if row.visited is None or bool(row.visited[:, span].any()):
            scores = _scores(head, row, start, end)
            _accumulate(head, row, scores, start, span)
        end = start


def _scores(head: _Head, row: _Row, start: int, end: int) -> torch.Tensor:
    """S = Q @ K.T in log2 units, [group, rows, keys rounded up to whole blocks], -inf = hidden."""
    group, rows, _ = row.q.shape
    tile_n = head.call.spec.geometry.tile_n
    columns = blocks(end - start, tile_n) * tile_n
    flat = head.scores[: group * rows * columns].view(group * rows, columns)
    torch.mm(row.q.flatten(0, 1), head.k_t[:, start:end], out=flat[:, : end - start])
    flat[:, end - start :] = -math.inf
    scores = flat.view(group, rows, columns)
    if head.call.spec.causal:
        first = head.request.context + row.rows.start
        hidden_from = max(start, first + 1)
        if hidden_from < end:
            key = torch.arange(hidden_from, end)
            position = torch.arange(first, first + rows)[:, None]
            scores[..., hidden_from - start : end - start].masked_fill_(key > position, -math.inf)
    if row.visited is not None and row.partial is not None:
        span = slice(start // tile_n, blocks(end, tile_n))
        visible = ~row.partial[:, None, span].repeat_interleave(tile_n, -1)
        visible = visible | mask_scores(head.call, head.request, scores, row.heads, row.rows, start)
        visible &= row.visited[:, None, span].repeat_interleave(tile_n, -1)
        scores.masked_fill_(~visible, -math.inf)
    return scores


def _accumulate(head: _Head, row: _Row, scores: torch.Tensor, start: int, span: slice) -> None:
    """The running softmax over one chunk: O += P @ V for the blocks that are kept."""
    kept = None if row.visited is None else row.visited[:, span]
    if head.log2_lambda is None:
        maximum = torch.maximum(row.maximum, scores.amax(-1))
    else:
        maximum, votes = _vote(head.log2_lambda, row, scores, span)
        skips = votes & (torch.arange(span.start, span.stop) != row.first)
        if kept is not None:
            skips &= kept
        skipped = int(skips.sum())
        row.skipped += skipped
        if skipped:
            kept = ~skips if kept is None else kept & ~skips
    base = maximum.masked_fill(maximum == -math.inf, 0.0)
    rescale = torch.exp2(row.maximum - base)
    row.row_sum *= rescale
    row.acc *= rescale[..., None]
    row.maximum = maximum
    v = head.v[start : start + scores.shape[-1]]
    if kept is None or bool(kept.all()):
        p = scores.sub_(base[..., None]).exp2_()
        row.row_sum += p.sum(-1)
        flat = p.view(-1, p.shape[-1])[:, : v.shape[0]]
        row.acc.view(-1, v.shape[1]).addmm_(flat, v)
    else:
        _kept_blocks(head, row, scores, base, v, kept)


def _vote(
    log2_lambda: float, row: _Row, scores: torch.Tensor, span: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running max after the chunk, [group, rows], and which blocks every row votes to skip."""
    group, rows, _ = scores.shape
    block_max = scores.view(group, rows, span.stop - span.start, -1).amax(-1)
    visited = torch.cat([row.maximum[..., None], block_max.flip(-1)], -1)
    running_max = visited.cummax(-1).values[..., 1:].flip(-1)
    drop = block_max - running_max
    # A row that has seen nothing and sees nothing here is (-inf) - (-inf): it votes skip.
    drop.masked_fill_(running_max == -math.inf, -math.inf)
    return running_max[..., 0], drop.amax(1) < log2_lambda


def _kept_blocks(
    head: _Head,
    row: _Row,
    scores: torch.Tensor,
    base: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    tile_n = head.call.spec.geometry.tile_n
    for g, blocks_kept in enumerate(kept.tolist()):
        for n, keep in enumerate(blocks_kept):
            if not keep:
                continue
            keys = slice(n * tile_n, min((n + 1) * tile_n, v.shape[0]))
            p = scores[g, :, keys].sub_(base[g, :, None]).exp2_()
            row.row_sum[g] += p.sum(-1)
            row.acc[g].addmm_(p, v[keys])


def _chunk_keys(tile_n: int) -> int:
    return max(tile_n, CHUNK_KEYS // tile_n * tile_n)
