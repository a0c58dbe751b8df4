"""Inputs for tests and benchmarks whose skip rate is chosen, not found by search.

Every key block has a level that all queries see: chosen blocks are low, below every block to their
right, the others share the highest, 0, so that scores are no larger than a model's. A block is
skipped iff it is low and left of the first row's own; no vote is nearer than 4 (log2) to a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from blasst.kernels.types import LOG2_E, BlockMask, Geometry, MaskMod, PagedKV, RaggedKV

DIALLED_LOG2_LAMBDA = -8.0
_STEP = 16.0
_NOISE = 0.5
_FINE = 16


@dataclass(frozen=True)
class Dialled:
    """One request. skipped: bool [num_kv_heads, m_blocks, n_blocks], what every q head must skip.

    visited: [m_blocks, n_blocks]. low: [num_kv_heads, n_blocks].
    """

    q: torch.Tensor
    kv: RaggedKV
    cu_seqlens_q: torch.Tensor
    skip_lambda: torch.Tensor
    visited: torch.Tensor
    skipped: torch.Tensor
    low: torch.Tensor
    geometry: Geometry = field(default_factory=Geometry)

    @property
    def skip_rate(self) -> float:
        """The rate that is reached: the nearest to the wish that whole blocks allow."""
        return float(self.skipped.sum() / (self.visited.sum() * self.skipped.shape[0]))

    def counts(self, group_size: int) -> torch.Tensor:
        """int64 [num_kv_heads, 2]: what the counters must show."""
        visited = self.visited.sum().expand(self.skipped.shape[0])
        return torch.stack([visited, self.skipped.sum((1, 2))], 1) * group_size


def dialled_inputs(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seqlen: int,
    skip_rate: float,
    context: int = 0,
    causal: bool = True,
    options: DialOptions | None = None,
) -> Dialled:
    """`seqlen` query rows after `context` keys, with a share of skipped blocks near `skip_rate`."""
    options = options or DialOptions()
    generator = torch.Generator().manual_seed(options.seed)
    geometry = options.geometry
    visited, skippable = _reach(seqlen, context, causal, geometry)
    low = torch.stack(
        [_choose_low(visited, skippable, skip_rate, generator) for _ in range(num_kv_heads)]
    )
    total = seqlen + context
    if options.device != "cpu":
        generator = torch.Generator(options.device).manual_seed(options.seed)
    q, k, v = (
        torch.randn(rows, heads, head_dim, generator=generator, device=options.device)
        for rows, heads in ((seqlen, num_heads), (total, num_kv_heads), (total, num_kv_heads))
    )
    tame_queries(q)
    tame_keys(k)
    lower(k, low.to(options.device), geometry)
    return Dialled(
        q=q.to(options.dtype),
        kv=RaggedKV(k.to(options.dtype), v.to(options.dtype), cumulative([total])),
        cu_seqlens_q=cumulative([seqlen]),
        skip_lambda=torch.tensor([2.0**DIALLED_LOG2_LAMBDA]),
        visited=visited,
        skipped=skippable & low[:, None],
        low=low,
        geometry=geometry,
    )


def tame_queries(q: torch.Tensor) -> None:
    """Random queries become ones that see the levels of keys, and little else. In place."""
    _tame(q)
    q[..., :2] = _STEP / (q.shape[-1] ** -0.5 * LOG2_E)


def tame_keys(k: torch.Tensor) -> None:
    """Random keys become ones at level 0. In place."""
    _tame(k)
    k[..., :2] = 0.0


def _tame(t: torch.Tensor) -> None:
    dim = t.shape[-1]
    t *= (_NOISE / (dim**-0.5 * LOG2_E * (dim - 2) ** 0.5)) ** 0.5


def lower(k: torch.Tensor, low: torch.Tensor, geometry: Geometry) -> None:
    """Put tame keys [total, num_kv_heads, head_dim] at the levels of `low`. In place.

    low: bool [num_kv_heads, n_blocks], on k's device.
    """
    n_blocks = low.shape[1]
    level = torch.where(low, torch.arange(n_blocks, device=low.device) - n_blocks, 0)
    key_level = level.repeat_interleave(geometry.tile_n, 1)[:, : k.shape[0]].t()
    # Two columns hold the level as small whole numbers, which are exact in every dtype.
    k[..., 0] = (key_level // _FINE * _FINE).to(k.dtype)
    k[..., 1] = (key_level % _FINE).to(k.dtype)


def low_blocks(
    seqlen: int, num_kv_heads: int, skip_rate: float, geometry: Geometry, seed: int = 0
) -> torch.Tensor:
    """bool [num_kv_heads, n_blocks]: what a causal prompt must hold low to skip that share."""
    visited, skippable = _reach(seqlen, 0, True, geometry)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [_choose_low(visited, skippable, skip_rate, generator) for _ in range(num_kv_heads)]
    )


@dataclass(frozen=True)
class DialOptions:
    """What most callers leave alone. device: where q, k and v are drawn and left."""

    dtype: torch.dtype = torch.float32
    geometry: Geometry = field(default_factory=Geometry)
    seed: int = 0
    device: str = "cpu"


def _reach(
    seqlen: int, context: int, causal: bool, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [m_blocks, n_blocks]: visited, and visited with every row having seen an own block."""
    total = seqlen + context
    column = torch.arange(-(-total // geometry.tile_n))
    first_row = torch.arange(0, seqlen, geometry.tile_m)
    last_row = (first_row + geometry.tile_m).clamp(max=seqlen) - 1
    if not causal:
        last = torch.full_like(first_row, total - 1)
        first = last
    else:
        first, last = first_row + context, last_row + context
    visited = column <= (last // geometry.tile_n)[:, None]
    return visited, column < (first // geometry.tile_n)[:, None]


def _choose_low(
    visited: torch.Tensor, skippable: torch.Tensor, skip_rate: float, generator: torch.Generator
) -> torch.Tensor:
    """bool [n_blocks]: random blocks whose skips add up to the rate, or as near as they can."""
    wanted = skip_rate * float(visited.sum())
    gain = skippable.sum(0)
    low = torch.zeros(gain.numel(), dtype=torch.bool)
    reached = 0.0
    for n in torch.randperm(gain.numel(), generator=generator).tolist():
        if abs(reached + float(gain[n]) - wanted) < abs(reached - wanted):
            low[n] = True
            reached += float(gain[n])
    return low


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [batch + 1] from lengths."""
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]).int()


def paged(
    kv: RaggedKV, page_size: int, *, transposed_keys: bool = False, poison: float = float("nan")
) -> PagedKV:
    """The same keys in shuffled pages; all that belongs to no key holds `poison`.

    transposed_keys: inside a page, k is stored [head_dim, page_size] (vLLM's CPU cache).
    """
    ends = kv.cu_seqlens_k.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    pages = [-(-n // page_size) for n in lengths]
    total, heads, dim = sum(pages) + 3, kv.k.shape[1], kv.k.shape[2]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).tolist()
    k = torch.full((total, heads, dim, page_size), poison, dtype=kv.k.dtype).permute(0, 3, 1, 2)
    if not transposed_keys:
        k = k.contiguous()
    v = torch.full((total, heads, page_size, dim), poison, dtype=kv.v.dtype).transpose(1, 2)
    table = torch.full((len(lengths), max([*pages, 1]) + 1), -1, dtype=torch.int32)
    for i, length in enumerate(lengths):
        for j in range(pages[i]):
            page = order.pop()
            table[i, j] = page
            at = slice(ends[i] + j * page_size, ends[i] + min((j + 1) * page_size, length))
            k[page, : at.stop - at.start] = kv.k[at]
            v[page, : at.stop - at.start] = kv.v[at]
    return PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32))


def block_mask_from(
    mask_mod: MaskMod,
    *,
    seqlens: Sequence[tuple[int, int]],
    num_heads: int,
    geometry: Geometry | None = None,
) -> BlockMask:
    """Block lists of a mask_mod by looking at every element; seqlens: (queries, keys) a request."""
    geometry = geometry or Geometry()
    m_blocks = max(-(-sq // geometry.tile_m) for sq, _ in seqlens)
    n_blocks = max(-(-sk // geometry.tile_n) for _, sk in seqlens)
    some = torch.zeros(len(seqlens), num_heads, m_blocks, n_blocks, dtype=torch.bool)
    every = torch.zeros_like(some)
    head = torch.arange(num_heads)[:, None, None]
    for b, (sq, sk) in enumerate(seqlens):
        query, key = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
        seen = mask_mod(torch.tensor(b), head, query, key).expand(num_heads, sq, sk)
        for m, rows in enumerate(torch.split(seen, geometry.tile_m, 1)):
            for n, tile in enumerate(torch.split(rows, geometry.tile_n, 2)):
                some[b, :, m, n] = tile.flatten(1).any(1)
                every[b, :, m, n] = tile.flatten(1).all(1)
    lists = []
    for chosen in (some & ~every, every):
        counts = chosen.sum(-1).int()
        lists += [counts, chosen.int().argsort(dim=-1, descending=True, stable=True).int()]
    return BlockMask(mask_mod, *lists)


def dense_attention(
    q: torch.Tensor,
    kv: RaggedKV,
    cu_seqlens_q: torch.Tensor,
    *,
    causal: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Plain softmax over whole score matrices in `dtype`: [total_q, num_heads, head_dim]."""
    out = torch.zeros_like(q, dtype=dtype)
    q_ends, k_ends = cu_seqlens_q.tolist(), kv.cu_seqlens_k.tolist()
    for (a, b), (c, d) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        if a == b or c == d:
            continue
        group = q.shape[1] // kv.k.shape[1]
        k, v = (t[c:d].to(dtype).repeat_interleave(group, 1).transpose(0, 1) for t in (kv.k, kv.v))
        scores = q[a:b].to(dtype).transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
        if causal:
            key, position = torch.arange(d - c), torch.arange(b - a)[:, None] + (d - c) - (b - a)
            scores = scores.masked_fill(key > position, -torch.inf)
        out[a:b] = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1)
    return out


def error_budget(
    q: torch.Tensor, kv: RaggedKV, cu_seqlens_q: torch.Tensor, *, causal: bool
) -> float:
    """Twice the error of plain float32 softmax stored in q's dtype, and a band for rounding."""
    exact = dense_attention(q, kv, cu_seqlens_q, causal=causal, dtype=torch.float64)
    plain = dense_attention(q, kv, cu_seqlens_q, causal=causal, dtype=torch.float32)
    largest = float(kv.v.abs().max()) if kv.v.numel() else 0.0
    band = torch.finfo(q.dtype).eps * largest
    return 2 * float((plain.to(q.dtype).double() - exact).abs().max()) + band
