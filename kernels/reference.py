"""The oracle: one tile after the other in float64, as DESIGN section 2 states it. Slow on purpose.

Returns the exact skip map and how far each vote was from the other outcome, so that tests can
leave out ties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from blasst.kernels.call import Call, Request, check_call
from blasst.kernels.errors import InvalidInputError
from blasst.kernels.support import packing_reasons
from blasst.kernels.tiles import blocks, key_end, mask_scores, partial_blocks, visited_blocks
from blasst.kernels.types import LN_2, LOG2_E, AttentionSpec, PagedKV, RaggedKV


@dataclass(frozen=True)
class ReferenceResult:
    """out: float64 like q; lse: float64 [num_heads, total_q], natural log.

    Lists: one entry a request, each [num_heads, m_blocks, n_blocks], or [bundles, ...] where the
    geometry has heads vote together. visited, skipped: bool.
    margin: float64, in log2 units, the group's largest block_max - running_max, minus log2(lambda):
    below 0 = skipped, near 0 = a tie; +inf for the first visited block and for unvisited ones.
    """

    out: torch.Tensor
    lse: torch.Tensor
    visited: list[torch.Tensor] = field(default_factory=list)
    skipped: list[torch.Tensor] = field(default_factory=list)
    margin: list[torch.Tensor] = field(default_factory=list)

    def counts(self, num_kv_heads: int) -> torch.Tensor:
        """int64 [num_kv_heads, 2]: blocks visited and skipped."""
        total = torch.zeros(num_kv_heads, 2, dtype=torch.int64, device=self.out.device)
        for visited, skipped in zip(self.visited, self.skipped, strict=True):
            for column, maps in enumerate((visited, skipped)):
                total[:, column] += maps.reshape(num_kv_heads, -1).sum(-1)
        return total

    @property
    def skip_rate(self) -> float:
        """Skipped over visited blocks; 0 when nothing is visited."""
        visited, skipped = self.counts(1)[0].tolist()
        return float(skipped / visited) if visited else 0.0

    @property
    def smallest_margin(self) -> float:
        """The distance of the closest vote from a tie, in log2 units."""
        return min((float(m.abs().min()) for m in self.margin if m.numel()), default=math.inf)


@torch.no_grad()
def reference_attention(
    q: torch.Tensor,
    kv: PagedKV | RaggedKV,
    cu_seqlens_q: torch.Tensor,
    *,
    spec: AttentionSpec | None = None,
    skip_lambda: torch.Tensor | None = None,
) -> ReferenceResult:
    """Same inputs and rules as `prefill_attention`; any head_dim, device and dtype."""
    call = check_call(q, kv, cu_seqlens_q, spec or AttentionSpec(), skip_lambda, None, None)
    reasons = packing_reasons(call.problem)
    if reasons:
        raise InvalidInputError(reasons)
    return run_reference(call)


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """The implementation "reference" of prefill_attention: fills `out`, returns lse."""
    result = run_reference(call)
    for request in call.requests:
        rows = slice(request.q_start, request.q_start + request.seqlen_q)
        out[rows] = result.out[rows].to(out.dtype)
    if counters is not None and call.log2_lambda is not None:
        counters += result.counts(call.problem.num_kv_heads)
    return result.lse.float()


def run_reference(call: Call) -> ReferenceResult:
    """The oracle on a checked call."""
    q = call.q
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    result = ReferenceResult(out, lse)
    for request in call.requests:
        bundles = q.shape[1] // call.geometry.heads
        visited = visited_blocks(call, request).expand(bundles, -1, -1)
        result.visited.append(visited)
        result.skipped.append(torch.zeros_like(visited))
        result.margin.append(
            torch.full(visited.shape, math.inf, dtype=torch.float64, device=q.device)
        )
        _attend(call, request, result)
    return result


def _attend(call: Call, request: Request, result: ReferenceResult) -> None:
    if not request.seqlen_k:
        return
    pairs = [call.gather(request, h) for h in range(call.problem.num_kv_heads)]
    k, v = (
        torch.stack([pair[i] for pair in pairs]).double().repeat_interleave(call.group_size, 0)
        for i in (0, 1)
    )
    tile_m = call.geometry.positions
    for m in range(blocks(request.seqlen_q, tile_m)):
        rows = range(m * tile_m, min((m + 1) * tile_m, request.seqlen_q))
        at = slice(request.q_start + rows.start, request.q_start + rows.stop)
        q = call.q[at].double().transpose(0, 1) * (call.softmax_scale * LOG2_E)
        out, lse = _tile_row(call, request, result, m, rows, (q, k, v))
        result.out[at] = out.transpose(0, 1)
        result.lse[:, at] = lse


def _tile_row(
    call: Call,
    request: Request,
    result: ReferenceResult,
    m: int,
    rows: range,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile of query rows over its key blocks, all heads at once: out and lse."""
    q, k, v = qkv
    tile_n, heads = call.geometry.tile_n, call.geometry.heads
    log2_lambda = -math.inf if call.log2_lambda is None else call.log2_lambda[request.index]
    running_max = torch.full(q.shape[:2], -math.inf, dtype=q.dtype, device=q.device)
    row_sum = torch.zeros_like(running_max)
    acc = torch.zeros_like(q)
    started = torch.zeros(q.shape[0] // heads, dtype=torch.bool, device=q.device)
    visited = result.visited[-1][:, m]
    for n in reversed(range(visited.shape[1])):
        visits = visited[:, n]
        if not visits.any():
            continue
        keys = range(n * tile_n, min((n + 1) * tile_n, request.seqlen_k))
        # S = Q @ K.T, in log2 units
        scores = q @ k[:, keys.start : keys.stop].transpose(1, 2)
        scores = torch.where(_visible(call, request, m, rows, n, scores), scores, -math.inf)
        block_max = scores.amax(-1)
        new_max = torch.maximum(running_max, block_max)
        # A row that has seen nothing and sees nothing here is (-inf) - (-inf): it votes skip.
        drop = torch.where(new_max == -math.inf, -math.inf, block_max - new_max)
        margin = drop.reshape(-1, heads * drop.shape[1]).amax(-1) - log2_lambda
        skips = visits & started & (margin < 0) if log2_lambda > -math.inf else visits & False
        result.skipped[-1][:, m, n] = skips
        result.margin[-1][:, m, n] = torch.where(visits & started, margin, math.inf)
        started |= visits
        keeps = (visits & ~skips).repeat_interleave(heads)[:, None]
        new_max = torch.where(keeps, new_max, running_max)
        base = torch.where(new_max > -math.inf, new_max, 0.0)
        p = torch.exp2(scores - base[..., None])
        rescale = torch.exp2(running_max - base)
        row_sum = torch.where(keeps, row_sum * rescale + p.sum(-1), row_sum)
        # O += P @ V
        new_acc = acc * rescale[..., None] + p @ v[:, keys.start : keys.stop]
        acc = torch.where(keeps[..., None], new_acc, acc)
        running_max = new_max
    # == 0, not > 0: a NaN must show.
    out = torch.where(row_sum[..., None] == 0, 0.0, acc / row_sum[..., None])
    return out, (running_max + torch.log2(row_sum)) * LN_2


def _visible(
    call: Call, request: Request, m: int, rows: range, n: int, scores: torch.Tensor
) -> torch.Tensor:
    """bool like scores [num_heads, rows, keys]."""
    heads = range(scores.shape[0])
    first_key = n * call.geometry.tile_n
    visible = torch.ones_like(scores, dtype=torch.bool)
    if call.spec.block_mask is not None:
        partial = partial_blocks(
            call.spec.block_mask, request, visited_blocks(call, request)
        ).expand(scores.shape[0], -1, -1)[:, m, n]
        allowed = mask_scores(call, request, scores, heads, rows, first_key)
        visible &= allowed | ~partial[:, None, None]
    if call.spec.causal:
        reach = [key_end(call, request, row + 1) for row in rows]
        key = torch.arange(first_key, first_key + scores.shape[-1], device=scores.device)
        visible &= key < torch.tensor(reach, device=scores.device)[:, None]
    return visible
